"""Small algorithms, right and wrong: `workbench check` must accept the right ones and find the wrong ones.

None of these is in the package. The wrong ones are likely first versions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.gradients import WEIGHT, Gradient
from workbench.ops import (
    AllReduce,
    Apply,
    Backward,
    Discard,
    EndStep,
    Message,
    Program,
    Recv,
    Request,
    Send,
    Start,
    State,
    Ticket,
    Wait,
)
from workbench.program import Algorithm, Buckets, Card, Context, Requirements


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Algorithm):
    """Synchronous SGD, written without the package's collectives: each rank sends its gradient to all others."""

    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="(p-1) n", memory="none")

    def worker(self, ctx: Context) -> Program:
        others = [rank for rank in range(ctx.num_workers) if rank != ctx.rank]
        for step in ctx.steps():
            gradient: Gradient = yield Backward(step)
            own = gradient.flat.clone()
            sending = []
            for rank in others:
                sending.append((yield Start(Send(rank, own))))
            received = {ctx.rank: own}
            for rank in others:
                message: Message = yield Recv(rank, like=own)
                received[rank] = message.value
            for ticket in sending:
                yield Wait(ticket)
            self.add(gradient, [received[rank] for rank in range(ctx.num_workers)])
            yield Apply(gradient)
            yield EndStep(step)

    def add(self, gradient: Gradient, flats: list[Tensor]) -> None:
        """Sum gradients and their tails, whose weight divides the sum."""
        gradient.flat.copy_(torch.stack(flats).sum(0))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Undivided(Own):
    """Wrong: the sum is divided by the weight of one rank's gradient."""

    def add(self, gradient: Gradient, flats: list[Tensor]) -> None:
        total = torch.stack(flats).sum(0)
        gradient.body().copy_(total[: gradient.body().numel()])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumState(State):
    momentum: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMomentum(Algorithm):
    """m <- mu m + mean_i g_i,   w <- w - lr m"""

    mu: float = 0.5
    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="2 (p-1)/p n", memory="m")

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=1), state=MomentumState)

    def worker(self, ctx: Context) -> Program:
        momentum = self.begin(ctx)
        for step in ctx.steps():
            total: Gradient = yield AllReduce((yield Backward(step)))
            momentum = total.body().clone() if momentum is None else self.mu * momentum + total.body()
            total.body().copy_(momentum)
            yield Apply(total)
            yield EndStep(step, state=MomentumState(momentum=momentum))

    def begin(self, ctx: Context) -> Tensor | None:
        return None if ctx.resumed is None else ctx.resumed.momentum.clone()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetsMomentum(OwnMomentum):
    """Wrong: a resumed run begins without momentum."""

    def begin(self, ctx: Context) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodState(State):
    owed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Period(Algorithm):
    """Every third step applies the sum of the mean gradients of three steps; the last step applies what is left."""

    every: int = 3
    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="2 (p-1)/p n", memory="n")

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=1), state=PeriodState)

    def worker(self, ctx: Context) -> Program:
        owed = self.begin(ctx)
        for step in ctx.steps():
            total: Gradient = yield AllReduce((yield Backward(step)))
            mean = total.body() / total.tail()[WEIGHT]
            owed = mean if owed is None else owed + mean
            if (step + 1) % self.every == 0 or ctx.is_last(step):
                total.body().copy_(owed * total.tail()[WEIGHT])
                yield Apply(total)
                owed = torch.zeros_like(owed)
            else:
                yield Discard(total)
            yield EndStep(step, state=PeriodState(owed=owed))

    def begin(self, ctx: Context) -> Tensor | None:
        return None if ctx.resumed is None else ctx.resumed.owed.clone()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DropsAtStop(Period):
    """Wrong: a stop inside a period loses the gradients of its first steps."""

    def begin(self, ctx: Context) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight(State):
    sums: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed(Algorithm):
    """Each sum is applied `delay` steps late; those in flight at the end of a run are applied there."""

    delay: int = 1
    card: ClassVar[Card] = Card(paper="", staleness="1", bytes_per_step="2 (p-1)/p n", memory="n")

    @property
    def max_staleness(self) -> int:
        return 1

    @property
    def requires(self) -> Requirements:
        return Requirements(state=InFlight)

    def worker(self, ctx: Context) -> Program:
        sums = deque[Ticket](ctx.resumed.sums if ctx.resumed else ())
        for step in ctx.steps():
            sums.append((yield Start(AllReduce((yield Backward(step))))))
            if len(sums) > self.delay:
                yield Apply((yield Wait(sums.popleft())))
            yield EndStep(step, state=InFlight(sums=tuple(sums)))
        while sums:
            yield self.last((yield Wait(sums.popleft())))

    def last(self, total: Gradient) -> Request:
        """What becomes of a sum in flight at the end."""
        return Apply(total)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LateByTwo(Delayed):
    """Wrong: a gradient is one update later than declared."""

    delay: int = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DropsLast(Delayed):
    """Wrong: the sum in flight at the end of a run is lost."""

    def last(self, total: Gradient) -> Request:
        return Discard(total)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WritesInFlight(Algorithm):
    """Wrong: the gradient is halved while it is summed in the background."""

    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="2 (p-1)/p n", memory="none")

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient: Gradient = yield Backward(step)
            ticket = yield Start(AllReduce(gradient))
            gradient.body().mul_(0.5)
            yield Apply((yield Wait(ticket)))
            yield EndStep(step)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Algorithm):
    """Wrong: every rank waits for a message that nobody sends."""

    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="0", memory="none")

    def worker(self, ctx: Context) -> Program:
        yield Recv((ctx.rank + 1) % ctx.num_workers, like=torch.zeros(1))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Raises(Algorithm):
    """Wrong: an error in the program."""

    card: ClassVar[Card] = Card(paper="", staleness="0", bytes_per_step="0", memory="none")

    def worker(self, ctx: Context) -> Program:
        yield Discard((yield Backward(ctx.first_step // 0)))
