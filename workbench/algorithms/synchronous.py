"""Synchronous SGD, one all-reduce of the whole gradient a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.ops import AllReduce, Apply, Backward, EndStep, Program
from workbench.program import Card, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousSGD(CollectiveAlgorithm):
    """w[t+1] = w[t] - lr * mean_i g_i(w[t])

    Every rank waits for the sum of all gradients before it updates. So all replicas stay equal, and the result is that
    of one process with the whole batch. Nothing is overlapped: the baseline. Staleness 0.

    Paper: daily2016leveraging, section 4.1 (network-wise SGD); li2018pipesgd (D-Sync).
    """

    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="daily2016leveraging, section 4.1; li2018pipesgd",
        staleness="0",
        bytes_per_step="2 (p-1)/p n",
        memory="none",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)

    @property
    def symmetric(self) -> bool:
        return True

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient = yield Backward(step)
            total = yield AllReduce(gradient, self.collective)
            yield Apply(total)
            yield EndStep(step)
