"""Layer-wise SGD: each bucket's all-reduce runs while backward computes the next bucket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, final

from workbench.algorithms.bucket_plans import AUTO, NUM_BUCKETS, NUM_LANES, PlanTrial
from workbench.arguments import check_number, check_whole
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, whole
from workbench.ops import FREE, AllReduce, Apply, Backward, EndStep, Program, Request, Start, Wait, WaitAny
from workbench.program import Buckets, Card, Context, Elasticity, Requirements
from workbench.units import MIB


class ApplyOrder(StrEnum):
    """When the buckets' updates are applied."""

    ALL = "all"  # B1: wait for every bucket, then one step of the whole optimizer
    BACKWARD = "backward"  # B2: in the order of backward
    ANY = "any"  # B3: in the order of arrival


class SendOrder(StrEnum):
    """Which bucket's messages go first."""

    READY = "ready"  # in the order in which backward finishes them
    PRIORITY = "priority"  # the first layers first, because the next forward needs them first


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseSGD(CollectiveAlgorithm):
    """w_l[t+1] = w_l[t] - lr * mean_i g_l,i(w[t]),   all-reduce of bucket l during the backward of buckets l+1, l+2, ...

    The same update as `SynchronousSGD`, bit-identical if sums are taken in rank order. Only backward can hide
    communication. Staleness 0. With `bucket_bytes=0` each parameter is one message, as in the paper. With one bucket it
    is SynchronousSGD. `lanes` all-reduces run at the same time, bucket b on lane b mod `lanes`. With
    `order="priority"` each bucket has its own lane, and the bucket that forward needs first sends first.

    With `bucket_bytes="auto"` the first 52 steps try six plans, from one sum after backward to sixteen on two lanes, in
    turn, the fastest ones most often. The later steps use the one with the least median step time. Checkpoints hold the
    times, so a resumed run continues the trial or keeps the choice. All plans add the same numbers. On two ranks each
    sum has two terms, so results do not depend on the plan. On more ranks the library may add in another order, so
    results may differ by rounding.

    Attributes:
        bucket_bytes: size of a message, in bytes; 0: one for each parameter tensor; none: one for all; auto: measured
            in the first steps.
        apply: when updates are applied: all (after the last sum), backward (in the order of backward) or any (as sums
            end).
        lanes: number of all-reduces that run at the same time.
        order: which bucket is sent first: ready (as backward finishes them) or priority (as forward needs them).

    Paper: daily2016leveraging, section 4.2; its layer-wise and task-wise orders. Priority: jayarajan2019priority.
    """

    bucket_bytes: float | Literal["auto"] | None = 1 * MIB
    apply: ApplyOrder = ApplyOrder.ALL
    lanes: int = 1
    order: SendOrder = SendOrder.READY
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="daily2016leveraging, section 4.2; jayarajan2019priority",
        staleness="0",
        bytes_per_step="2 (p-1)/p n",
        memory="none",
    )

    def __post_init__(self) -> None:
        if self.apply not in list(ApplyOrder):
            raise ConfigError(f"apply={self.apply!r}: choose one of {', '.join(ApplyOrder)}")
        if self.order not in list(SendOrder):
            raise ConfigError(f"order={self.order!r}: choose one of {', '.join(SendOrder)}")
        check_collective(self.collective)
        if self.bucket_bytes == AUTO:
            self._check_auto()
        elif self.bucket_bytes is not None:
            sizes = "a size in bytes, 0 for a message for each parameter, None for one message, or 'auto'"
            check_number("bucket_bytes", self.bucket_bytes, 0, sizes)
        check_whole("lanes", self.lanes, 1, "the number of buckets that are summed at the same time, 1 or more")
        if self.order == SendOrder.PRIORITY and self.collective.calls_library:
            raise ConfigError(
                f"order='priority' chooses the next message to send, and {self.collective} may use the library's own "
                "all-reduce, "
                "whose messages it cannot choose: use Ring()"
            )
        if self.order == SendOrder.PRIORITY and self.lanes != 1:
            raise ConfigError(
                f"lanes={self.lanes} with order='priority': with it each bucket has its own lane, so leave lanes at 1"
            )

    def _check_auto(self) -> None:
        if self.collective.lossy or self.collective.keeps_residual:
            raise ConfigError(
                f"bucket_bytes='auto' changes what is summed together, and {self.collective} encodes each bucket: give "
                "a size in bytes, or a collective without a codec"
            )
        if self.apply == ApplyOrder.ANY or self.order != SendOrder.READY or self.lanes != 1:
            raise ConfigError(
                "bucket_bytes='auto' chooses the lanes, and sums end in the order of backward: use apply='all' or "
                "'backward', and leave order and lanes at their defaults; or give a size in bytes"
            )

    @property
    def requires(self) -> Requirements:
        if self.bucket_bytes == AUTO:
            buckets = Buckets(count=NUM_BUCKETS, applied_singly=self.apply != ApplyOrder.ALL)
            return Requirements(buckets=buckets, num_lanes=NUM_LANES, link=self.collective.needs_link)
        assert not isinstance(self.bucket_bytes, str)
        buckets = Buckets(max_bytes=self.bucket_bytes, applied_singly=self.apply != ApplyOrder.ALL)
        return Requirements(buckets=buckets, num_lanes=self.lanes, link=self.collective.needs_link)

    @property
    def symmetric(self) -> bool:
        return self.apply != ApplyOrder.ANY and self.order == SendOrder.READY and self.bucket_bytes != AUTO

    @property
    def elasticity(self) -> Elasticity:
        return Elasticity.SHRINKS if self.symmetric or self.bucket_bytes == AUTO else Elasticity.NONE

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Return the bytes of one sum of the gradient; None if the measured times of plans are sent too."""
        return None if self.bucket_bytes == AUTO else float(self.collective.bytes_of(rank, num_ranks, layout))

    def worker(self, ctx: Context) -> Program:
        if self.bucket_bytes == AUTO:
            yield from self._with_best_plan(ctx)
            return
        for step in ctx.steps():
            tickets = yield Backward(step, on_bucket=self._begin)
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

    def _with_best_plan(self, ctx: Context) -> Program:
        trial = PlanTrial(ctx, self.collective, singly=self.apply == ApplyOrder.BACKWARD)
        for step in ctx.steps():
            yield from trial.step(step)
            yield EndStep(step)

    def _begin(self, bucket: Gradient) -> Request:
        """Return what to start when the gradients of a bucket are final."""
        work, number = AllReduce(bucket, self.collective), bucket.bucket or 0
        if self.order == SendOrder.PRIORITY:
            # The last bucket has the first layers.
            return Start(work, lane=FREE, priority=len(bucket.layout.buckets) - 1 - number)
        return work if self.lanes == 1 else Start(work, lane=number % self.lanes)
