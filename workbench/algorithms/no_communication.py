"""No communication: each rank trains alone. Shows what an algorithm would reach if messages took no time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.gradients import Layout
from workbench.ops import Apply, Backward, EndStep, Program
from workbench.program import Algorithm, Card, Context, Elasticity, Replicas, Update


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoCommunication(Algorithm):
    """w_i[t+1] = w_i[t] - lr * g_i(w_i[t]) on each rank i, without messages

    The same compute as `SynchronousSGD` and no sum: the upper bound of every algorithm's throughput. The replicas drift
    apart, so its accuracy is that of one worker with its share of the data, and says nothing about a cluster. With one
    worker it is `SynchronousSGD`. Staleness 0; no memory.

    Paper: daily2016leveraging, section 5 ("no comm").
    """

    card: ClassVar[Card] = Card(
        paper="daily2016leveraging, section 5", staleness="0", bytes_per_step="0", memory="none"
    )

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def replicas(self) -> Replicas:
        return Replicas.NEVER

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def elasticity(self) -> Elasticity:
        """No rank waits for another."""
        return Elasticity.LOSES_WORKERS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        return 0.0

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient = yield Backward(step)
            yield Apply(gradient, local=True)
            yield EndStep(step)
