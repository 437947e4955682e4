"""Adasum: a sum of gradients that adds orthogonal ones, and averages parallel ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.gradients import WEIGHT, Gradient, Layout
from workbench.ops import Apply, Backward, EndStep, Local, Program, Recv, Send, Start, Wait
from workbench.program import Algorithm, Card, Context, Update

TAG = 900  # tags from 900 on are those of algorithms


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdasumSGD(Algorithm):
    """w[t+1] = w[t] - lr * A(g_1, ..., g_p),   A(x, y) = (1 - x.y / (2 |x|**2)) x + (1 - x.y / (2 |y|**2)) y

    A is taken in pairs, in a binary tree: A(A(g_1, g_2), A(g_3, g_4)), and for each parameter tensor by itself. If x
    and y are orthogonal, A is their sum; if they are equal, it is one of them. So the learning rate need not grow with
    p: use that of one worker. A rank without samples adds nothing. Replicas are equal. On one rank it is
    `SynchronousSGD`. Staleness 0.

    The ranks of a pair exchange whole gradients, at distances 1, 2, 4, ...; with more ranks than a power of two, each
    of the others first sends its gradient to a partner, and receives the result. The paper halves vectors instead, with
    about the bytes of a ring.

    Paper: maleki2020scaling, section 3 (the operator), section 4 (its tree, and its use for each layer).
    """

    card: ClassVar[Card] = Card(
        paper="maleki2020scaling, sections 3-4",
        staleness="0",
        bytes_per_step="lg(p) n",
        memory="1 gradient, while receiving",
    )

    @property
    def update(self) -> Update:
        return Update.DIRECTION

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        paired = _power_of_two(num_ranks)
        if rank >= paired:
            return float(layout.message_bytes)
        num_messages = paired.bit_length() - 1 + (rank + paired < num_ranks)
        return float(num_messages * layout.message_bytes)

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient = yield Backward(step)
            weight = gradient.tail()[WEIGHT]
            gradient.body().div_(torch.where(weight > 0, weight, 1.0))  # the mean over this rank's samples
            yield from self._combine(ctx, gradient)
            gradient.body().mul_(gradient.tail()[WEIGHT])  # `Apply` divides by it
            yield Apply(gradient)
            yield EndStep(step)

    def _combine(self, ctx: Context, gradient: Gradient) -> Program:
        """Replace the gradient by A of all ranks' gradients, and its tail by the sum of all tails."""
        paired = _power_of_two(ctx.num_workers)
        if ctx.rank >= paired:
            yield Send(ctx.rank - paired, gradient.flat, tag=TAG)
            message = yield Recv(ctx.rank - paired, like=gradient.flat, tag=TAG)
            gradient.flat.copy_(message.value)
            return
        extra = ctx.rank + paired
        if extra < ctx.num_workers:
            message = yield Recv(extra, like=gradient.flat, tag=TAG)
            yield from _add(gradient, message.value)
        distance = 1
        while distance < paired:
            partner = ctx.rank ^ distance
            receiving = yield Start(Recv(partner, like=gradient.flat, tag=TAG))
            sending = yield Start(Send(partner, gradient.flat, tag=TAG))
            message = yield Wait(receiving)
            yield Wait(sending)
            yield from _add(gradient, message.value)
            distance *= 2
        if extra < ctx.num_workers:
            yield Send(extra, gradient.flat, tag=TAG)


def _power_of_two(num_ranks: int) -> int:
    """Return the largest power of two up to this number."""
    return 1 << (num_ranks.bit_length() - 1)


def _add(gradient: Gradient, other: Tensor) -> Program:
    """Replace the gradient by A(gradient, other). Both ranks of a pair get equal bits, because products commute."""
    yield Local("sum", gradient.message_bytes, partial(_add_flat, gradient, other))


def _add_flat(gradient: Gradient, other: Tensor) -> None:
    own = gradient.flat
    for slot in gradient.layout.slots:
        x, y = (flat[slot.offset : slot.offset + slot.numel] for flat in (own, other))
        of_x, of_y = adasum_factors(x, y)
        x.mul_(of_x).add_(y * of_y)
    tail = gradient.tail()
    tail.add_(other[-tail.numel() :])


def adasum_factors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of x and of y, (n,) each, in A(x, y). That of a zero vector is 1.

    >>> [float(factor) for factor in adasum_factors(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.0]))]
    [0.5, 0.5]
    >>> [float(factor) for factor in adasum_factors(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))]
    [1.0, 1.0]
    """
    x, y, dtype = x.double(), y.double(), x.dtype  # squares of float32 may overflow
    # A product of vectors by BLAS may depend on their addresses, and so differ between the ranks of a pair.
    half_dot, squares = (x * y).sum() / 2, ((x * x).sum(), (y * y).sum())
    of_x, of_y = ((1 - half_dot / torch.where(square == 0, 1.0, square)).to(dtype) for square in squares)
    return of_x, of_y
