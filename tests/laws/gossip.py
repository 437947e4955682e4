"""A small gossip algorithm, right and wrong: what the laws of averaging must let pass, and what they must not.

None of these is in the package. The wrong ones are what a first version of such an algorithm may well be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from workbench.gradients import WEIGHT, Gradient, Layout
from workbench.ops import (
    Apply,
    Backward,
    EndStep,
    Message,
    PackParameters,
    Program,
    Recv,
    Send,
    Start,
    UnpackParameters,
    Wait,
)
from workbench.program import Algorithm, Card, Context, Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip(Algorithm):
    """w_i[t+1] = (v_i + v_{i-1}) / 2,   v_i = w_i[t] - lr * g_i(w_i[t]),   on a ring of ranks"""

    card: ClassVar[Card] = Card(
        paper="lian2017decentralized", staleness="0", bytes_per_step="n", memory="the parameters, while averaging"
    )

    @property
    def replicas(self) -> Replicas:
        return Replicas.NEVER

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        return float(layout.message_bytes) if num_ranks > 1 else 0.0

    def worker(self, ctx: Context) -> Program:
        right, left = (ctx.rank + 1) % ctx.num_workers, (ctx.rank - 1) % ctx.num_workers
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            if ctx.num_workers > 1:
                own = yield PackParameters()
                sending = yield Start(Send(right, own.flat.clone()))
                message: Message = yield Recv(left, like=own.flat)
                yield Wait(sending)
                self.average(ctx, step, own, message)
                yield UnpackParameters(own)
            yield EndStep(step)

    def average(self, ctx: Context, step: int, own: Gradient, message: Message) -> None:
        """`own` becomes the sum of both, of weight 2: parameters are divided by their weight when they are unpacked."""
        own.flat.add_(message.value)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RightGossip(Gossip):
    """As written above."""


def _wrong(name: str, why: str, average: Callable[[Context, int, Gradient, Message], None]) -> type[Gossip]:
    kind = type(name, (Gossip,), {"__slots__": (), "__doc__": why, "__module__": __name__})

    def wrongly(self: Gossip, ctx: Context, step: int, own: Gradient, message: Message) -> None:
        average(ctx, step, own, message)

    kind.average = wrongly  # type: ignore[attr-defined]
    return kind


def _scrambled(ctx: Context, step: int, own: Gradient, message: Message) -> None:
    """Parameters of one bucket in the reverse order."""
    piece = own.layout.buckets[0]
    theirs = message.value.clone()
    theirs[: piece.tail] = theirs[: piece.tail].flip(0)
    own.flat.add_(theirs)


def _wrong_divisor(ctx: Context, step: int, own: Gradient, message: Message) -> None:
    own.flat.add_(message.value)
    own.tail()[WEIGHT] = 2.1


def _own_left_out(ctx: Context, step: int, own: Gradient, message: Message) -> None:
    """One rank takes its neighbour's parameters in place of the average: its own gradient is lost."""
    if ctx.rank == 1:
        own.flat.copy_(message.value)
    else:
        own.flat.add_(message.value)


def _one_step_left_out(ctx: Context, step: int, own: Gradient, message: Message) -> None:
    """On one rank, in one step, the average is not taken: the others take it, so that the mean moves."""
    if (ctx.rank, step) != (0, 2):
        own.flat.add_(message.value)


def _block_left_out(ctx: Context, step: int, own: Gradient, message: Message) -> None:
    """The last parameter is doubled in place of averaged: it never meets that of another rank."""
    piece = own.layout.buckets[0]
    theirs = message.value.clone()
    theirs[piece.tail - 1] = own.flat[piece.tail - 1]
    own.flat.add_(theirs)


def _neighbours_swapped(ctx: Context, step: int, own: Gradient, message: Message) -> None:
    """The first two parameters of what a neighbour sent change places."""
    theirs = message.value.clone()
    theirs[[0, 1]] = message.value[[1, 0]]
    own.flat.add_(theirs)


WRONG = [
    _wrong("ScrambledGossip", "coordinates in the reverse order", _scrambled),
    _wrong("DivisorGossip", "2.1 in place of 2", _wrong_divisor),
    _wrong("OwnLeftOutGossip", "rank 1 never averages its own parameters in", _own_left_out),
    _wrong("StepLeftOutGossip", "rank 0 takes no average in step 2", _one_step_left_out),
    _wrong("BlockLeftOutGossip", "the last parameter is not averaged", _block_left_out),
    _wrong("SwappedGossip", "two parameters of the neighbour's change places", _neighbours_swapped),
]
SCRAMBLING = [kind for kind in WRONG if kind.__name__ in ("ScrambledGossip", "DivisorGossip", "SwappedGossip")]
"""Those with which nothing is learned."""
