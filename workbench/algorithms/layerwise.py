"""Layer-wise SGD: each bucket's all-reduce runs while backward computes the next bucket."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, final

from workbench.arguments import check_number, check_whole
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import Gradient, whole
from workbench.ops import FREE, AllReduce, Apply, Backward, EndStep, Program, Request, Start, Wait, WaitAny
from workbench.program import Buckets, Card, Context, Requirements
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

    Paper: daily2016leveraging, section 4.2; its layer-wise and task-wise orders. Priority: jayarajan2019priority.
    """

    bucket_bytes: float | None = 1 * MIB
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
        if self.bucket_bytes is not None:
            sizes = "a size in bytes, 0 for a message for each parameter, None for one message"
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

    @property
    def requires(self) -> Requirements:
        buckets = Buckets(max_bytes=self.bucket_bytes, applied_singly=self.apply != ApplyOrder.ALL)
        return Requirements(buckets=buckets, num_lanes=self.lanes, link=self.collective.needs_link)

    @property
    def symmetric(self) -> bool:
        return self.apply != ApplyOrder.ANY and self.order == SendOrder.READY

    def worker(self, ctx: Context) -> Program:
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

    def _begin(self, bucket: Gradient) -> Request:
        """Return what to start when the gradients of a bucket are final."""
        work, number = AllReduce(bucket, self.collective), bucket.bucket or 0
        if self.order == SendOrder.PRIORITY:
            # The last bucket has the first layers.
            return Start(work, lane=FREE, priority=len(bucket.layout.buckets) - 1 - number)
        return work if self.lanes == 1 else Start(work, lane=number % self.lanes)
