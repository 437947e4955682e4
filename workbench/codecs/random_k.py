"""Random-k: values at random positions, which the receiver draws from the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Generator, Tensor

from workbench.arguments import is_number
from workbench.codecs.base import Codec
from workbench.codecs.groups import typed
from workbench.errors import ConfigError

SEED_BYTES = 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(Codec):
    """y_i = x_i at k positions, drawn without replacement, else 0. 4 bytes for each of the k, and 8 for the seed.

    Positions are not sent: sender and receiver draw them from the message's seed. So a message has about half the bytes
    of `TopK`, but its k values are not the largest: E ||x - y||**2 = (1 - k/n) ||x||**2. Biased: needs `ErrorFeedback`.
    (Multiplied by n/k it would be unbiased, with an error of n/k - 1.) A NaN or an infinity anywhere decodes the whole
    message to NaN.

    Attributes:
        fraction: share of a message's values that are sent, k / n, rounded to the nearest k, 1 or more.

    Paper: stich2018sparsified, definition 2.1 (k-contraction, rand_k).
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ConfigError(
                f"fraction={self.fraction!r}: give the share of the values that is sent, above 0 and at most 1"
            )

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def reencodes(self) -> bool:
        return False

    def num_kept(self, numel: int) -> int:
        """Return k for a message of `numel` values."""
        return min(numel, max(1, round(self.fraction * numel)))

    def wire_bytes(self, numel: int) -> int:
        return SEED_BYTES + 4 * self.num_kept(numel) if numel else 0

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        numel, kept = values.numel(), self.num_kept(values.numel())
        wire = torch.empty(self.wire_bytes(numel), dtype=torch.uint8, device=values.device)
        if wire.is_meta or not numel:
            return wire
        values = values.float()
        seed = torch.randint(2**62, (1,), generator=noise, device=values.device)
        chosen = values[_positions(seed, numel, kept)]
        wire[:SEED_BYTES].view(torch.int64).copy_(seed)
        wire[SEED_BYTES:].view(torch.float32).copy_(torch.where(values.isfinite().all(), chosen, torch.nan))
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta or not like.numel():
            return torch.zeros_like(like)
        chosen = typed(wire[SEED_BYTES:], torch.float32).to(like.dtype)
        others = torch.where(chosen.isfinite().all(), 0.0, torch.nan).to(like.dtype)
        places = _positions(typed(wire[:SEED_BYTES], torch.int64), like.numel(), chosen.numel())
        return others.repeat(like.numel()).index_copy_(0, places, chosen)


def _positions(seed: Tensor, numel: int, num: int) -> Tensor:
    """Return `num` of `numel` positions, ascending, as drawn from a seed of shape (1,): the same on every device."""
    drawn = np.random.default_rng(int(seed)).choice(numel, num, replace=False, shuffle=False)
    return torch.from_numpy(np.sort(drawn)).to(seed.device)
