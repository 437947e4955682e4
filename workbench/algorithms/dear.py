"""DeAR: an all-reduce in two halves, one during backward and the other during the next forward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from workbench.arguments import check_number
from workbench.collectives import Collective, Ring, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import (
    AllGather,
    Apply,
    Backward,
    EndStep,
    Program,
    ReduceScatter,
    Request,
    Start,
    State,
    Ticket,
    Wait,
)
from workbench.program import Buckets, Card, Context, Requirements
from workbench.units import MIB


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeARState(State):
    """The state between two steps: the gradient whose update is due, and the reduce-scatter of each of its buckets."""

    gradient: Gradient
    scattered: tuple[Ticket, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeAR(CollectiveAlgorithm):
    """w_l[t+1] = w_l[t] - lr * mean_i g_l,i(w[t]),   applied when forward t+1 reaches bucket l

    Backward t reduce-scatters each bucket as soon as it is final. Step t+1 all-gathers the buckets in the order in
    which forward needs them. Forward waits before a layer until its bucket has arrived and is applied. So every
    gradient is computed from parameters with all updates, as in `SynchronousSGD`, and compute hides both halves of the
    communication. Staleness 0. After the last step the last gradient is gathered and applied. Two gradient buffers.

    At the end of a step its gradient is not yet applied. Parameters that are read there (by evaluations, for example)
    lack that update, but are equal on all ranks. A checkpoint holds each rank's own block of the sums.

    In a loop of the caller (`Trainer`) the parameters may be read and changed between two steps. There a step ends with
    its all-gather and its update, which the next forward does not hide.

    Attributes:
        bucket_bytes: size of a message, in bytes; 0: one for each parameter tensor; none: one for all.

    Paper: zhang2023dear, Alg. 1.
    """

    bucket_bytes: float | None = 1 * MIB
    collective: Collective = Ring()

    card: ClassVar[Card] = Card(
        paper="zhang2023dear, Alg. 1", staleness="0", bytes_per_step="2 (p-1)/p n", memory="1 gradient"
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        if not getattr(self.collective, "splits", False):
            raise ConfigError(f"DeAR needs an all-reduce in two halves, and {self.collective} has none: use Ring()")
        if self.bucket_bytes is not None:
            sizes = "a size in bytes, 0 for a message for each parameter, None for one message"
            check_number("bucket_bytes", self.bucket_bytes, 0, sizes)

    @property
    def requires(self) -> Requirements:
        buckets = Buckets(max_bytes=self.bucket_bytes, applied_singly=True)
        return Requirements(buckets=buckets, state=DeARState, link=self.collective.needs_link)

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: the first step sends half as many bytes as a later step."""

    @property
    def symmetric(self) -> bool:
        return True

    def worker(self, ctx: Context) -> Program:
        due: DeARState | None = ctx.resumed
        for step in ctx.steps():
            arriving = yield from self._gather(due)
            begun: list[Gradient] = []
            tickets = yield Backward(
                step,
                on_bucket=partial(self._scatter, begun),
                before_forward=partial(_update, arriving) if arriving else None,
            )
            yield from _update_all(arriving)
            gradient = begun[0].owner
            assert gradient is not None
            due = DeARState(gradient=gradient, scattered=tickets)
            if ctx.in_loop:  # the caller may read and change the parameters between two steps
                yield from self._update_whole(due)
                due = None
            yield EndStep(step, state=due)
        yield from _update_all((yield from self._gather(due)))

    def _update_whole(self, due: DeARState) -> Program:
        """Gather all buckets, then take one step of the optimizer."""
        for ticket in (yield from self._gather(due)).values():
            yield Wait(ticket)
        yield Apply(due.gradient)

    def _scatter(self, begun: list[Gradient], bucket: Gradient) -> Program:
        """Sum this rank's block of a bucket.

        Return nothing: the gradient itself is kept, so a checkpoint contains all of it.
        """
        begun.append(bucket)
        return _silent(ReduceScatter(bucket, self.collective))

    def _gather(self, due: DeARState | None) -> Program:
        """Start to distribute the sums, in the order in which forward needs them.

        Return the buckets' tickets, by number.
        """
        arriving: dict[int, Ticket] = {}
        if due is not None:
            for bucket in reversed(range(len(due.scattered))):  # the last bucket holds the first layers
                # An error of the reduce-scatter is raised here. The last bucket comes first: forward needs it first.
                yield Wait(due.scattered[bucket])
                arriving[bucket] = yield Start(AllGather(due.gradient.bucket_view(bucket), self.collective))
        return arriving


def _silent(request: Request) -> Program:
    yield request


def _update(arriving: dict[int, Ticket], bucket: int) -> Program:
    """Wait for a bucket's sum, if it is due, and apply it."""
    if bucket in arriving:
        yield Apply((yield Wait(arriving.pop(bucket))))


def _update_all(arriving: dict[int, Ticket]) -> Program:
    """Update the buckets that forward did not need."""
    for bucket in list(arriving):
        yield from _update(arriving, bucket)
