"""Sums of several buckets, chosen by measured step times: `bucket_bytes="auto"`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import final

import torch

from workbench.collectives import Collective
from workbench.gradients import Gradient, Layout, whole
from workbench.ops import AllReduce, Apply, Backward, Now, Program, Request, Start, Wait
from workbench.program import Context

AUTO = "auto"
SECONDS = "plan-trial.seconds"  # in `Context.memory`
NUM_BUCKETS = 16  # of about equal size, from which a plan makes its sums
NUM_LANES = 2
# A plan is the shares of the gradient at which its sums end. Where a wire is the limit, a small first sum begins early;
# where compute is, a small last sum leaves little that backward cannot hide.
PLANS: tuple[tuple[float, ...], ...] = (
    (1.0,),  # one sum, after backward, as in synchronous SGD: the fastest where nothing can be hidden
    (0.25, 0.5, 0.75, 1.0),
    (0.5, 0.75, 0.875, 1.0),
    (0.0625, 0.25, 0.5, 0.75, 0.9375, 1.0),
    tuple(number / 8 for number in range(1, 9)),
    tuple(number / 16 for number in range(1, 17)),
)
# The trial: how many plans are left, and rounds of one step with each. A step takes 10 % more or less by chance, so the
# best ones are tried more often.
STAGES = ((len(PLANS), 4), (3, 4), (2, 8))
TRIAL_STEPS = sum(plans * rounds for plans, rounds in STAGES)


def ends_of(layout: Layout, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the last bucket of each sum of a plan.

    A sum ends at the bucket whose end is nearest to its share of the gradient.
    """
    ends = [piece.stop / layout.numel for piece in layout.buckets]
    nearest = {min(range(len(ends)), key=lambda bucket: abs(ends[bucket] - share)) for share in shares}
    return tuple(sorted(nearest))


def planned_step(step: int, ends: Sequence[int], collective: Collective, *, singly: bool) -> Program:
    """Take one synchronous step. Each sum begins when its last bucket is final.

    Args:
        ends: the last bucket of each sum. A single one is summed in the foreground.
        singly: apply the buckets of each sum while later ones are summed; otherwise one update follows all sums.
    """
    if len(ends) == 1:
        gradient = yield Backward(step)
        yield AllReduce(gradient.flat, collective)
        yield Apply(gradient)
        return
    summed: list[list[Gradient]] = []
    waiting: list[Gradient] = []  # final buckets of the next sum

    def begin(bucket: Gradient) -> Request | None:
        waiting.append(bucket)
        if bucket.bucket not in ends:
            return None
        summed.append(list(waiting))
        waiting.clear()
        owner, (first, *_) = bucket.owner, summed[-1]
        assert owner is not None and first.bucket is not None and bucket.bucket is not None
        pieces = owner.layout.buckets
        values = owner.flat[pieces[first.bucket].start : pieces[bucket.bucket].stop]
        return Start(AllReduce(values, collective), lane=len(summed) % NUM_LANES)

    tickets = yield Backward(step, on_bucket=begin)
    for ticket, buckets in zip(tickets, summed, strict=True):
        yield Wait(ticket)
        if singly:
            for bucket in buckets:
                yield Apply(bucket)
    if not singly:
        yield Apply(whole([bucket for buckets in summed for bucket in buckets]))


def next_plan(seconds: Sequence[float]) -> int:
    """Return the position of the plan of the next step: the next one of the trial, or the fastest after it.

    A stage drops the plans with the largest median step time.

    Args:
        seconds: of the trial's steps until now, summed over ranks. The first step with a plan does not count.

    >>> next_plan([]), next_plan([1.0]), next_plan([1.0] * TRIAL_STEPS)
    (0, 1, 0)
    """
    times: list[list[float]] = [[] for _ in PLANS]
    left, begin = list(range(len(PLANS))), 0

    def ranked() -> list[int]:
        return sorted(left, key=lambda plan: (median(times[plan][1:]), plan))

    for kept, rounds in STAGES:
        left = sorted(ranked()[:kept]) if begin else left
        order = left * rounds
        for plan, step_s in zip(order, seconds[begin:], strict=False):
            times[plan].append(step_s)
        if len(seconds) < begin + len(order):
            return order[len(seconds) - begin]
        begin += len(order)
    return ranked()[0]


@final
class PlanTrial:
    """Takes steps by plans. Their times are in `Context.memory`, equal on all ranks: a later program continues the trial.

    Attributes:
        plans: the last bucket of each sum, of every plan.
    """

    def __init__(self, ctx: Context, collective: Collective, *, singly: bool) -> None:
        assert ctx.layout is not None
        self._memory, self._collective, self._singly = ctx.memory, collective, singly
        on_gpu = ctx.layout.device.type == "cuda"
        self._device = ctx.layout.device if on_gpu else torch.device("cpu")  # where the library can sum a few numbers
        self.plans = [ends_of(ctx.layout, shares) for shares in PLANS]
        self._seconds: list[float] = ctx.memory[SECONDS].tolist() if SECONDS in ctx.memory else []
        self._plan = next_plan(self._seconds)

    def step(self, step: int) -> Program:
        """Take one step with the next plan, and note its time during the trial."""
        work = planned_step(step, self.plans[self._plan], self._collective, singly=self._singly)
        if len(self._seconds) >= TRIAL_STEPS:
            yield from work
            return
        begin_s = yield Now()
        yield from work
        taken = torch.tensor([(yield Now()) - begin_s], dtype=torch.float64, device=self._device)
        self._seconds += (yield AllReduce(taken)).tolist()
        self._memory[SECONDS] = torch.tensor(self._seconds, dtype=torch.float64)
        self._plan = next_plan(self._seconds)
