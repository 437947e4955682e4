"""Chooses the fastest collective for a size, a number of ranks and a link, by the collectives' formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

from workbench.collectives.base import Collective, Link, Native, PlainLink, flat_of
from workbench.collectives.halving_doubling import HalvingDoubling
from workbench.collectives.ring import Ring
from workbench.collectives.tree import Tree
from workbench.errors import ConfigError
from workbench.ops import Program, Request, Value
from workbench.program import Context
from workbench.units import MIB

MARGIN = 1.4  # a measurement at a run's beginning is sometimes off by a third
WIRE_MARGIN = 1.05  # less, where the wire is the limit: there the ring is measured as well
WIRE_BINDS = 50.0  # the wire is the limit if a processor sums this many times faster
OF_MESSAGES_S = 2e-4  # overhead of a sum of messages: sub-programs are Python
PIECE_BYTES = 8 * MIB  # of a long ring's messages: their memory is reused
NEW_BYTES = 32 * MIB  # from this length on, a message's memory is new each time, and mapped page by page
NEW_S_PER_BYTE = 1e-9  # to map it


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Auto(Collective):
    """The candidate with the least `seconds`: latency decides for short values, bandwidth for long ones.

    The choice depends only on the value's bytes, p and `ctx.link`. These are equal on all ranks, so all make the same
    choice. If candidates take the same time, the first one is chosen. One choice is made for all buckets of a gradient.

    On real ranks, the library's own all-reduce is measured with the link (`native_s`), and also the ratio of a ring's
    time to its formula (`slowdown`). A candidate is used only if it is predicted to be `MARGIN` times as fast as the
    library's all-reduce. On a slow wire, `WIRE_MARGIN` times is enough: formulas predict wires better than processors.
    With a codec, or in a simulation, the library is not considered.

    A plain `Ring()` among the candidates gets as many `chunks` as keep its messages at 8 MiB or less.

    Attributes:
        candidates: collectives of which the fastest is used for each size.

    Paper: thakur2005optimization, which also switches by size.
    """

    candidates: tuple[Collective, ...] = (Tree(), HalvingDoubling(), Ring())

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, tuple) or not self.candidates:
            raise ConfigError(
                f"candidates={self.candidates!r}: give a tuple of collectives to choose from, such as (Tree(), Ring())"
            )
        for candidate in self.candidates:
            if not isinstance(candidate, Collective) or isinstance(candidate, Native | Auto):
                raise ConfigError(
                    f"candidates: no formula predicts the time of {candidate!r}: use Tree(), HalvingDoubling(), "
                    "Ring(), ..."
                )
            candidate.seconds(1.0, 2, PlainLink())  # raises if it has no formula

    @property
    def needs_link(self) -> bool:
        return True

    @property
    def lossy(self) -> bool:
        return any(candidate.lossy for candidate in self.candidates)

    @property
    def exact(self) -> Collective:
        return Auto(candidates=tuple(candidate.exact for candidate in self.candidates)) if self.lossy else self

    @property
    def uncorrected(self) -> str:
        return next((candidate.uncorrected for candidate in self.candidates if candidate.uncorrected), "")

    @property
    def keeps_residual(self) -> bool:
        return any(candidate.keeps_residual for candidate in self.candidates)

    @property
    def calls_library(self) -> bool:
        """True if no candidate has a codec: it may then choose the library's all-reduce where links are measured."""
        return not self.lossy or any(candidate.calls_library for candidate in self.candidates)

    def check(self, num_workers: int) -> None:
        for candidate in self.candidates:
            candidate.check(num_workers)

    def chosen(self, num_bytes: float, num_workers: int, link: Link) -> Collective:
        """Return the candidate for a value of this many bytes.

        >>> from types import SimpleNamespace
        >>> link = SimpleNamespace(latency_s=1e-5, bandwidth_bytes_per_s=1e9, sum_s_per_byte=0.0)
        >>> Auto().chosen(8, 10, link), Auto().chosen(8e6, 10, link)
        (HalvingDoubling(), Ring())
        """
        native_s, slowdown = getattr(link, "native_s", None), getattr(link, "slowdown", 1.0)

        def predicted_s(candidate: Collective) -> float:
            formula_s = candidate.seconds(num_bytes, num_workers, link)
            return (
                formula_s
                if native_s is None
                else slowdown * formula_s + _new_memory_s(candidate, num_bytes, num_workers)
            )

        best = min(self._variants(num_bytes, num_workers), key=predicted_s)
        promised_s = predicted_s(best) + OF_MESSAGES_S
        margin = WIRE_MARGIN if link.bandwidth_bytes_per_s * link.sum_s_per_byte * WIRE_BINDS < 1.0 else MARGIN
        if native_s is None or self.lossy or native_s(num_bytes) > margin * promised_s:
            return best
        return Native()

    def _variants(self, num_bytes: float, num_workers: int) -> list[Collective]:
        """Return the candidates, with a plain ring cut into chunks."""
        pieces = max(1, math.ceil(num_bytes / num_workers / PIECE_BYTES))
        return [
            replace(candidate, chunks=pieces) if candidate == Ring() else candidate for candidate in self.candidates
        ]

    def select(self, ctx: Context, value: Value) -> Collective:
        if ctx.num_workers == 1:
            return self.candidates[0]  # there is nothing to choose, and no link
        if ctx.link is None:
            raise ConfigError(
                "Auto needs the cost of the network, which is unknown here: name a collective, such as Ring() or Tree()"
            )
        flat = flat_of(value)
        num_bytes = flat.numel() * flat.element_size()
        try:
            return _chosen(self, num_bytes, ctx.num_workers, ctx.link)
        except TypeError:  # a user's collective, codec or link without a hash
            return self.chosen(num_bytes, ctx.num_workers, ctx.link)

    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        return self.select(ctx, value).all_reduce(ctx, value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Return what all candidates and the library send, if they all send the same.

        Otherwise NaN: it depends on the link, so call `chosen` with one.
        """
        sent = {candidate.bytes_sent(rank, num_workers, numel, itemsize, tail) for candidate in self.candidates}
        if not self.lossy:
            sent.add(Native().bytes_sent(rank, num_workers, numel, itemsize, tail))
        return sent.pop() if len(sent) == 1 else math.nan

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Return the least seconds of the candidates."""
        return self.chosen(num_bytes, num_workers, link).seconds(num_bytes, num_workers, link)


@lru_cache(maxsize=128)
def _chosen(auto: Auto, num_bytes: int, num_workers: int, link: Link) -> Collective:
    """`Auto.chosen`, cached: the formulas take longer than a short sum."""
    return auto.chosen(num_bytes, num_workers, link)


def _new_memory_s(candidate: Collective, num_bytes: float, num_workers: int) -> float:
    """Return the seconds to map the memory of very long messages, on the rank that receives the most."""
    rounds = (num_workers - 1).bit_length()
    match candidate:
        case HalvingDoubling():
            messages = [num_bytes / (1 << number) for number in range(1, rounds + 1)] * 2
        case Tree():
            messages = [num_bytes] * 2 * rounds
        case _:
            messages = []
    return NEW_S_PER_BYTE * sum(size for size in messages if size >= NEW_BYTES)
