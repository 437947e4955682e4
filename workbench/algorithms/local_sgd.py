"""Local SGD: each rank takes steps alone, and the parameters are averaged from time to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.arguments import check_whole
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, PackParameters, Program, UnpackParameters
from workbench.program import Card, Context, Elasticity, Replicas, Update


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGD(CollectiveAlgorithm):
    """w_i[t+1] = w_i[t] - lr * g_i(w_i[t]),   and w_i[t+1] = mean_j w_j[t+1] after every H-th step

    Post-local SGD: the first `after` steps are those of `SynchronousSGD`, and local ones are counted from there.
    Momentum stays with its rank and is not averaged. Every rank has the same weight, for any number of samples. With
    every=1, plain SGD and full batches it is `SynchronousSGD` up to rounding. The run's last step always averages.
    Staleness 0 (of a rank's own updates); one parameter vector while averaging. Parameters are averaged without loss;
    see `DiLoCo` for compression.

    Attributes:
        every: H, number of steps between two averages of the parameters.
        after: number of synchronous steps at the beginning, before the local ones.

    Paper: stich2018local, Alg. 1; lin2018postlocal (post-local).
    """

    every: int = 8  # H
    after: int = 0
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="stich2018local, Alg. 1; lin2018postlocal",
        staleness="0",
        bytes_per_step="2 (p-1)/p n / H",
        memory="the parameters, while averaging",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        check_whole("every", self.every, 1, "the number of steps between averages, 1 or more")
        check_whole("after", self.after, 0, "the number of synchronous steps at the beginning, 0 or more")
        if self.collective.exact != self.collective:
            raise ConfigError(
                f"LocalSGD averages parameters, and {self.collective} loses part of the sum: to average differences "
                "from a "
                f"common anchor, which may be compressed, use DiLoCo(every={self.every}, outer_lr=1.0, "
                "outer_momentum=0.0, "
                f"nesterov=False, collective={self.collective}); otherwise use {self.collective.exact}"
            )

    @property
    def period(self) -> int:
        return self.every

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def replicas(self) -> Replicas:
        return Replicas.PARAMETERS if self.every == 1 else Replicas.AT_END

    @property
    def elasticity(self) -> Elasticity:
        """The remaining ranks continue from their mean, as after every H-th step."""
        return Elasticity.SHRINKS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: most steps send nothing."""

    def worker(self, ctx: Context) -> Program:
        num_done = ctx.first_step
        for step in ctx.steps():
            gradient = yield Backward(step)
            num_done = step + 1
            if step < self.after:
                yield Apply((yield AllReduce(gradient, self.collective)))
            else:
                yield Apply(gradient, local=True)
                if (num_done - self.after) % self.every == 0:
                    yield from self._average()
            yield EndStep(step)
        if num_done > self.after and (num_done - self.after) % self.every:
            yield from self._average()

    def _average(self) -> Program:
        packed = yield PackParameters()
        total = yield AllReduce(packed, self.collective)
        yield UnpackParameters(total)  # divides by the summed weights in the tail, 1 for each rank
