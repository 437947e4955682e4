"""Codecs: compression of float32 values for the wire.

- `base`: `Codec`, which turns values into fewer bytes and back, with a known error bound.
- `truncate`, `float16`, `linear`, `shared_int`, `qsgd`, `tern_grad`, `natural`, `sign`, `top_k`, `random_k`: one kind
  of codec each. `feedback` adds error feedback to any that contracts.
- `groups`: values that share a scale, and the layout of numbers in a message.
- `kernels`: selects the same codes by kernels: `compiled` on a CPU (`compiled.c`, which `compiler` compiles at the first
  use), `triton_kernels` on a GPU (which `gpu` tries).

Imports only `config` and what is below it. Used by `collectives`, `algorithms`, `runtimes` and layers above. Begin
with `base`, then `truncate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.codecs.base import Codec, SummableCodec
from workbench.codecs.feedback import ErrorFeedback
from workbench.codecs.float16 import Float16
from workbench.codecs.linear import Linear8
from workbench.codecs.natural import NaturalCompression
from workbench.codecs.qsgd import QSGD
from workbench.codecs.random_k import RandomK
from workbench.codecs.shared_int import SharedInt, SharedInt8
from workbench.codecs.sign import Sign
from workbench.codecs.tern_grad import TernGrad
from workbench.codecs.top_k import TopK
from workbench.codecs.truncate import Truncate16
from workbench.errors import ConfigError
from workbench.naming import call_checked, kebab, unknown

__all__ = [
    "QSGD",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "Linear8",
    "NaturalCompression",
    "RandomK",
    "SharedInt",
    "SharedInt8",
    "Sign",
    "SummableCodec",
    "TernGrad",
    "TopK",
    "Truncate16",
    "check_codec",
    "find",
    "get",
    "names",
]

_CODECS: dict[str, Callable[..., Codec]] = {
    kebab(make.__name__): make
    for make in (
        Truncate16,
        Float16,
        Linear8,
        QSGD,
        TernGrad,
        NaturalCompression,
        TopK,
        RandomK,
        Sign,
        SharedInt8,
        SharedInt,
    )
}


def check_codec(codec: object) -> None:
    """Raise `ConfigError` unless it is a codec without memory, which may be used in a collective's hops."""
    if isinstance(codec, ErrorFeedback):
        raise ConfigError(
            "error feedback does not work in the hops of a collective, because a partial sum has no next step: use "
            f"Once(codec={codec!r})"
        )
    if not isinstance(codec, Codec):
        raise ConfigError(f"codec={codec!r}: give one of {', '.join(names())}, such as Truncate16(), or None")


def names() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    >>> names()[:4]
    ('truncate16', 'float16', 'linear8', 'qsgd')
    """
    return tuple(_CODECS)


def find(name: str) -> Callable[..., Codec]:
    """Return the class of a codec by name, or the function that makes it.

    Raises:
        ConfigError: unknown name.
    """
    if name.lower() not in _CODECS:
        raise unknown("codec", name, _CODECS)
    return _CODECS[name.lower()]


def get(name: str, **options: Any) -> Codec:
    """Return a codec by name, with its settings.

    >>> get("top-k", fraction=0.05)
    TopK(fraction=0.05, k=None)

    Raises:
        ConfigError: unknown name, or unknown setting.
    """
    codec: Codec = call_checked(name, find(name), options)
    return codec
