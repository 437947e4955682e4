"""Linear all-reduce: rank 0 receives each value in order of rank, sums, and sends the sum back."""

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
class Linear(Rooted):
    """Rank 0 sums in rank order, ((g_0 + g_1) + g_2) + ..., for every length and every cut into buckets.

    Slow: rank 0 receives and sends (p-1) n bytes. Without a codec it is exactly reproducible: the reference for other
    collectives.
    """

    def reduce(self, ctx: Context, value: Value) -> Program:
        for wire in wires(ctx, value, self.codec):
            if ctx.rank:
                yield from wire.send(0, (yield from wire.pack(0, wire.numel, SUMMING)), SUMMING)
                continue
            for source in range(1, ctx.num_workers):
                message = yield from wire.receive(source, (0, wire.numel), SUMMING)
                yield from wire.add(0, wire.numel, message)

    def broadcast(self, ctx: Context, value: Value) -> Program:
        for wire in wires(ctx, value, self.codec):
            everything = (0, wire.numel)
            if ctx.rank:
                message = yield from wire.receive(0, everything, SPREADING)
                yield from wire.put(everything, message)
                continue
            message = yield from wire.pack(*everything, SPREADING)
            for to in range(1, ctx.num_workers):
                yield from wire.send(to, message, SPREADING)
            yield from wire.adopt(*everything, message)

    def num_broadcast(self, rank: int, num_workers: int) -> int:
        return num_workers - 1 if rank == 0 else 0

    def reduce_s(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """(p-1) (alpha + n beta + n gamma): rank 0 receives and adds one value after another."""
        return self.broadcast_s(num_bytes, num_workers, link) + (num_workers - 1) * num_bytes * link.sum_s_per_byte

    def broadcast_s(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """(p-1) (alpha + n beta)."""
        return (num_workers - 1) * (
            link.latency_s + wire_share(self.codec, num_bytes) * num_bytes / link.bandwidth_bytes_per_s
        )
