"""One worker, with or without delayed gradients: the reference for accuracy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

from workbench.arguments import check_whole
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import Apply, Backward, EndStep, Program, State
from workbench.program import Algorithm, Card, Context, Requirements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SerialState(State):
    """The state between two steps: the gradients that wait, oldest first."""

    waiting: tuple[Gradient, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SerialSGD(Algorithm):
    """w[t+1] = w[t] - lr * g(w[t-d])

    One worker. The last d gradients wait in a first-in-first-out queue. In the first d steps nothing is applied; the
    last d gradients are applied at the end. With the whole batch it is what `PipeSGD(width=d + 1)` does on p workers;
    d = 0 is plain SGD. Staleness d; d + 1 gradient buffers.

    Attributes:
        delay: d, number of steps from a gradient to its update; 0: plain SGD.

    Paper: daily2016leveraging, section 5 (serial); langford2009slow (delayed SGD).
    """

    delay: int = 0  # d

    card: ClassVar[Card] = Card(
        paper="daily2016leveraging, section 5; langford2009slow",
        staleness="d",
        bytes_per_step="0",
        memory="d gradients",
        roles="1 worker",
    )

    def __post_init__(self) -> None:
        check_whole("delay", self.delay, 0, "a number of steps, 0 or more")

    @property
    def requires(self) -> Requirements:
        return Requirements(state=SerialState)

    @property
    def max_staleness(self) -> int:
        return self.delay

    def check(self, num_ranks: int) -> None:
        if num_ranks != 1:
            raise ConfigError(
                f"serial SGD runs on 1 rank, not on {num_ranks}: use PipeSGD(width={self.delay + 1}) on several"
            )

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        return 0.0

    def worker(self, ctx: Context) -> Program:
        resumed: SerialState = ctx.resumed or SerialState()
        waiting = deque(resumed.waiting)
        for step in ctx.steps():
            waiting.append((yield Backward(step)))
            while len(waiting) > self.delay:
                yield Apply(waiting.popleft())
            yield EndStep(step, state=SerialState(waiting=tuple(waiting)))
        while waiting:
            yield Apply(waiting.popleft())
