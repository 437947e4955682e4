"""Pipe-SGD: the all-reduce of a step runs during the next steps' compute. Gradients are applied K - 1 updates late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, final

from workbench.arguments import check_whole
from workbench.collectives import Collective, Native, check_collective, fold_lanes
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import AllReduce, Apply, Backward, Discard, EndStep, Program, Start, State, Ticket, Wait
from workbench.program import Card, Context, Requirements


class FirstSteps(StrEnum):
    """What is applied in the K - 1 steps in which the pipeline fills and no gradient has arrived."""

    ZERO = "zero"  # nothing
    DUPLICATE = "duplicate"  # the last gradient, again in each step


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeState(State):
    """The state between two steps.

    The all-reduces in flight, oldest first, and the gradient to repeat while the pipeline fills.
    """

    in_flight: tuple[Ticket, ...] = ()
    spare: Gradient | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipeSGD(CollectiveAlgorithm):
    """w[t] = w[t-1] - lr * mean_i g_i(w[t-K])

    Gradient s is computed from w[s], so K = 1 is `SynchronousSGD`, and the staleness is K - 1. The first `warmup_steps`
    steps have width 1. Then the pipeline fills for K - 1 steps. With `first="zero"` nothing is applied in them. With
    `"duplicate"`, as in BytePS, the last gradient of the warm-up is applied again in each of them, so every step has an
    update; the warm-up then has at least one step. After the last step the K - 1 gradients in flight are applied, so
    every gradient is used. K gradient buffers, and one more while duplicates are applied.

    All-reduces run one after the other on one lane, or at the same time on `lanes` lanes. d lanes are the d
    communication threads of the paper's AGD(d). Each lane keeps its own memory of the collective (error feedback,
    PowerSGD).

    Attributes:
        width: K, number of iterations in flight; a gradient is K - 1 updates old. 1: synchronous.
        warmup_steps: number of synchronous steps at the beginning of the run.
        first: update while the pipeline fills: zero (none) or duplicate (the warm-up's last gradient again).
        lanes: number of all-reduces that run at the same time.

    Paper: li2018pipesgd, Alg. 1 (K = 2 recommended); daily2016leveraging, section 4.3, calls K = d + 1 AGD(d):
    `DelayedSGD`.
    """

    width: int = 2  # K, iterations in flight
    warmup_steps: int = 0
    first: FirstSteps = FirstSteps.ZERO
    collective: Collective = Native()
    lanes: int = 1  # all-reduces at the same time

    card: ClassVar[Card] = Card(
        paper="li2018pipesgd, Alg. 1; daily2016leveraging, section 4.3",
        staleness="K - 1",
        bytes_per_step="2 (p-1)/p n",
        memory="K - 1 gradients",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        widths = "a whole number, 1 or more (1 is synchronous, 2 is the paper's choice)"
        check_whole("width", self.width, 1, widths)
        check_whole("warmup_steps", self.warmup_steps, 0, "the number of synchronous steps at the beginning, 0 or more")
        check_whole("lanes", self.lanes, 1, "the number of all-reduces at the same time, 1 or more")
        if self.first not in list(FirstSteps):
            raise ConfigError(f"first={self.first!r}: choose one of {', '.join(FirstSteps)}")

    @property
    def requires(self) -> Requirements:
        return Requirements(state=PipeState, num_lanes=self.lanes, link=self.collective.needs_link)

    @property
    def max_staleness(self) -> int:
        return self.width - 1

    @property
    def symmetric(self) -> bool:
        return True

    def worker(self, ctx: Context) -> Program:
        resumed: PipeState = ctx.resumed or PipeState()
        in_flight, spare = deque(resumed.in_flight), resumed.spare
        duplicates = self.first == FirstSteps.DUPLICATE and self.width > 1
        num_synchronous = max(self.warmup_steps, 1) if duplicates else self.warmup_steps
        fold_lanes(ctx.memory, self.lanes)
        for step in ctx.steps():
            gradient = yield Backward(step)
            lane = step % self.lanes
            in_flight.append((yield Start(AllReduce(gradient, self.collective, lane), lane=lane)))
            filling = len(in_flight) < self.width and step >= num_synchronous
            # More than one if the run was resumed with a smaller width.
            while len(in_flight) >= (1 if step < num_synchronous else self.width):
                total = yield Wait(in_flight.popleft())
                if duplicates and step == num_synchronous - 1:
                    spare = total.copy()  # `Apply` consumes its gradient
                yield Apply(total)
            if spare is not None and filling:
                yield Apply(spare.copy())
            if spare is not None and step >= num_synchronous and len(in_flight) >= self.width - 1:
                yield Discard(spare)  # the pipeline is full
                spare = None
            yield EndStep(step, state=PipeState(in_flight=tuple(in_flight), spare=spare))
        if spare is not None:
            yield Discard(spare)
        while in_flight:
            yield Apply((yield Wait(in_flight.popleft())))


def DelayedSGD(  # noqa: N802 - the paper's other name of a class
    *,
    delay: int = 1,
    warmup_steps: int = 0,
    first: FirstSteps = FirstSteps.ZERO,
    collective: Collective | None = None,
    lanes: int = 1,
) -> PipeSGD:
    """w[t+1] = w[t] - lr * mean_i g_i(w[t-d]): AGD with a fixed delay d, which is `PipeSGD(width=d + 1)`.

    The paper's AGD has `lanes=delay`, a communication thread for each step of delay.

    Args:
        delay: d, number of steps from a gradient to its update; 0: synchronous.

    Paper: daily2016leveraging, section 4.3.

    >>> DelayedSGD(delay=1).width
    2
    """
    check_whole("delay", delay, 0, "a number of steps, 0 (synchronous) or more")
    return PipeSGD(
        width=delay + 1, warmup_steps=warmup_steps, first=first, collective=collective or Native(), lanes=lanes
    )
