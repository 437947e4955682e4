"""Collectives: algorithms that sum a value over all ranks, as sub-programs of `Send` and `Recv`.

- `base`: `Collective`, what all of them have in common; and `Native`, the library's own sum.
- `ring`, `tree`, `direct`, `halving_doubling`, `linear`, `hierarchical`: one algorithm each. `rooted` is what those
  with a root share. `auto` chooses the fastest for a size and a link.
- `once`, `low_rank`: compression around a whole sum, by a codec or by PowerSGD.
- `wire`: the messages of a collective, with a codec in each hop. `memory`: what is kept from step to step.
- `algorithm`: the base of training algorithms that sum by a collective.

Imports `codecs`, `program` and layers below. Used by `algorithms`, `runtimes`, `theory` and layers above. Begin
with `base`, then `ring`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench import codecs
from workbench.codecs.base import Codec
from workbench.collectives.auto import Auto
from workbench.collectives.base import Collective, Link, Native, flat_of, native_bytes
from workbench.collectives.direct import Direct
from workbench.collectives.halving_doubling import HalvingDoubling
from workbench.collectives.hierarchical import Hierarchical
from workbench.collectives.linear import Linear
from workbench.collectives.low_rank import PowerSGD
from workbench.collectives.memory import fold_lanes
from workbench.collectives.once import Once
from workbench.collectives.ring import Ring
from workbench.collectives.tree import Tree
from workbench.errors import ConfigError
from workbench.naming import kebab, unknown

__all__ = [
    "Auto",
    "Collective",
    "Direct",
    "HalvingDoubling",
    "Hierarchical",
    "Linear",
    "Link",
    "Native",
    "Once",
    "PowerSGD",
    "Ring",
    "Tree",
    "check_collective",
    "find",
    "flat_of",
    "fold_lanes",
    "get",
    "names",
    "native_bytes",
    "with_codec",
]

_COLLECTIVES: dict[str, type[Collective]] = {
    kebab(collective.__name__): collective
    for collective in (Native, Ring, Direct, Linear, Tree, HalvingDoubling, Hierarchical, Auto, PowerSGD, Once)
}


def check_collective(collective: object) -> None:
    """Raise `ConfigError` unless an algorithm can train with this collective."""
    if not isinstance(collective, Collective):
        raise ConfigError(
            f"collective={collective!r}: give one of "
            f"{', '.join(sorted(made.__name__ for made in _COLLECTIVES.values()))}, such as Ring()"
        )
    if lost := collective.uncorrected:
        fix = (
            "PowerSGD(error_feedback=True)"
            if isinstance(collective, PowerSGD)
            else f"Once(codec=ErrorFeedback(codec={lost}))"
        )
        raise ConfigError(
            f"{collective} loses part of every gradient permanently ({lost}), so training differs from the exact sum. "
            f"Add the loss to the next sum: use {fix}"
        )


def with_codec(collective: Collective, codec: Codec) -> Collective:
    """Return the collective with a codec in its hops; for `Auto`, in the hops of every candidate.

    Raises:
        ConfigError: it has no hops.
    """
    given: Any = collective
    if isinstance(given, Auto):
        return Auto(candidates=tuple(with_codec(candidate, codec) for candidate in given.candidates))
    if not hasattr(given, "codec"):
        raise ConfigError(
            f"{collective} takes no codec: use a collective that sends messages itself, such as Ring(codec=...)"
        )
    with_it: Collective = replace(given, codec=codec)
    return with_it


def names() -> tuple[str, ...]:
    """Return the names that `get` accepts.

    >>> names()[:3]
    ('native', 'ring', 'direct')
    """
    return tuple(_COLLECTIVES)


def find(name: str) -> type[Collective]:
    """Return the class of a collective by name.

    Raises:
        ConfigError: no such collective.
    """
    if name.lower() not in _COLLECTIVES:
        raise unknown("collective", name, _COLLECTIVES)
    return _COLLECTIVES[name.lower()]


def get(name: str) -> Collective:
    """Return a collective by name, optionally with a codec after a colon.

    The codec is for its hops ("ring:truncate16"), or once around the sum ("once:linear8"). A codec once around the sum
    may have error feedback: "once:top-k+feedback".

    >>> get("halving-doubling"), get("ring")
    (HalvingDoubling(), Ring())
    >>> get("once:top-k+feedback").codec
    ErrorFeedback(codec=TopK(fraction=None, k=None))

    Raises:
        ConfigError: no such collective.
    """
    name, colon, codec_name = name.partition(":")
    kind = find(name)
    if not colon:
        if kind is Once:
            raise ConfigError(
                f"collective='once' needs a codec: one of {', '.join(f'once:{codec}' for codec in codecs.names())}"
            )
        return kind()
    codec_name, plus, feedback = codec_name.partition("+")
    if plus and feedback != "feedback":
        raise ConfigError(f"collective={name}:{codec_name}+{feedback}: only +feedback can follow a codec")
    codec = codecs.get(codec_name)
    if kind is Once:
        return Once(codec=codecs.ErrorFeedback(codec=codec) if plus else codec)
    if plus:
        codecs.check_codec(codecs.ErrorFeedback(codec=codec))
    return with_codec(kind(), codec)
