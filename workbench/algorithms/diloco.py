"""DiLoCo: local steps, and an outer optimizer that steps with the mean of how far the ranks went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from workbench.algorithms.outer_optimizer import OuterAlgorithm, OuterOptimizer, average
from workbench.collectives import Collective, Native
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program, State
from workbench.program import Card, Context, Replicas


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoState(State):
    """Of the outer optimizer."""

    anchor: Tensor
    momentum: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(OuterAlgorithm):
    """Every rank i steps alone; every H steps, for anchor a (the parameters all ranks share) and outer momentum m:

        D_i = a - w_i,   D = mean_i D_i,   m <- mu m + D,   a <- a - outer_lr (D + mu m),   w_i <- a

    (`nesterov=False`: a <- a - outer_lr m.) With every=1, outer_lr=1, outer_momentum=0 and plain SGD it is `SynchronousSGD`
    up to rounding; with outer_lr=1, outer_momentum=0 it is `LocalSGD`. Staleness 0 (of a rank's own updates).

    The end of a run averages the parameters unless they are equal: without loss, whatever the collective, which compresses
    differences only.

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
    def state_type(self) -> type[DiLoCoState]:
        return DiLoCoState

    @property
    def num_buckets(self) -> int:
        return 1

    @property
    def replicas(self) -> Replicas:
        return Replicas.EVERY_STEP if self.every == 1 else Replicas.AT_END

    def worker(self, ctx: Context) -> Program:
        outer: OuterOptimizer = yield from OuterOptimizer.begin(self)
        resumed: DiLoCoState | None = ctx.resumed
        if resumed is not None:
            outer.load(resumed.anchor, resumed.momentum)
        num_done = ctx.first_step
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            num_done = step + 1
            if num_done % self.every == 0:
                difference = yield from outer.pack_difference(step)
                total = yield AllReduce(difference, self.collective)
                outer.step(outer.mean(total.flat))
                yield from outer.unpack(total.flat)
            yield EndStep(step, state=DiLoCoState(anchor=outer.anchor, momentum=outer.momentum))
        if num_done % self.every:
            yield from average(self.collective, num_done)
