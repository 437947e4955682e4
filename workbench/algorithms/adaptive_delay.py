"""AGD with a measured delay: the smallest one that hides the all-reduce."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.arguments import check_whole, is_number
from workbench.collectives import Collective, Native, check_collective, fold_lanes
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, Now, Program, Request, Start, State, Ticket, Wait
from workbench.program import Card, Context, Requirements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveDelayState(State):
    """The state between two steps.

    Attributes:
        sums: seconds and number of the all-reduces, backwards and updates since the last report.
        report: the all-reduce of the last report.
    """

    delay: int
    sums: tuple[float, ...]
    report: Ticket | None
    in_flight: tuple[Ticket, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveDelaySGD(CollectiveAlgorithm):
    """w[t+1] = w[t] - lr * mean_i g_i(w[t-d]),   d = ceil(t_c / t_compute), at most `max_delay`

    A gradient's all-reduce starts after the backward of its step, and the gradient is applied d steps later. The t_c
    seconds of the all-reduce are hidden if they fit into d steps of t_compute = t_f + t_b + t_u seconds: d t_compute >=
    t_c. A larger d only adds staleness. If t_c is at most `negligible` of t_compute, d is 0: hiding so little is not
    worth a stale gradient.

    As in the paper, d all-reduces run at the same time, one on each lane. If they share one link's bandwidth, t_c grows
    with d, and `max_delay` limits it. t_c is measured on the lane and includes waits for late peers. t_compute is
    measured in the foreground, without waits.

    The first delay is 1. Every `adapt_every` steps the ranks' sums of both times are all-reduced. They are used one
    period later, so no rank waits for them, and all change d at the same step. While d grows, no gradient is applied;
    when it shrinks, several are applied in one step. With a constant d it is `PipeSGD(width=d + 1)`. Staleness at most
    `max_delay`; d + 1 gradient buffers.

    Attributes:
        max_delay: limit of the delay d, in steps; 0: synchronous.
        adapt_every: number of steps from one choice of the delay to the next.
        negligible: the delay is 0 if an all-reduce takes at most this share of a step's compute time.

    Paper: daily2016leveraging, section 1: a delay chosen "adaptively on the basis of available overlap". It gives no
    rule.
    """

    max_delay: int = 8
    adapt_every: int = 10
    negligible: float = 0.05
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="daily2016leveraging, section 1 (rule derived here)",
        staleness="d = ceil(t_c / t_compute), at most max_delay",
        bytes_per_step="2 (p-1)/p n",
        memory="d gradients",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        check_whole("max_delay", self.max_delay, 0, "a number of steps, 0 (synchronous) or more")
        check_whole("adapt_every", self.adapt_every, 1, "a number of steps, 1 or more")
        if not (is_number(self.negligible) and 0 <= self.negligible < 1):
            raise ConfigError(
                f"negligible={self.negligible!r}: give a share of a step's compute time, from 0 to below 1"
            )

    @property
    def requires(self) -> Requirements:
        num_lanes = max(1, self.max_delay)
        return Requirements(state=AdaptiveDelayState, num_lanes=num_lanes, link=self.collective.needs_link)

    @property
    def max_staleness(self) -> int:
        return self.max_delay

    @property
    def depends_on_timing(self) -> bool:
        """The delay follows measured times."""
        return self.max_delay > 0

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: every `adapt_every` steps the measured times are sent too."""

    def useful_delay(self, communication_s: float, compute_s: float) -> int:
        """Return the smallest delay that hides an all-reduce.

        >>> [AdaptiveDelaySGD(max_delay=4).useful_delay(t_c, 1.0) for t_c in (0.01, 0.5, 1.0, 1.5, 9.0)]
        [0, 1, 1, 2, 4]
        """
        if communication_s <= self.negligible * compute_s:
            return 0
        return min(self.max_delay, math.ceil(communication_s / compute_s)) if compute_s > 0 else self.max_delay

    def worker(self, ctx: Context) -> Program:
        delay: int = min(1, self.max_delay)
        sums = [0.0] * 6  # as `AdaptiveDelayState.sums`
        report: Ticket | None = None
        in_flight: deque[Ticket] = deque()
        if ctx.resumed is not None:
            resumed: AdaptiveDelayState = ctx.resumed
            delay = min(resumed.delay, self.max_delay)
            sums, report = list(resumed.sums), resumed.report
            in_flight.extend(resumed.in_flight)
        num_lanes = self.requires.num_lanes
        fold_lanes(ctx.memory, num_lanes)
        taken: deque[float] = deque()  # seconds of each all-reduce, written on its lane
        for step in ctx.steps():
            begin = yield Now()
            gradient = yield Backward(step)
            sums[2] += (yield Now()) - begin
            sums[3] += 1
            lane = step % num_lanes  # all lanes, not only `delay`: an unused lane would keep its residual
            in_flight.append((yield Start(_timed(AllReduce(gradient, self.collective, lane), taken), lane=lane)))
            while len(in_flight) > delay:
                total = yield Wait(in_flight.popleft())
                if taken:  # empty for a gradient that was restored from a checkpoint
                    sums[0] += taken.popleft()
                    sums[1] += 1
                begin = yield Now()
                yield Apply(total)
                sums[4] += (yield Now()) - begin
                sums[5] += 1
            if (step + 1) % self.adapt_every == 0:
                if report is not None:
                    delay = self._chosen((yield Wait(report)), delay)
                report = yield Start(AllReduce(torch.tensor(sums, dtype=torch.float64, device=_where(ctx))))
                sums = [0.0] * 6
            state = AdaptiveDelayState(delay=delay, sums=tuple(sums), report=report, in_flight=tuple(in_flight))
            yield EndStep(step, state=state)
        while in_flight:
            yield Apply((yield Wait(in_flight.popleft())))
        if report is not None:
            yield Wait(report)

    def _chosen(self, totals: Tensor, delay: int) -> int:
        """Return the delay for the sums of all ranks; unchanged if nothing was measured."""
        seconds, numbers = totals.tolist()[::2], totals.tolist()[1::2]
        if not all(numbers):
            return delay
        communication_s, backward_s, update_s = (total / number for total, number in zip(seconds, numbers, strict=True))
        return self.useful_delay(communication_s, backward_s + update_s)


def _timed(request: Request, taken: deque[float]) -> Program:
    """Sum on a lane, and record the seconds."""
    begin = yield Now()
    value = yield request
    taken.append((yield Now()) - begin)
    return value


def _where(ctx: Context) -> torch.device:
    """Return the device on which the library can sum a few numbers."""
    return ctx.layout.device if ctx.layout is not None and ctx.layout.device.type == "cuda" else torch.device("cpu")
