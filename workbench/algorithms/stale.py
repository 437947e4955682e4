"""Injected staleness: synchronous SGD with gradients from parameters of some updates ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import ClassVar, final

from torch import Tensor

from workbench.algorithms.staleness import Constant, Staleness
from workbench.arguments import check_whole
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program, ReadParameters, WriteParameters
from workbench.program import Card, Context, Requirements
from workbench.rng import generator

HISTORY = "stale.history/"  # in `Context.memory`, with the place of a parameter vector: 0 is the oldest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSGD(CollectiveAlgorithm):
    """w[t+1] = w[t] - lr * mean_i g_t,i(w[t - s_t]),   s_t <= t drawn from `staleness`, the same on all ranks

    This shows the effect of staleness without its causes. No gradient is late: each minibatch is used once, in order,
    and nothing is in flight after the last step. In the first `ramp_steps` steps the drawn number is multiplied
    by t / ramp_steps and rounded down. `Constant(0)` is `SynchronousSGD`. `Constant(d)` delays by d as
    `PipeSGD(width=d + 1)` does, but also updates in each of the first d steps, where Pipe-SGD waits. Only parameters
    are set back, not other state of a module (BatchNorm's statistics). It keeps one parameter vector for each update of
    the largest staleness.

    Attributes:
        staleness: distribution of the staleness, in updates, such as constant:4 or uniform:0:8.
        ramp_steps: number of steps in which the staleness grows from 0.

    Paper: chen2016revisiting, section 2 (simulated staleness of a chosen mean, ramped over the first 3 epochs).
    """

    staleness: Staleness = Constant(4)
    ramp_steps: int = 0
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="chen2016revisiting, section 2",
        staleness="as drawn",
        bytes_per_step="2 (p-1)/p n",
        memory="a parameter vector for each update of the largest staleness",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        if not isinstance(self.staleness, Staleness):
            raise ConfigError(
                f"staleness={self.staleness!r}: give a distribution, such as Constant(4), Uniform(0, 8) or "
                "Geometric(20)"
            )
        check_whole("ramp_steps", self.ramp_steps, 0, "the number of steps in which staleness grows, 0 or more")

    @property
    def requires(self) -> Requirements:
        return Requirements(link=self.collective.needs_link)

    @property
    def max_staleness(self) -> int:
        return self.staleness.longest

    def drawn(self, seed: int, step: int) -> int:
        """Return s_t before it is limited to t."""
        drawn = self.staleness.draw(generator(seed, "staleness", step=step))
        return drawn * step // self.ramp_steps if step < self.ramp_steps else drawn

    @property
    def symmetric(self) -> bool:
        return True

    def worker(self, ctx: Context) -> Program:
        history = deque(_read(ctx.memory), maxlen=self.staleness.longest + 1)
        for step in ctx.steps():
            newest = yield ReadParameters()
            history.append(newest)
            late = min(self.drawn(ctx.seed, step), len(history) - 1)
            if late:
                yield WriteParameters(history[-1 - late])
            gradient = yield Backward(step)
            if late:
                yield WriteParameters(newest)
            gradient.version -= late  # the version from which it was computed
            yield Apply((yield AllReduce(gradient, self.collective)))
            _write(ctx.memory, history)
            yield EndStep(step)


def _read(memory: Mapping[str, Tensor]) -> list[Tensor]:
    """The last parameter vectors, the newest last."""
    names = (f"{HISTORY}{number}" for number in count())
    return [memory[name] for name in takewhile(memory.__contains__, names)]


def _write(memory: MutableMapping[str, Tensor], history: Sequence[Tensor]) -> None:
    newest = {f"{HISTORY}{number}": value for number, value in enumerate(history)}
    for name in [name for name in memory if name.startswith(HISTORY) and name not in newest]:
        del memory[name]
    memory.update(newest)
