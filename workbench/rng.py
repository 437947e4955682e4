"""Randomness by (seed, stream, rank, step): no global seed, no hidden state.

Two streams never share numbers. The numbers of a step do not depend on the number of steps before it. So a resumed
run, another runtime and a simulated worker all draw the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(seed: int, stream: str, rank: int = 0, step: int = 0) -> int:
    """Return a 63-bit seed that depends on these four arguments only.

    >>> derive_seed(0, "data") == derive_seed(0, "data"), derive_seed(0, "data") == derive_seed(0, "dropout")
    (True, False)
    """
    words = f"{seed}/{stream}/{rank}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


def generator(seed: int, stream: str, rank: int = 0, step: int = 0) -> np.random.Generator:
    """Return a NumPy generator for that stream."""
    return np.random.default_rng(derive_seed(seed, stream, rank, step))
