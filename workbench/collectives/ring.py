"""Ring all-reduce: reduce-scatter, then all-gather, each rank talking to its two neighbours only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from workbench.collectives.base import Collective, flat_of
from workbench.gradients import block_bounds
from workbench.ops import Program, Recv, Send, Start, Value, Wait
from workbench.program import Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ring(Collective):
    """p - 1 hops that sum and p - 1 that spread; each rank sends 2 (p-1)/p n bytes.

    Rank i sends block (i - s) mod p to i + 1 in hop s and adds the block (i - s - 1) mod p it receives; after p - 1
    hops block (i + 1) mod p is complete at rank i and is passed round. Blocks differ by one element at most, and may be empty.

    Paper: li2018pipesgd; the algorithm is Patarasuk and Yuan 2009.
    """

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        flat, rank, p = flat_of(value), ctx.rank, ctx.num_workers
        bounds = block_bounds(flat.numel(), p)
        right, left = (rank + 1) % p, (rank - 1) % p
        for hop in range(2 * (p - 1)):
            summing = hop < p - 1
            outgoing = (rank - hop) % p if summing else (rank + 1 - (hop - (p - 1))) % p
            incoming = (outgoing - 1) % p
            sent = flat[bounds[outgoing] : bounds[outgoing + 1]]
            block = flat[bounds[incoming] : bounds[incoming + 1]]
            sending = (yield Start(Send(right, sent, tag=hop))) if sent.numel() else None
            if block.numel():
                message = yield Recv(left, like=block, tag=hop)
                block.add_(message.value) if summing else block.copy_(message.value)
            if sending:
                yield Wait(sending)  # with two ranks the next hop overwrites the block, so it must have left
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int) -> float:
        bounds = block_bounds(numel, num_workers)
        sizes = [bounds[block + 1] - bounds[block] for block in range(num_workers)]
        kept_summing = sizes[(rank + 1) % num_workers]  # the one block this rank never passes on while summing
        kept_spreading = sizes[(rank + 2) % num_workers]
        return (2 * numel - kept_summing - kept_spreading) * itemsize
