"""Linear all-reduce: rank 0 receives every value in order of rank, sums, and sends the sum back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from workbench.collectives.base import Collective, flat_of
from workbench.ops import Program, Recv, Send, Value
from workbench.program import Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Collective):
    """((g_0 + g_1) + g_2) + ...: the sum in rank order, whatever the length and however it is cut into buckets.

    Slow (rank 0 receives and sends (p-1) n bytes) and exactly reproducible: the reference for the others.
    """

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        flat = flat_of(value)
        if ctx.rank == 0:
            for source in range(1, ctx.num_workers):
                flat.add_((yield Recv(source, like=flat)).value)
            for to in range(1, ctx.num_workers):
                yield Send(to, flat)
        else:
            yield Send(0, flat)
            flat.copy_((yield Recv(0, like=flat)).value)
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int) -> float:
        return numel * itemsize * (num_workers - 1 if rank == 0 else 1)
