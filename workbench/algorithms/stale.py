"""Injected staleness: synchronous SGD whose gradients are taken at parameters of some updates ago."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from workbench.algorithms.staleness import Constant, Staleness
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program, ReadParameters, State, WriteParameters
from workbench.program import Card, Context, Requirements
from workbench.rng import generator


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleState(State):
    """Between two steps: the last vectors of parameters, the newest last."""

    history: tuple[Tensor, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSGD(CollectiveAlgorithm):
    """w[t+1] = w[t] - lr * mean_i g_t,i(w[t - s_t]),   s_t <= t drawn from `staleness`, the same on all ranks

    What staleness does to training, apart from what causes it: no gradient is late, so every minibatch is used once, in
    its order, and nothing is in flight after the last step. In the first `ramp_steps` steps s_t is scaled down: step t has
    t / ramp_steps of what was drawn, rounded down. `Constant(0)` is `SynchronousSGD`. `Constant(d)` delays by d as
    `PipeSGD(width=d + 1)` does, but takes an update in each of the first d steps too, where Pipe-SGD waits. Parameters
    alone are set back, not a module's other state (BatchNorm's statistics). One vector of parameters for each update of
    the longest staleness there is.

    Paper: chen2016revisiting, section 2 (simulated staleness of a chosen mean, ramped over the first 3 epochs).
    """

    staleness: Staleness = Constant(4)
    ramp_steps: int = 0
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="chen2016revisiting, section 2",
        staleness="as drawn",
        bytes_per_step="2 (p-1)/p n",
        memory="as many parameter vectors as updates it can be late",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        if not isinstance(self.staleness, Staleness):
            raise ConfigError(f"staleness={self.staleness!r}: give a distribution, such as Constant(4), Uniform(0, 8) or Geometric(20)")
        if not isinstance(self.ramp_steps, int) or self.ramp_steps < 0:
            raise ConfigError(f"ramp_steps={self.ramp_steps}: over how many steps staleness grows to what is drawn, 0 or more")

    @property
    def requires(self) -> Requirements:
        return Requirements(state=StaleState, link=self.collective.needs_link)

    @property
    def max_staleness(self) -> int:
        return self.staleness.longest

    def drawn(self, seed: int, step: int) -> int:
        """s_t, before it is bounded by t."""
        drawn = self.staleness.draw(generator(seed, "staleness", step=step))
        return drawn * step // self.ramp_steps if step < self.ramp_steps else drawn

    @property
    def symmetric(self) -> bool:
        return True

    def worker(self, ctx: Context) -> Program:
        resumed: StaleState = ctx.resumed or StaleState()
        history = deque(resumed.history, maxlen=self.staleness.longest + 1)
        for step in ctx.steps():
            newest = yield ReadParameters()
            history.append(newest)
            late = min(self.drawn(ctx.seed, step), len(history) - 1)
            if late:
                yield WriteParameters(history[-1 - late])
            gradient = yield Backward(step)
            if late:
                yield WriteParameters(newest)
            gradient.version -= late  # where it was taken: what its staleness is counted from
            yield Apply((yield AllReduce(gradient, self.collective)))
            yield EndStep(step, state=StaleState(history=tuple(history)))
