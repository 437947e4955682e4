"""Layer-wise SGD: each bucket's all-reduce runs while backward computes the next bucket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import final

from workbench.collectives import Collective, Native, check_collective
from workbench.errors import ConfigError
from workbench.gradients import whole
from workbench.ops import Apply, Backward, EndStep, Program, Wait, WaitAny
from workbench.program import Algorithm, Context
from workbench.units import MIB


class ApplyOrder(StrEnum):
    """When the buckets' updates are applied."""

    ALL = "all"  # B1: wait for every bucket, then one step of the whole optimizer
    BACKWARD = "backward"  # B2: in the order backward finished them
    ANY = "any"  # B3: whichever bucket has arrived


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseSGD(Algorithm):
    """w_l[t+1] = w_l[t] - lr * mean_i g_l,i(w[t]),   all-reduce of bucket l under the backward of buckets l+1, l+2, ...

    The same update as `SynchronousSGD`, to the last bit where the sum is taken in rank order; only backward can hide
    communication. Staleness 0. `bucket_bytes=0` is the paper's one message a parameter; one bucket is SynchronousSGD.

    Paper: daily2016leveraging, section 4.2; the three orders are its B1, B2, B3.
    """

    bucket_bytes: float | None = 1 * MIB
    apply: ApplyOrder = ApplyOrder.ALL
    collective: Collective = Native()

    def __post_init__(self) -> None:
        if self.apply not in list(ApplyOrder):
            raise ConfigError(f"apply={self.apply!r}: choose one of {', '.join(ApplyOrder)}")
        check_collective(self.collective)
        if self.bucket_bytes is not None and not (isinstance(self.bucket_bytes, int | float) and self.bucket_bytes >= 0):
            raise ConfigError(f"bucket_bytes={self.bucket_bytes}: a size in bytes, 0 for one message a parameter, or None for one in all")

    @property
    def applies_buckets(self) -> bool:
        return self.apply != ApplyOrder.ALL

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            tickets = yield Backward(step, on_bucket=partial(self.collective.all_reduce, ctx))
            match self.apply:
                case ApplyOrder.ALL:
                    buckets = []
                    for ticket in tickets:
                        buckets.append((yield Wait(ticket)))
                    yield Apply(whole(buckets))
                case ApplyOrder.BACKWARD:
                    for ticket in tickets:
                        yield Apply((yield Wait(ticket)))
                case ApplyOrder.ANY:
                    waiting = list(tickets)
                    while waiting:
                        position, bucket = yield WaitAny(tuple(waiting))
                        del waiting[position]
                        yield Apply(bucket)
            yield EndStep(step)
