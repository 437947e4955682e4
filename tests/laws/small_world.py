"""The world of `world.py` with an all-reduce of the library's own, and gradients to be summed in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.laws.world import World, summed
from workbench.collectives import Collective, flat_of, native_bytes
from workbench.gradients import USED, WEIGHT, Gradient, Layout
from workbench.ops import AllReduce, Program, Request, Value
from workbench.program import Context


@dataclass
class SmallWorld(World):
    """Sums in rank order when the last rank has come, and counts the bytes by `Native`'s closed form."""

    summing: dict[int, Tensor] = field(default_factory=dict)

    def take(self, rank: int, request: Request) -> None:
        if not isinstance(request, AllReduce):
            super().take(rank, request)
            return
        self.summing[rank] = flat_of(request.value)
        if len(self.summing) < len(self.programs):
            return
        values = [self.summing.pop(rank) for rank in range(len(self.programs))]
        assert len({(value.dtype, value.numel()) for value in values}) == 1, "ranks that sum different things"
        total = values[0].clone()
        for value in values[1:]:
            total += value
        for place, value in enumerate(values):
            value.copy_(total)
            self.bytes_sent[place] += native_bytes(len(values), value.numel() * value.element_size())  # type: ignore[call-overload]
            self.ready[place] = value


def hasty(collective: Collective, ctx: Context, value: Value) -> Program:
    """The collective's program, after which the caller writes what it likes into the buffer; the result is a copy of the sum."""
    flat = flat_of((yield from summed(collective, ctx, value)))
    result = flat.clone()
    flat.fill_(77)
    return result


def contexts(num_ranks: int, layout: Layout | None = None, seed: int = 0) -> list[Context]:
    return [Context(rank, num_ranks, layout=layout, seed=seed) for rank in range(num_ranks)]


def world(collective: Collective, ranks: list[Context], values: list[Any], seed: int = 0) -> SmallWorld:
    """Ranks that sum these values, one each, with what they remember."""
    return SmallWorld([hasty(collective, ctx, value) for ctx, value in zip(ranks, values, strict=True)], Random(seed))


def gradients(
    layout: Layout, flats: list[Tensor], step: int = 0, bucket: int | None = None, *, planned: bool = True
) -> list[Gradient]:
    """One a rank, of the whole layout or of one bucket, each in memory of its own.

    `planned`: all ranks know the sum's weight beforehand.
    """
    found = [Gradient(flat.clone(), layout, step, step, bucket) for flat in flats]
    if planned and not flats[0].is_meta:
        total_weight = float(sum(gradient.tail()[WEIGHT] for gradient in found))
        for gradient in found:
            gradient.total_weight = total_weight
    return found


def same(results: list[Tensor]) -> bool:
    """All equal to the last bit, NaN included."""
    return all(torch.equal(result.view(torch.uint8), results[0].view(torch.uint8)) for result in results)


def applied(layout: Layout, total: Tensor) -> Tensor:
    """What an optimizer is given of a sum: the mean, and nothing for a parameter that no rank used. Tails are zero."""
    mean = torch.zeros_like(total)
    for piece in layout.buckets:
        weight, num_users = total[piece.tail + WEIGHT], total[piece.tail + USED : piece.stop]
        for slot, users in zip(piece.slots, num_users.tolist(), strict=True):
            if users > 0 and weight > 0:
                mean[slot.offset : slot.offset + slot.numel] = total[slot.offset : slot.offset + slot.numel] / weight
    return mean
