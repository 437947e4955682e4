"""Binomial tree: in each round, half of the remaining ranks send their sum to another rank and drop out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from workbench.collectives.base import Link
from workbench.collectives.rooted import SPREADING, SUMMING, Rooted
from workbench.collectives.wire import wire_share, wires
from workbench.ops import Program, Value
from workbench.program import Context


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tree(Rooted):
    """Sums go up a binomial tree, and the whole sum goes down it. Rank i's parent is i without its lowest set bit.

    2 ceil(log2 p) messages one after the other: the fastest for short values. Each rank but 0 sends n bytes up, and n
    to each of its children.

    Paper: thakur2005optimization (the binomial trees of reduce and broadcast).
    """

    def reduce(self, ctx: Context, value: Value) -> Program:
        for wire in wires(ctx, value, self.codec):
            everything = (0, wire.numel)
            for child in children(ctx.rank, ctx.num_workers):
                message = yield from wire.receive(child, everything, SUMMING)
                yield from wire.add(*everything, message)
            if ctx.rank:
                message = yield from wire.pack(*everything, SUMMING)
                yield from wire.send(parent(ctx.rank), message, SUMMING)

    def broadcast(self, ctx: Context, value: Value) -> Program:
        for wire in wires(ctx, value, self.codec):
            everything = (0, wire.numel)
            if ctx.rank:
                message = yield from wire.receive(parent(ctx.rank), everything, SPREADING)
            else:
                message = yield from wire.pack(*everything, SPREADING)
            for child in reversed(children(ctx.rank, ctx.num_workers)):  # the child with the largest subtree first
                yield from wire.send(child, message, SPREADING)
            if ctx.rank:
                yield from wire.put(everything, message)
            else:
                yield from wire.adopt(*everything, message)

    def num_broadcast(self, rank: int, num_workers: int) -> int:
        return len(children(rank, num_workers))

    def reduce_s(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """ceil(log2 p) (alpha + n beta + n gamma)."""
        rounds = (num_workers - 1).bit_length()
        return self.broadcast_s(num_bytes, num_workers, link) + rounds * num_bytes * link.sum_s_per_byte

    def broadcast_s(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """ceil(log2 p) (alpha + n beta)."""
        rounds = (num_workers - 1).bit_length()
        return rounds * (link.latency_s + wire_share(self.codec, num_bytes) * num_bytes / link.bandwidth_bytes_per_s)


def parent(rank: int) -> int:
    """Return the rank to which a rank sends its sum.

    >>> [parent(rank) for rank in range(1, 8)]
    [0, 0, 2, 0, 4, 4, 6]
    """
    return rank & (rank - 1)


def children(rank: int, num_workers: int) -> list[int]:
    """Return the ranks that send their sums to this one, those with the smallest subtree first.

    >>> children(0, 6), children(4, 6), children(5, 6)
    ([1, 2, 4], [5], [])
    """
    lowest = rank & -rank or num_workers
    steps = [1 << bit for bit in range(num_workers.bit_length()) if 1 << bit < lowest]
    return [rank + step for step in steps if rank + step < num_workers]
