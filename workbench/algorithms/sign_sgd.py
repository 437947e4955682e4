"""SignSGD with majority vote (Signum): ranks vote on the sign of each update with the signs of their momenta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Generator, Tensor

from workbench.arguments import is_number
from workbench.codecs import Codec
from workbench.codecs.groups import pack, unpack
from workbench.collectives import Once
from workbench.collectives.memory import OWN
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient, Layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, PackParameters, Program
from workbench.program import Algorithm, Card, Context, Update

BITS = 2
NOT_A_NUMBER = 3  # the symbols of a vote: 0, 1, 2 for -1, 0, 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Votes(Codec):
    """y = sign(x), which is -1, 0 or 1. 2 bits a value.

    Once around a sum it is a majority vote: the owner of a block sums the votes, and sends the sign of the sum. It is
    no compression of gradients, because it has no magnitude.
    """

    @property
    def contracts(self) -> bool:
        return False

    @property
    def reencodes(self) -> bool:
        return False

    def wire_bytes(self, numel: int) -> int:
        return -(-numel * BITS // 8)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        if values.is_meta:
            return torch.empty(self.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        symbols = torch.where(values.isfinite(), values.sign() + 1, NOT_A_NUMBER)
        return pack(symbols.to(torch.uint8), BITS)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta:
            return torch.empty_like(like)
        symbols = unpack(wire, BITS, like.numel()).to(like.dtype)
        return torch.where(symbols == NOT_A_NUMBER, torch.nan, symbols - 1)


MOMENTUM = f"{OWN}momentum"  # v_i in `Context.memory`
VOTE = Once(codec=Votes(), spread="encoded")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGD(Algorithm):
    """v_i[t+1] = beta v_i[t] + (1 - beta) g_i(w[t]),   w[t+1] = w[t] - lr * sign(sum_i sign(v_i[t+1]))

    Each coordinate moves by lr, whatever the gradient's magnitude: use a learning rate like Adam's, and no momentum in
    the optimizer. A vote is -1, 0 or 1; a tie moves nothing. The paper sends 1 bit a value in each direction, where a
    vote cannot be 0; here it is 2. A rank without samples does not vote, and one with a NaN or an infinity makes the
    result NaN. Replicas are equal; momenta are each rank's own. With momentum=0 it is signSGD with majority vote, and
    on one rank signSGD. Staleness 0.

    Attributes:
        momentum: beta, weight of past gradients in the average whose sign is sent; 0: the gradient's own sign.

    Paper: bernstein2018signsgd, Alg. 1-3 (signSGD, Signum, majority vote).
    """

    momentum: float = 0.9  # beta

    card: ClassVar[Card] = Card(
        paper="bernstein2018signsgd, Alg. 1-3",
        staleness="0",
        bytes_per_step="2 (p-1)/p n / 16",
        memory="1 gradient",
    )

    def __post_init__(self) -> None:
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ConfigError(f"momentum={self.momentum!r}: give a number from 0 to below 1")

    @property
    def update(self) -> Update:
        return Update.DIRECTION

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        return float(VOTE.bytes_of(rank, num_ranks, layout))

    def worker(self, ctx: Context) -> Program:
        if MOMENTUM not in ctx.memory:
            ctx.memory[MOMENTUM] = torch.zeros_like((yield PackParameters()).body())
        momentum = ctx.memory[MOMENTUM]
        for step in ctx.steps():
            gradient = yield Backward(step)
            newest = self._vote(gradient, momentum)
            total = yield AllReduce(gradient, VOTE)
            momentum.copy_(newest)
            total.body().mul_(total.tail()[WEIGHT])  # `Apply` divides by it
            yield Apply(total)
            yield EndStep(step)

    def _vote(self, gradient: Gradient, momentum: Tensor) -> Tensor:
        """Return the next momentum, and replace the gradient by it. A rank whose gradient has no weight has zeros."""
        body, weight = gradient.body(), gradient.tail()[WEIGHT]
        newest = self.momentum * momentum + (1 - self.momentum) * body / weight
        is_good = (weight > 0) & body.isfinite().all()
        body.copy_(torch.where(is_good, newest, body))
        return torch.where(is_good, newest, momentum)
