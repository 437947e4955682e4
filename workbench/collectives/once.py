"""A codec once around a sum: each value is encoded once, and the sum at most once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Generator, Tensor

from workbench.codecs import Codec, ErrorFeedback, SummableCodec
from workbench.codecs.feedback import add_share
from workbench.codecs.groups import check_choice, typed
from workbench.collectives.base import Collective, Native
from workbench.collectives.memory import (
    ONCE_OWNER,
    ONCE_RESIDUAL,
    Outcome,
    count_sum,
    outcome_of,
    remember_weight,
    share_of,
    spans_of,
)
from workbench.errors import ConfigError
from workbench.gradients import Gradient, block_bounds
from workbench.ops import AllReduce, Local, Program, Recv, Send, Start, Value, Wait, is_done
from workbench.program import Context
from workbench.rng import derive_seed


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """One bucket of a gradient, or a tensor: `body` goes through the codec, `tail` does not.

    Attributes:
        name: part of the names of its tensors in `ctx.memory`.
        spans: the place of each parameter in `body`.
        total_weight: see `Gradient`.
    """

    body: Tensor
    tail: Tensor
    name: str
    step: int
    spans: tuple[tuple[int, int], ...] = ()
    total_weight: float | None = None

    @property
    def nbytes(self) -> int:
        return self.body.numel() * self.body.element_size()


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Once(Collective):
    """Each rank's value is encoded once, around the whole sum. `spread` says how the sum is taken and distributed:

    | spread | rank i sends | bytes of a rank, n of them and w(n) encoded |
    |---|---|---|
    | "encoded" | C(block j of g_i) to rank j; then C(sum of the decoded blocks i) to all | about 2 (p-1) w(n/p) |
    | "raw" | the same, but the sum of block i uncompressed | (p-1) w(n/p) + (p-1) n/p |
    | "gather" | C(g_i) to all ranks; each computes the sum | (p-1) w(n) |
    | with a `SummableCodec` | its scale, then its integers, through `inner` | those of `inner` for n integers |

    `spread=None` chooses "encoded", or "gather" if the codec loses too much of a sum (`TopK`, `Sign`). Sums are taken
    in rank order, in the value's dtype. Every rank decodes the same bytes, its own included: replicas stay
    bit-identical.
    Unlike a codec in a ring's hops, the error does not grow with each hop: each g_i is encoded once, and with "encoded"
    so is the sum. A single rank also encodes and decodes. Tails are sent uncompressed with the last block's messages,
    or with the scales.

    With `ErrorFeedback` a rank's error is added to its next gradient; with "encoded", so is the owner's error of a
    block's sum. Residuals are in units of the applied mean (`collectives.memory`), and stay if no rank used a
    parameter. They are in `ctx.memory` by bucket: every value of a bucket must have the same layout.

    Attributes:
        codec: compression of a rank's value, once around the whole sum.
        spread: how the sum is distributed: encoded, raw or gather, as in the table; none: the codec decides.
        inner: sums the integers of a `SummableCodec`; lossless.

    Paper: the two exchanges of seide2014onebit, tang2021onebitadam.
    """

    codec: Codec | ErrorFeedback
    spread: Literal["encoded", "raw", "gather"] | None = None
    inner: Collective = Native()

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec | ErrorFeedback):
            raise ConfigError(
                f"codec={self.codec!r}: give a codec, such as Linear8(), or ErrorFeedback(codec=...). Without a "
                "codec, use the inner collective itself"
            )
        check_choice("spread", self.spread, ("encoded", "raw", "gather", None))
        check_inner(self.inner)
        if isinstance(self.plain, SummableCodec):
            if self.spread is not None:
                raise ConfigError(
                    f"spread={self.spread!r}: values encoded by {self.plain!r} are summed by `inner`; leave spread out"
                )
        elif self.inner != Native():
            raise ConfigError(
                f"inner={self.inner!r} is for codecs of integers, and {self.plain!r} is not: use SharedInt(), or "
                "leave inner out"
            )

    @property
    def plain(self) -> Codec:
        """The codec without its feedback."""
        return self.codec.codec if isinstance(self.codec, ErrorFeedback) else self.codec

    @property
    def exact(self) -> Collective:
        return self.inner

    @property
    def uncorrected(self) -> str:
        return "" if self.keeps_residual or self.plain.reencodes else f"{self.plain}"

    @property
    def keeps_residual(self) -> bool:
        return isinstance(self.codec, ErrorFeedback)

    @property
    def calls_library(self) -> bool:
        return isinstance(self.plain, SummableCodec) and self.inner.calls_library

    @property
    def needs_link(self) -> bool:
        return self.inner.needs_link

    def check(self, num_workers: int) -> None:
        self.inner.check(num_workers)
        if isinstance(self.plain, SummableCodec):
            self.plain.check_ranks(num_workers)

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        self.check(ctx.num_workers)
        for piece in self._pieces(ctx, value):
            if isinstance(self.plain, SummableCodec):
                yield from self._integers(ctx, piece, self.plain)
            elif self._spread == "gather":
                yield from self._gather(ctx, piece)
            else:
                yield from self._two_shots(ctx, piece)
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        size, others, codec = numel - tail, num_workers - 1, self.plain
        if isinstance(codec, SummableCodec):
            scales = self.inner.bytes_sent(rank, num_workers, num_workers + tail, itemsize)
            return scales + self.inner.bytes_sent(rank, num_workers, size, codec.message_itemsize())
        if self._spread == "gather":
            return others * (codec.wire_bytes(size) + tail * itemsize)
        bounds = block_bounds(size, num_workers)
        sizes = [bounds[block + 1] - bounds[block] for block in range(num_workers)]
        first = sum(codec.wire_bytes(block) for block in sizes) - codec.wire_bytes(sizes[rank])
        second = others * (codec.wire_bytes(sizes[rank]) if self._spread == "encoded" else sizes[rank] * itemsize)
        is_last = rank == others
        return first + second + tail * itemsize * (others if is_last else 1)

    @property
    def _spread(self) -> str:
        return self.spread or ("encoded" if self.plain.reencodes else "gather")

    # -- ways to sum -------------------------------------------------------------------------------------------

    def _two_shots(self, ctx: Context, piece: Piece) -> Program:
        """Send block j of every rank to rank j, which sums; then send block j's sum to every rank."""
        p, rank, last = ctx.num_workers, ctx.rank, ctx.num_workers - 1
        blocks, tails = _cut(piece.body, p), [piece.tail[:0]] * last + [piece.tail]
        own, itemsize = blocks[rank], piece.body.element_size()
        codec, encoded = self.plain, self._spread == "encoded"
        share = share_of(ctx, piece.name, piece.tail, piece.total_weight)
        residual = self._residual(ctx, piece.body, f"{ONCE_RESIDUAL}/{piece.name}")
        left = None if residual is None else torch.empty_like(residual)
        residuals, lefts = (
            [None] * p if residual is None else _cut(residual, p),
            [None] * p if left is None else _cut(left, p),
        )

        def encode() -> list[Tensor]:
            noise = self._noise(ctx, piece, "value")
            return [
                _join(tails[block], self._encode(blocks[block], residuals[block], share, noise, lefts[block])[0])
                for block in range(p)
            ]

        messages = yield Local("encode", piece.nbytes, encode)
        arrived = yield from _exchange(ctx, messages, [messages[rank].numel()] * p)
        total = yield from self._sum(own, [_split(message, tails[rank])[1] for message in arrived])
        if rank == last:
            _sum_tails(piece.tail, arrived)
        if encoded:
            owners = self._residual(ctx, own, f"{ONCE_OWNER}/{piece.name}")
            second = partial(self._encode, total, owners, share, self._noise(ctx, piece, "sum"))
            wire, unsent = yield Local("encode", own.numel() * itemsize, second)
        else:
            owners = unsent = None
            wire = total.view(torch.uint8)
        message = _join(tails[rank], wire)
        sizes = [codec.wire_bytes(block.numel()) if encoded else block.numel() * itemsize for block in blocks]
        sizes[last] += piece.tail.numel() * itemsize
        arrived = yield from _exchange(ctx, [message] * p, sizes)
        for source, block in enumerate(blocks):
            _, wire = _split(arrived[source], tails[source])
            if encoded:
                yield Local("decode", block.numel() * itemsize, partial(codec.decode_into, wire, block))
            else:
                block.copy_(typed(wire, block.dtype))
        piece.tail.copy_(_split(arrived[last], piece.tail)[0])
        outcome = outcome_of(piece.tail, piece.body, piece.spans)
        if residual is not None and left is not None:
            self._update_residual(ctx, piece, outcome, residual, left, share)
        if owners is not None and unsent is not None:
            outcome.update_residual(owners, unsent, share, begin=block_bounds(piece.body.numel(), p)[rank])

    def _gather(self, ctx: Context, piece: Piece) -> Program:
        """Send every rank's encoded value to every rank; all sum in the same order."""
        residual = self._residual(ctx, piece.body, f"{ONCE_RESIDUAL}/{piece.name}")
        share = share_of(ctx, piece.name, piece.tail, piece.total_weight)
        encode = partial(self._encode, piece.body, residual, share, self._noise(ctx, piece, "value"))
        wire, left = yield Local("encode", piece.nbytes, encode)
        message = _join(piece.tail, wire)
        arrived = yield from _exchange(ctx, [message] * ctx.num_workers, [message.numel()] * ctx.num_workers)
        total = yield from self._sum(piece.body, [_split(item, piece.tail)[1] for item in arrived])
        piece.body.copy_(total)
        _sum_tails(piece.tail, arrived)
        if residual is not None:
            self._update_residual(ctx, piece, outcome_of(piece.tail, piece.body, piece.spans), residual, left, share)

    def _integers(self, ctx: Context, piece: Piece, codec: SummableCodec) -> Program:
        """Find the largest scale of all ranks by one sum: each rank fills its own position. Then sum the integers."""
        p, body = ctx.num_workers, piece.body
        share = share_of(ctx, piece.name, piece.tail, piece.total_weight)
        residual = self._residual(ctx, body, f"{ONCE_RESIDUAL}/{piece.name}")

        def measure() -> Tensor:
            if residual is not None:
                add_share(body, residual, share)
            return codec.magnitude(body)

        def encode() -> tuple[Tensor, Tensor | None]:
            integers = codec.encode_shared(body, scale, p, self._noise(ctx, piece, "value"))
            if residual is None:
                return integers, None
            sent = codec.decode_shared(integers, scale, p, body)
            return integers, torch.sub(body, sent, out=sent)

        magnitude = yield Local("encode", piece.nbytes, measure)
        shared = torch.zeros(p + piece.tail.numel(), dtype=body.dtype, device=body.device)
        shared[ctx.rank : ctx.rank + 1] = magnitude
        shared[p:] = piece.tail
        shared = yield AllReduce(shared, self.inner)
        scale = shared[:p].amax().view(1).float()  # a NaN of one rank reaches all
        piece.tail.copy_(shared[p:])
        if body.numel():
            integers, left = yield Local("encode", piece.nbytes, encode)
            total = yield AllReduce(integers, self.inner)
            body.copy_((yield Local("decode", piece.nbytes, partial(codec.decode_shared, total, scale, p, body))))
            if residual is not None:
                self._update_residual(ctx, piece, outcome_of(piece.tail, body, piece.spans), residual, left, share)

    # -- parts of them -----------------------------------------------------------------------------------------

    def _sum(self, like: Tensor, wires: list[Tensor]) -> Program:
        """Decode the messages and add them in rank order. Return a new tensor like `like`."""
        nbytes = like.numel() * like.element_size()
        total = yield Local("decode", nbytes, partial(self.plain.decode, wires[0], like))
        for wire in wires[1:]:
            yield Local("decode", nbytes, partial(self.plain.add, wire, total))
            yield Local("sum", nbytes, is_done)
        return total

    def _encode(
        self,
        values: Tensor,
        residual: Tensor | None,
        share: float | Tensor,
        noise: Generator | None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (message, its error). With feedback, the values become what was encoded."""
        if residual is None:
            return self.plain.encode(values, noise), None
        assert isinstance(self.codec, ErrorFeedback)
        return self.codec.encode_share(values, residual, share, noise, out)

    def _residual(self, ctx: Context, like: Tensor, name: str) -> Tensor | None:
        """Return what error feedback has kept for such values; None without feedback."""
        if not isinstance(self.codec, ErrorFeedback):
            return None
        residual = ctx.memory.get(name)
        if residual is None:
            residual = ctx.memory[name] = torch.zeros_like(like)
        if residual.shape != like.shape or residual.dtype != like.dtype:
            raise ConfigError(
                f"{name} has {residual.numel()} values from an earlier step, but this sum has {like.numel()}: "
                "every step must have the same layout"
            )
        return residual

    def _update_residual(
        self, ctx: Context, piece: Piece, outcome: Outcome, residual: Tensor, left: Tensor | None, share: float | Tensor
    ) -> None:
        """Update the residual after the sum."""
        assert left is not None
        outcome.update_residual(residual, left, share)
        if piece.total_weight is None:
            remember_weight(ctx, piece.name, piece.tail, share)

    def _noise(self, ctx: Context, piece: Piece, what: str) -> Generator | None:
        if not self.plain.stochastic or piece.body.is_meta:
            return None
        seed = derive_seed(ctx.seed, f"codec/{piece.name}/{what}", ctx.rank, piece.step)
        return torch.Generator(piece.body.device).manual_seed(seed)

    def _pieces(self, ctx: Context, value: Value) -> Iterator[Piece]:
        if isinstance(value, Gradient):
            for bucket, flat in value.slices():
                size = bucket.tail - bucket.start
                yield Piece(
                    flat[:size], flat[size:], f"bucket-{bucket.index}", value.step, spans_of(bucket), value.total_weight
                )
            return
        flat, name = value.view(-1), f"tensor-{value.numel()}"
        # A tensor has no step to select noise by.
        calls = count_sum(ctx.memory, f"once.calls/{name}") if self.plain.stochastic else 0
        yield Piece(flat, flat[:0], name, calls)


def check_inner(inner: Any) -> None:
    """Raise `ConfigError` unless the collective sums without loss."""
    if not isinstance(inner, Collective):
        raise ConfigError(f"inner={inner!r}: give a collective, such as Native() or Ring()")
    if inner.lossy:
        raise ConfigError(f"inner={inner!r} is lossy, but must sum exactly here: use it without a codec")


def _exchange(ctx: Context, messages: list[Tensor], sizes: list[int]) -> Program:
    """Send message j to rank j and receive `sizes[i]` bytes of each rank i, in rank order.

    Empty messages are not sent.
    """
    p, rank = ctx.num_workers, ctx.rank
    arrived, sending = list(messages), []  # this rank's own message is not sent
    for distance in range(1, p):  # at each distance, every rank receives from one rank
        to, source = (rank + distance) % p, (rank - distance) % p
        if messages[to].numel():
            sending.append((yield Start(Send(to, messages[to]))))
        arrived[source] = messages[rank].new_empty(sizes[source])
        if sizes[source]:
            arrived[source] = (yield Recv(source, like=arrived[source])).value
    for ticket in sending:
        yield Wait(ticket)
    return arrived


def _cut(values: Tensor, num_blocks: int) -> list[Tensor]:
    bounds = block_bounds(values.numel(), num_blocks)
    return [values[bounds[block] : bounds[block + 1]] for block in range(num_blocks)]


def _join(tail: Tensor, wire: Tensor) -> Tensor:
    """Return one message. The tail comes first, so it is aligned for every length of the other bytes."""
    return torch.cat([tail.view(torch.uint8), wire]) if tail.numel() else wire


def _split(message: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_join`, with a tail as long as the given one."""
    cut = tail.numel() * tail.element_size()
    return message[:cut].view(tail.dtype), message[cut:]


def _sum_tails(tail: Tensor, messages: list[Tensor]) -> None:
    """Set `tail` to the sum of the messages' tails, in rank order."""
    parts = [_split(message, tail)[0].clone() for message in messages]
    tail.copy_(parts[0])
    for part in parts[1:]:
        tail.add_(part)
