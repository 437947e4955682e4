"""DiLoCo with a quorum, right and wrong: the outer step takes the first q of p changes, and late ones join the next.

Not in the package: an algorithm as a user writes it, in one file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch

from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import (
    ANY,
    FREE,
    Apply,
    Backward,
    EndStep,
    Message,
    PackParameters,
    Program,
    Recv,
    Send,
    Start,
    Ticket,
    UnpackParameters,
    Wait,
)
from workbench.program import Algorithm, Card, Context, Replicas, Restart, Update

CHANGE, ANCHOR = 910, 911  # tags
DONE = (1 << 40) - 1  # stamp of a rank that takes no more steps


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumDiLoCo(Algorithm):
    """Each rank takes H steps alone from the anchor a, and sends its change D_i = a - w_i.

    D = mean of q changes of the round and of the late ones,   m <- mu m + D,   a <- a - outer_lr (D + mu m)
    """

    quorum: int = 3
    every: int = 4
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    card: ClassVar[Card] = Card(
        paper="douillard2023diloco", staleness="0", bytes_per_step="2 n / H", memory="2 vectors"
    )

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def depends_on_timing(self) -> bool:
        return True

    @property
    def max_staleness(self) -> None:
        return None

    @property
    def replicas(self) -> Replicas:
        return Replicas.AT_END

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def restart(self) -> Restart:
        return Restart.FROM_PARAMETERS

    def check(self, num_ranks: int) -> None:
        if self.quorum > num_ranks:
            raise ConfigError(f"quorum={self.quorum} of {num_ranks} ranks: use at most {num_ranks}")

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        return None

    def counts(self, is_late: bool) -> bool:
        """Whether a change counts towards the quorum."""
        return not is_late

    def worker(self, ctx: Context) -> Program:
        packed: Gradient = yield PackParameters()
        server = None
        if ctx.rank == 0:
            server = yield Start(self.coordinate(ctx, packed.copy()), lane=FREE, shares_tags=True)
        anchor, round_number = packed.body().clone(), 0
        for num_done, step in enumerate(ctx.steps(), 1):
            yield Apply((yield Backward(step)), local=True)
            if num_done % self.every == 0 or ctx.is_last(step):
                packed = yield PackParameters()
                change = packed.copy()
                change.body().copy_(anchor - packed.body())
                yield Send(0, change.flat, tag=CHANGE, stamp=round_number)
                message: Message = yield Recv(0, like=packed.flat, tag=ANCHOR, stamped=True)
                yield UnpackParameters(replace(packed, flat=message.value))
                anchor, round_number = replace(packed, flat=message.value).body().clone(), message.stamp
            yield EndStep(step)
        packed = yield PackParameters()
        yield Send(0, packed.flat, tag=CHANGE, stamp=DONE)
        message = yield Recv(0, like=packed.flat, tag=ANCHOR, stamped=True)
        yield UnpackParameters(replace(packed, flat=message.value))
        if server is not None:
            yield Wait(server)

    def coordinate(self, ctx: Context, anchor: Gradient) -> Program:
        momentum = torch.zeros_like(anchor.body())
        total, num_changes, num_counted, round_number = torch.zeros_like(momentum), 0, 0, 0
        waiting: list[int] = []
        active = ctx.num_workers
        answers: list[Ticket] = []
        while active:
            message: Message = yield Recv(ANY, like=anchor.flat, tag=CHANGE, stamped=True)
            if message.stamp == DONE:
                active -= 1
            else:
                is_late = message.stamp < round_number
                total += replace(anchor, flat=message.value).body()
                num_changes += 1
                num_counted += self.counts(is_late)
                if is_late:
                    answers.append(
                        (yield Start(Send(message.source, anchor.flat.clone(), tag=ANCHOR, stamp=round_number)))
                    )
                else:
                    waiting.append(message.source)
            if num_counted and num_counted >= min(self.quorum, active):
                mean = total / num_changes
                momentum.mul_(self.outer_momentum).add_(mean)
                anchor.body().sub_(mean + self.outer_momentum * momentum, alpha=self.outer_lr)
                total.zero_()
                num_changes = num_counted = 0
                round_number += 1
                for rank in waiting:
                    answers.append((yield Start(Send(rank, anchor.flat.clone(), tag=ANCHOR, stamp=round_number))))
                waiting = []
        for rank in range(ctx.num_workers):
            answers.append((yield Start(Send(rank, anchor.flat.clone(), tag=ANCHOR, stamp=round_number))))
        for ticket in answers:
            yield Wait(ticket)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LateCounts(QuorumDiLoCo):
    """Wrong: late changes count towards q."""

    def counts(self, is_late: bool) -> bool:
        return True
