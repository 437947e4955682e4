"""Sums of several buckets, chosen by measured step times: `bucket_bytes="auto"`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

import torch

from workbench.collectives import Collective
from workbench.gradients import Gradient, Layout, whole
from workbench.ops import AllReduce, Apply, Backward, Now, Program, Request, Start, State, Wait
from workbench.program import Context

AUTO = "auto"
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
UNDECIDED = -1
# The trial: how many plans are left, and rounds of one step with each. A step takes 10 % more or less by chance, so the
# best ones are tried more often.
STAGES = ((len(PLANS), 4), (3, 4), (2, 8))
TRIAL_STEPS = sum(plans * rounds for plans, rounds in STAGES)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState(State):
    """The state between two steps: the position of the chosen plan in `PLANS`, `UNDECIDED` before the choice."""

    plan: int = UNDECIDED


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


@final
class PlanTrial:
    """Takes steps by plans, and drops the plans with the largest median step time, averaged over ranks, until one is left."""

    def __init__(self, ctx: Context, collective: Collective, *, singly: bool) -> None:
        assert ctx.layout is not None
        self._collective, self._singly = collective, singly
        on_gpu = ctx.layout.device.type == "cuda"
        self._device = ctx.layout.device if on_gpu else torch.device("cpu")  # where the library can sum a few numbers
        self.plans = [ends_of(ctx.layout, shares) for shares in PLANS]
        self._seconds: list[list[float]] = [[] for _ in self.plans]  # of each plan; the first step does not count
        self._left = list(range(len(self.plans)))
        self._order = [plan for _ in range(STAGES[0][1]) for plan in self._left]  # plans of the next steps
        self._stage = 0

    @property
    def over(self) -> bool:
        """Return True if the last stage has ended."""
        return not self._order

    def step(self, step: int, plan: int) -> Program:
        """Take one step with a plan."""
        yield from planned_step(step, self.plans[plan], self._collective, singly=self._singly)

    def timed_step(self, step: int) -> Program:
        """Take one step with the next plan, and note its time."""
        plan = self._order.pop(0)
        begin_s = yield Now()
        yield from self.step(step, plan)
        self._seconds[plan].append((yield Now()) - begin_s)
        if not self._order and self._stage + 1 < len(STAGES):
            self._stage += 1
            kept, rounds = STAGES[self._stage]
            self._left = sorted((yield from self._ranked())[:kept])
            self._order = [plan for _ in range(rounds) for plan in self._left]

    def choose(self) -> Program:
        """Return the position of the fastest plan, the same one on all ranks."""
        return (yield from self._ranked())[0]

    def _ranked(self) -> Program:
        """Return the plans that are left, the fastest first, in the same order on all ranks."""
        usual = [median(self._seconds[plan][1:]) for plan in self._left]
        totals = (yield AllReduce(torch.tensor(usual, dtype=torch.float64, device=self._device))).tolist()
        return [plan for _, plan in sorted(zip(totals, self._left, strict=True))]
