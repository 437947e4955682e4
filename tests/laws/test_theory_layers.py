"""Closed forms of steps layer by layer agree with the simulator, to the last digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import pytest

from tests.laws.timing import EITHER_DETAIL, LAYERS, NETWORK, exactly, scaled, simulate
from workbench import theory
from workbench.algorithms import (
    ApplyOrder,
    DeAR,
    LayerwiseSGD,
    SendOrder,
)
from workbench.collectives import Collective, Native, Ring
from workbench.costs import Compute
from workbench.gradients import Layout
from workbench.ops import Now, Program, Value
from workbench.program import Context, perform
from workbench.runtimes.simulator.simulate import Detail
from workbench.trace.kinds import CODES


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Noted(Collective):
    """A ring whose ends of buckets are written down."""

    book: dict[tuple[int, int], list[float]] = field(default_factory=dict, compare=False)

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        yield from perform(Ring().all_reduce(ctx, value))
        self.book.setdefault((ctx.rank, value.bucket), []).append((yield Now()))  # type: ignore[union-attr]
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return Ring().bytes_sent(rank, num_workers, numel, itemsize, tail)


def parts_of(layout: Layout, compute: Compute) -> tuple[list[float], list[float], list[float]]:
    """Seconds of forward, backward and update of each bucket."""
    ready = (0.0, *compute.ready_shares(layout))
    forward = [compute.forward_s * part for part in compute.forward_parts(layout)]
    backward = [compute.backward_s * (after - before) for before, after in pairwise(ready)]
    update = [compute.update_s * (piece.stop - piece.start) / layout.numel for piece in layout.buckets]
    return forward, backward, update


@pytest.mark.parametrize("seconds", [0.01, 0.06, 0.3])
@pytest.mark.parametrize("collective", [Native(), Ring()], ids=str)
@pytest.mark.parametrize(
    ("order", "detail"),
    [*((order, "messages") for order in ApplyOrder), (ApplyOrder.ALL, "formula"), (ApplyOrder.BACKWARD, "formula")],
)
def test_layerwise(order: ApplyOrder, detail: Detail, collective: Collective, seconds: float) -> None:
    """With shares of backward that are not those of the bytes."""
    compute = scaled(seconds, backward_shares=(0.1, 0.5, 0.15, 0.25))
    algorithm = LayerwiseSGD(bucket_bytes=0, apply=order, collective=collective)
    ran = simulate(algorithm, 4, compute=compute, sizes=LAYERS, steps=4, detail=detail)
    _, backward, update = parts_of(ran.layout, compute)
    times = [collective.seconds(ran.layout.bucket_bytes(bucket), 4, NETWORK) for bucket in range(4)]
    schedule = theory.layerwise(compute.forward_s, backward, times, update, order.value)
    assert ran.steps_s() == exactly(schedule.step_s)
    if order != ApplyOrder.ALL:
        table = ran.run.spans.table
        ends = table[(table["rank"] == 0) & (table["step"] == 0) & (table["kind"] == CODES["apply"])]["end_s"]
        assert sorted(ends) == pytest.approx(sorted(schedule.applied_s), rel=1e-6)


@pytest.mark.parametrize("order", list(ApplyOrder))
def test_the_order_of_updates_where_buckets_overtake(order: ApplyOrder) -> None:
    """By priority front layers arrive before others that were ready earlier: then the three policies differ."""
    compute = Compute(forward_s=0.001, backward_s=0.004, update_s=0.02)
    noted = Noted()
    algorithm = LayerwiseSGD(bucket_bytes=0, apply=order, order=SendOrder.PRIORITY, collective=noted)
    ran = simulate(algorithm, 4, compute=compute, sizes=LAYERS, steps=1)
    arrived = [noted.book[0, bucket][0] for bucket in range(4)]
    assert arrived != sorted(arrived), "somebody overtakes"
    _, _, update = parts_of(ran.layout, compute)
    expected = max(theory.apply_times(arrived, compute.forward_s + compute.backward_s, update, order.value))
    assert ran.steps_s()[0] == exactly(expected)


@pytest.mark.parametrize("seconds", [0.01, 0.06, 0.3])
@pytest.mark.parametrize("collective", [Native(), Ring()], ids=str)
@EITHER_DETAIL
def test_dear(detail: Detail, collective: Collective, seconds: float) -> None:
    compute = scaled(seconds)
    ran = simulate(
        DeAR(bucket_bytes=0, collective=collective), 4, compute=compute, sizes=LAYERS, steps=4, detail=detail
    )
    sizes = [ran.layout.bucket_bytes(bucket) for bucket in range(4)]
    forward, backward, update = parts_of(ran.layout, compute)
    halves = [[half(size, 4) for size in sizes] for half in (NETWORK.reduce_scatter_s, NETWORK.all_gather_s)]
    assert ran.step_s(2) == exactly(theory.dear_s(forward, backward, *halves, update))
