"""DiLoCo: local steps, and an outer optimizer that steps with the mean difference of the ranks' parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from workbench.algorithms.outer_optimizer import OuterAlgorithm, OuterOptimizer, average
from workbench.collectives import Collective, Native
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program, State
from workbench.program import Buckets, Card, Context, Replicas, Requirements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoState(State):
    """The state between two outer steps."""

    anchor: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(OuterAlgorithm):
    """Every rank i steps alone. Every H steps, with anchor a (parameters that all ranks share) and outer momentum m:

        D_i = a - w_i,   D = mean_i D_i,   m <- mu m + D,   a <- a - outer_lr (D + mu m),   w_i <- a

    (`nesterov=False`: a <- a - outer_lr m.) With outer_lr=1 and outer_momentum=0 it is `LocalSGD`. With every=1 and
    plain SGD in addition, it is `SynchronousSGD` up to rounding. Staleness 0 (of a rank's own updates).

    At the end of a run the parameters are averaged, unless they are equal. That sum is exact for any collective: only
    differences are compressed.

    Paper: douillard2023diloco, Alg. 1.
    """

    every: int = 30  # H
    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # mu
    nesterov: bool = True
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="douillard2023diloco, Alg. 1",
        staleness="0",
        bytes_per_step="2 (p-1)/p n / H",
        memory="2 parameter vectors, and 1 during a sum",
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=1), state=DiLoCoState, link=self.collective.needs_link)

    @property
    def replicas(self) -> Replicas:
        return Replicas.PARAMETERS if self.every == 1 else Replicas.AT_END

    def worker(self, ctx: Context) -> Program:
        outer: OuterOptimizer = yield from OuterOptimizer.begin(self, ctx)
        resumed: DiLoCoState | None = ctx.resumed
        if resumed is not None:
            outer.anchor.copy_(resumed.anchor)  # another run may read the same state
        num_done = ctx.first_step
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            num_done = step + 1
            if num_done % self.every == 0:
                difference = yield from outer.pack_difference(step)
                total = yield AllReduce(difference, self.collective)
                outer.step(outer.mean(total.flat))
                yield from outer.unpack(total.flat)
            yield EndStep(step, state=DiLoCoState(anchor=outer.anchor))
        if num_done % self.every:
            yield from average(self.collective, num_done)
