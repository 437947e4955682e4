"""Partial all-reduce: a round begins when enough ranks have a gradient. A late gradient goes into a later round."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.arguments import is_number, is_whole
from workbench.collectives import Collective, Ring, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, Layout
from workbench.ops import (
    ANY,
    FREE,
    AllReduce,
    Apply,
    Backward,
    Discard,
    EndStep,
    Program,
    Recv,
    Send,
    Start,
    State,
    Ticket,
    Wait,
)
from workbench.program import Card, Context, Elasticity, Requirements, Restart

READY, GO, DONE = 990, 991, 992  # tags; those of a collective's hops are below 900
ENDED = (1 << 40) - 1  # stamp of a rank whose caller takes no more steps, and of the answer when all have ended


class Quorum(StrEnum):
    """How many of p ranks must have a gradient."""

    SOLO = "solo"  # 1
    MAJORITY = "majority"  # more than half: ceil((p + 1) / 2)
    ALL = "all"  # p


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAllReduce(CollectiveAlgorithm):
    """w[t+1] = w[t] - lr * sum_{(i,s) in S_t} g_i,s(w[s]) / |S_t|,   S_t: each rank's gradients not yet used when round t begins

    Eager-SGD. Round t begins when `quorum` ranks have their gradient of step t. A quorum is a number, a share of p, or
    a `Quorum`. All ranks take part in the round's all-reduce while they compute. A rank contributes its gradient, older
    gradients that were too late for their rounds, or zero. A late rank then applies the rounds that it missed, in
    order, and continues with the step after them. It does not compute the minibatches in between.

    So all ranks apply the same sums in the same order, and no gradient is used twice. A fast rank waits for the quorum
    only. Each minibatch of a round has the same weight. With a quorum of p it is `SynchronousSGD`, and staleness is 0.
    Otherwise staleness has no bound: late gradients are used, except those that are left over at the end of the run.

    Every rank runs its rounds next to its worker. Rank 0 also runs a coordinator that counts the ready ranks. A control
    message has one byte. A rank ends a step by applying its round, so parameters are then equal on all ranks. `dropped`
    marks the steps without a minibatch of this rank, and a gradient that was left over. A rank needs one gradient
    buffer for each round that is not yet applied.

    If a rank leaves, the others continue as fewer ranks, from the last step that any of them has finished. Only
    gradients of the rank that left are lost, if no finished step has used them. The others keep a copy of their
    contribution to a round until they have applied the round, and contribute it again. A quorum that is a number must
    not exceed the number of remaining ranks. A process that takes the rank's place begins with the next round.

    In a `Trainer` every rank calls `step` once for each round. A late rank's calls for the rounds that it missed return
    at once: they apply the round, and do not call the closure. A checkpoint does not hold gradients that wait for a round.

    Attributes:
        quorum: ranks with a gradient that begin a round: a number, a share of p, solo (1), majority or all.

    Paper: li2020eager, Alg. 1 and 2 (solo and majority).
    """

    quorum: int | float | Quorum = Quorum.MAJORITY
    collective: Collective = Ring()

    card: ClassVar[Card] = Card(
        paper="li2020eager, Alg. 1-2",
        staleness="0 with a quorum of p, else no bound",
        bytes_per_step="2 (p-1)/p n",
        memory="a gradient for each round that is not yet applied",
        roles="p workers; rank 0 also counts the ready ranks",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        if self.collective.calls_library:
            raise ConfigError(
                f"{self.collective} may use the library's own all-reduce, which cannot run next to other messages of a "
                "rank: "
                "use Ring(), or give it inner=Ring()"
            )
        quorum = self.quorum
        legal = (
            quorum in list(Quorum)
            if isinstance(quorum, str)
            else is_number(quorum) and (quorum >= 1 if is_whole(quorum) else 0 < quorum <= 1)
        )
        if not legal:
            raise ConfigError(
                f"quorum={quorum!r}: give a number of ranks, a share of them above 0.0 and up to 1.0, or "
                f"{', '.join(Quorum)}"
            )
        if self.collective.keeps_residual and not self._is_synchronous:
            raise ConfigError(
                f"{self.collective} keeps a residual, and the number of gradients in a round is not known beforehand: "
                "use quorum='all', or a codec without feedback, such as Ring(codec=Linear8())"
            )

    def num_ready(self, num_ranks: int) -> int:
        """The number of ready ranks that begins a round.

        >>> [PartialAllReduce(quorum=quorum).num_ready(4) for quorum in ("solo", "majority", "all", 2, 0.6)]
        [1, 3, 4, 2, 3]
        """
        match self.quorum:
            case Quorum.SOLO:
                return 1
            case Quorum.MAJORITY:
                return math.ceil((num_ranks + 1) / 2)
            case Quorum.ALL:
                return num_ranks
            case int():
                return self.quorum
            case _:
                return math.ceil(float(self.quorum) * num_ranks - 1e-9)  # 0.07 * 100 is a little more than 7

    @property
    def requires(self) -> Requirements:
        return Requirements(state=PartialState, link=self.collective.needs_link)

    @property
    def restart(self) -> Restart:
        """Rounds run next to the worker, and may be using a gradient that it has given to them."""
        return Restart.FROM_CHECKPOINT if self._is_synchronous else Restart.FROM_PARAMETERS

    @property
    def elasticity(self) -> Elasticity:
        """Parameters are equal at a step's end. A late rank takes those of another rank."""
        return Elasticity.SHRINKS if self._is_synchronous else Elasticity.SHRINKS_ALWAYS

    @property
    def max_staleness(self) -> int | None:
        return 0 if self._is_synchronous else None

    @property
    def _is_synchronous(self) -> bool:
        return self.quorum in (Quorum.ALL, 1.0) and not isinstance(self.quorum, int)

    def check(self, num_ranks: int) -> None:
        if self.num_ready(num_ranks) > num_ranks:
            raise ConfigError(f"quorum={self.quorum} of {num_ranks} ranks: use at most {num_ranks}, or quorum='all'")

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: control messages go to and from rank 0, and late ranks send fewer."""

    def worker(self, ctx: Context) -> Program:
        assert ctx.layout is not None
        on_host = ctx.layout.device.type == "cuda"  # a token on the GPU would wait for the work that is queued there
        token = torch.zeros(1, dtype=torch.uint8, device="cpu" if on_host else ctx.layout.device)
        resumed: PartialState = ctx.resumed or PartialState()
        ctx.resumed = shared = _SharedGradients(waiting=deque(resumed.waiting))
        num_steps = ctx.num_steps  # None: not known yet
        tasks = [(yield Start(self._rounds(ctx, num_steps, shared, token), lane=FREE, shares_tags=True))]
        if ctx.rank == 0:
            tasks.append((yield Start(self._coordinate(ctx, num_steps, token), lane=FREE, shares_tags=True)))
        step = ctx.first_step  # the next round
        while ctx.num_steps is None or step < ctx.num_steps:
            begun = step
            shared.waiting.append((yield Backward(begun)))
            if not shared.done:  # its round has not yet taken place
                yield Send(0, token, tag=READY, stamp=begun)
            while step == begun or shared.done:
                yield Recv(ctx.rank, like=token, tag=DONE)
                unused = bool(shared.waiting) and step + len(shared.done) == ctx.num_steps  # no round is left to use it
                yield from _apply(shared.done.popleft())
                shared.settle(step)
                yield EndStep(
                    step, state=PartialState(waiting=tuple(shared.waiting)), dropped=unused if step == begun else True
                )
                step += 1
        yield Send(0, token, tag=READY, stamp=ENDED if num_steps is None else num_steps)
        for ticket in tasks:
            yield Wait(ticket)
        while shared.waiting:
            yield Discard(shared.waiting.popleft())

    def _rounds(self, ctx: Context, num_steps: int | None, shared: _SharedGradients, token: Tensor) -> Program:
        """One all-reduce for each round, with the gradients that this rank has when the round begins."""
        notices: deque[Ticket] = deque()
        for number in count(ctx.first_step) if num_steps is None else range(ctx.first_step, num_steps):
            begins = yield Recv(0, like=token, tag=GO, stamped=num_steps is None)
            if num_steps is None and begins.stamp == ENDED:
                break
            mine = [shared.waiting.popleft() for _ in range(len(shared.waiting))]
            merged = _merged(ctx, mine, number)
            if mine:  # in every run: a program does not know whether its run continues without a rank that leaves
                shared.keep(number, merged)
            total = yield AllReduce(merged, self.collective)
            shared.done.append(_Round(total, tuple((ctx.rank, one.version) for one in mine), mine[1:]))
            notices.append((yield Start(Send(ctx.rank, token, tag=DONE))))
            while notices[0].done and len(notices) > 1:
                notices.popleft()
        for ticket in notices:
            yield Wait(ticket)

    def _coordinate(self, ctx: Context, num_steps: int | None, token: Tensor) -> Program:
        """Begin a round when enough ranks are ready for it. End when every rank has reported its end."""
        end = ENDED if num_steps is None else num_steps
        number, num_ready, num_ended = ctx.first_step, 0, 0
        while num_ended < ctx.num_workers:
            stamp = (yield Recv(ANY, like=token, tag=READY, stamped=True)).stamp
            num_ended += stamp == end
            num_ready += stamp == number < end
            if num_ready == self.num_ready(ctx.num_workers):
                yield from _send_to_all(ctx, token, None if num_steps is not None else number)
                number, num_ready = number + 1, 0
        if num_steps is None:
            yield from _send_to_all(ctx, token, ENDED)


@final
@dataclass(frozen=True, slots=True)
class _Round:
    """A sum to apply, the (rank, version) of this rank's gradients in it, and buffers that are free afterwards."""

    total: Gradient
    own: tuple[tuple[int, int], ...]
    spent: list[Gradient]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PartialState(State):
    """The state between two steps: this rank's gradients that wait for a round."""

    waiting: tuple[Gradient, ...] = ()

    def unused(self, step: int) -> PartialState:
        return self


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedGradients(State):
    """What a rank's worker and its rounds share. Both change it as they run.

    Attributes:
        waiting: gradients to be summed.
        done: rounds to be applied.
        given: (round, copy of what this rank gave to it), for rounds that this rank has not applied.
        spare: memory for such copies.
    """

    waiting: deque[Gradient]
    done: deque[_Round] = field(default_factory=deque)
    given: deque[tuple[int, Gradient]] = field(default_factory=deque)
    spare: list[Gradient] = field(default_factory=list)

    def keep(self, number: int, gradient: Gradient) -> None:
        """Keep a copy of what this rank gives to a round, because the sum overwrites it and the round may never end."""
        if self.spare:
            memory = self.spare.pop().flat
            memory.copy_(gradient.flat)
            self.given.append((number, replace(gradient, flat=memory)))
        else:
            self.given.append((number, gradient.copy()))

    def settle(self, step: int) -> None:
        """Free the copies of this round and of those before it: they are applied."""
        while self.given and self.given[0][0] <= step:
            self.spare.append(self.given.popleft()[1])

    def unused(self, step: int) -> PartialState:
        given = (gradient for number, gradient in self.given if number > step)
        return PartialState(waiting=(*given, *self.waiting))


def _merged(ctx: Context, mine: list[Gradient], number: int) -> Gradient:
    """The sum of this rank's gradients, in the memory of the first. Without a gradient: zero, with weight 0."""
    assert ctx.layout is not None
    if not mine:
        flat = torch.zeros(ctx.layout.numel, dtype=ctx.layout.dtype, device=ctx.layout.device)
        return Gradient(flat, ctx.layout, number, number)
    first = mine[0]
    first.step = number  # the round's, because ranks may have gradients of different steps
    for other in mine[1:]:
        word = torch.maximum(first.tail()[CONTROL], other.tail()[CONTROL])  # not the sum: one command may be in both
        first.flat.add_(other.flat)
        first.tail()[CONTROL] = word
    return first


def _send_to_all(ctx: Context, token: Tensor, stamp: int | None) -> Program:
    """Tell each rank's rounds to begin the next one, or to end."""
    sent = []
    for rank in range(ctx.num_workers):
        sent.append((yield Start(Send(rank, token, tag=GO, stamp=stamp))))
    for ticket in sent:
        yield Wait(ticket)


def _apply(done: _Round) -> Program:
    yield Apply(done.total, of=done.own)
    for gradient in done.spent:
        yield Discard(gradient)
