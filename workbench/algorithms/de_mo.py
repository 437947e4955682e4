"""DeMo: each rank keeps its own momentum, and sends only the largest components of its cosine transform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, final

import torch
from torch import Generator, Tensor

from workbench.arguments import check_flag, check_whole, is_number
from workbench.codecs import Codec
from workbench.codecs.groups import typed
from workbench.collectives import Once
from workbench.collectives.memory import OWN
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient, Layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, Local, PackParameters, Program
from workbench.program import Algorithm, Card, Context, Update

MOMENTUM = f"{OWN}momentum"  # m_i in `Context.memory`
MAX_CHUNK = 2**15  # positions are sent as int16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DCTTopK(Codec):
    """y = IDCT(the k largest |DCT(x)|, else 0), for each chunk of s values. 6 bytes for each of the k.

    The transform is the orthonormal DCT-II, so ||x - y||**2 <= (1 - k/s) ||x||**2. The last chunk is filled with zeros.
    """

    chunk: int
    top_k: int

    @property
    def reencodes(self) -> bool:
        return False

    def wire_bytes(self, numel: int) -> int:
        return 6 * self.top_k * self._num_chunks(numel)

    def encode(self, values: Tensor, noise: Generator | None = None) -> Tensor:
        wire = torch.empty(self.wire_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        if wire.is_meta:
            return wire
        chunks = torch.zeros(self._num_chunks(values.numel()), self.chunk, device=values.device)
        chunks.view(-1)[: values.numel()] = values
        components = chunks @ cosines(self.chunk).to(chunks).T
        positions = components.abs().topk(self.top_k).indices
        where = 4 * positions.numel()
        wire[:where].view(torch.float32).copy_(components.gather(1, positions).view(-1))
        wire[where:].view(torch.int16).copy_(positions.view(-1))
        return wire

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        if wire.is_meta:
            return torch.empty_like(like)
        where = wire.numel() // 6 * 4
        components = typed(wire[:where], torch.float32).view(-1, self.top_k).to(like.dtype)
        positions = typed(wire[where:], torch.int16).view(-1, self.top_k).long()
        basis = cosines(self.chunk).to(like)
        chunks = like.new_zeros(len(components), self.chunk)
        for number in range(self.top_k):  # a product of matrices may have other bits on other ranks
            chunks.addcmul_(components[:, number, None], basis[positions[:, number]])
        return chunks.view(-1)[: like.numel()]

    def _num_chunks(self, numel: int) -> int:
        return -(-numel // self.chunk)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeMo(Algorithm):
    """m_i <- beta m_i + g_i(w),   q_i = C(m_i),   m_i <- m_i - q_i,   w <- w - lr * sign(mean_i q_i)

    C keeps the k largest components of the discrete cosine transform (DCT) of each chunk of s values. Only these are
    sent. The others stay in the momentum m_i, which is the error feedback. Each coordinate moves by lr: use a learning
    rate like Adam's, and no momentum in the optimizer. Replicas are equal; momenta are each rank's own. Staleness 0.

    With sign=False, w <- w - lr * mean_i q_i. Then with top_k=chunk and full batches it is `SynchronousSGD`, up to
    float32, and with decay=1 it is error feedback as of `Once(codec=ErrorFeedback(...))`.

    The chunks are of the flat gradient; the published code has chunks of s by s values of each matrix. It also takes
    each component's mean over the ranks that have sent it; here the mean is over all ranks. A step with a gradient that
    is not finite changes no momentum.

    Attributes:
        decay: beta, factor of the momentum in each step.
        chunk: s, number of values that are transformed together.
        top_k: k, number of components of a chunk that are sent in a step.
        sign: update by the sign of the mean; otherwise by the mean itself.

    Paper: peng2024demo, Alg. 1.
    """

    decay: float = 0.999  # beta
    chunk: int = 64  # s
    top_k: int = 4  # k
    sign: bool = True

    card: ClassVar[Card] = Card(
        paper="peng2024demo, Alg. 1", staleness="0", bytes_per_step="(p-1) n 3/32", memory="3 gradients"
    )

    def __post_init__(self) -> None:
        check_whole("chunk", self.chunk, 1, "the number of values of a chunk, 1 to 32768", most=MAX_CHUNK)
        check_whole("top_k", self.top_k, 1, "the number of components of a chunk that are sent, 1 or more")
        check_flag("sign", self.sign)
        if self.top_k > self.chunk:
            raise ConfigError(f"top_k={self.top_k}: give at most chunk={self.chunk}, the number of components")
        if not (is_number(self.decay) and 0 <= self.decay <= 1):
            raise ConfigError(f"decay={self.decay!r}: give a number from 0 to 1")

    @property
    def update(self) -> Update:
        return Update.DIRECTION if self.sign else Update.MEAN

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        return float(self._exchange.bytes_of(rank, num_ranks, layout))

    @property
    def _exchange(self) -> Once:
        """Each rank sends its components to all ranks, and adds up what it receives."""
        return Once(codec=DCTTopK(chunk=self.chunk, top_k=self.top_k), spread="gather")

    def worker(self, ctx: Context) -> Program:
        if MOMENTUM not in ctx.memory:
            ctx.memory[MOMENTUM] = torch.zeros_like((yield PackParameters()).body())
        momentum = ctx.memory[MOMENTUM]
        for step in ctx.steps():
            gradient: Gradient = yield Backward(step)
            newest = self.decay * momentum + _mean(gradient)
            gradient.body().copy_(newest)
            total: Gradient = yield AllReduce(gradient, self._exchange)
            num_bytes = newest.numel() * newest.element_size()
            sent = yield Local("encode", num_bytes, partial(self._sent, newest))
            update, weight = total.body(), total.tail()[WEIGHT]
            is_good = update.isfinite().all() & (weight > 0)
            momentum.copy_(torch.where(is_good, newest - sent, momentum))
            update.div_(ctx.num_workers)
            if self.sign:
                update.copy_(torch.where(update.isfinite(), update.sign(), torch.nan))  # the sign of a NaN is 0
            update.mul_(weight)  # `Apply` divides by it
            yield Apply(total)
            yield EndStep(step)

    def _sent(self, values: Tensor) -> Tensor:
        """q_i, as every rank decodes it."""
        codec = DCTTopK(chunk=self.chunk, top_k=self.top_k)
        return codec.decode(codec.encode(values), values)


def _mean(gradient: Gradient) -> Tensor:
    """The mean gradient of the rank's samples, (n,); 0 if it has none."""
    weight = gradient.tail()[WEIGHT]
    return torch.where(weight > 0, gradient.body() / weight, 0.0)


@cache
def cosines(size: int) -> Tensor:
    """Return the orthonormal DCT-II, (size, size) float64: component k of x is row k times x.

    >>> (cosines(4) @ torch.ones(4, dtype=torch.float64)).round(decimals=6).abs().tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    number = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi / size * number[:, None] * (number + 0.5)) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows
