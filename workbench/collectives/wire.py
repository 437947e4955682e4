"""Messages of ranges of a value: here the hops of a collective are encoded and decoded.

A collective names ranges [start, stop) of one bucket's flat buffer. Without a codec a message is that slice itself:
nothing is copied, and sums are taken in place. With a codec, the range's parameters are encoded. The range's part of
the tail follows in the same message, uncompressed, because weights, control flags and counts must be summed exactly
(`gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import final

import torch
from torch import Generator, Tensor

from workbench import codecs
from workbench.arguments import check_whole
from workbench.codecs.base import Codec
from workbench.collectives.memory import count_sum
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import Local, Program, Recv, Send, Start, Ticket, Value, Wait, is_done
from workbench.program import Context
from workbench.rng import derive_seed

# Tags of hops. Hops may share a tag, because messages with the same tag keep their order. Algorithms use 900 to 999.
NUM_TAGS = 900
ALIGNMENT = 8  # bytes; a codec may view its message as numbers, so the message must begin at a multiple of their size


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One bucket as messages. All methods but `like` and `join` are sub-programs; empty ranges make no message.

    Attributes:
        flat: (n,) the bucket's buffer: parameters, then its tail.
        body: number of parameters.
        bucket, step: select the noise of a stochastic codec. For a plain tensor: -1, and the number of earlier sums of
            such tensors.
    """

    ctx: Context
    flat: Tensor
    body: int
    codec: Codec | None
    bucket: int = -1
    step: int = 0

    @property
    def numel(self) -> int:
        return self.flat.numel()

    def like(self, cuts: Sequence[int]) -> Tensor:
        """Return a tensor with the size and dtype of a message of the ranges between these cuts."""
        if self.codec is None:
            return self.flat[cuts[0] : cuts[-1]]
        size = sum(
            message_bytes(self.codec, start, stop, self.body, self.flat.element_size())
            for start, stop in pairwise(cuts)
        )
        return self.flat.new_empty(1, dtype=torch.uint8).expand(size)  # a size and a dtype, but no memory

    def pack(self, start: int, stop: int, hop: int) -> Program:
        """Return the message of one range. Encodings of one range in different hops have different noise."""
        if self.codec is None or start == stop:
            return self.like((start, stop))
        return (yield Local("encode", self._size(start, stop), partial(self._encode, self.codec, start, stop, hop)))

    def adopt(self, start: int, stop: int, message: Tensor) -> Program:
        """Replace this rank's sum by what the others decode from its message, so that replicas stay equal."""
        if self.codec is not None:
            yield from self.put((start, stop), message)

    def add(self, start: int, stop: int, message: Tensor) -> Program:
        """Add the values of a message to its range."""
        if start == stop:
            return
        size = self._size(start, stop)
        if self.codec is None:
            yield Local("sum", size, partial(_add, self.flat[start:stop], message))
            return
        yield Local("decode", size, partial(self._decode_and_sum, self.codec, start, stop, message))
        yield Local("sum", size, is_done)

    def put(self, cuts: Sequence[int], message: Tensor) -> Program:
        """Replace the ranges between these cuts, each encoded separately, by the values of their joint message."""
        if cuts[0] == cuts[-1]:
            return
        if self.codec is None:
            self.flat[cuts[0] : cuts[-1]].copy_(message)
        else:
            yield Local("decode", self._size(cuts[0], cuts[-1]), partial(self._put, self.codec, cuts, message))

    def join(self, cuts: Sequence[int], *messages: Tensor) -> Tensor:
        """Join messages, in order. `put` has filled the ranges between these cuts from them."""
        return self.like(cuts) if self.codec is None else torch.cat(messages)

    def start_send(self, to: int, message: Tensor, hop: int) -> Program:
        """Start to send a message. Return the ticket for `finish`; None for an empty message."""
        return (yield Start(Send(to, message, tag=hop % NUM_TAGS))) if message.numel() else None

    def send(self, to: int, message: Tensor, hop: int) -> Program:
        """Send a message to a rank that receives first. If it also sends first, both deadlock: use `start_send`."""
        if message.numel():
            yield Send(to, message, tag=hop % NUM_TAGS)

    def start_receive(self, source: int, cuts: Sequence[int], hop: int) -> Program:
        """Start to receive a message. Return the ticket for `received`; None for an empty message."""
        like = self.like(cuts)
        return (yield Start(Recv(source, like=like, tag=hop % NUM_TAGS))) if like.numel() else None

    def received(self, ticket: Ticket | None, cuts: Sequence[int]) -> Program:
        """Return the message for a ticket of `start_receive`."""
        return (yield Wait(ticket)).value if ticket is not None else self.like(cuts)

    def receive(self, source: int, cuts: Sequence[int], hop: int) -> Program:
        """Receive a message and return it."""
        like = self.like(cuts)
        return (yield Recv(source, like=like, tag=hop % NUM_TAGS)).value if like.numel() else like

    def finish(self, ticket: Ticket | None) -> Program:
        """Wait until a started send has completed. Only then may its range be overwritten."""
        if ticket is not None:
            yield Wait(ticket)

    def _size(self, start: int, stop: int) -> int:
        return (stop - start) * self.flat.element_size()

    def _encode(self, codec: Codec, start: int, stop: int, hop: int) -> Tensor:
        """Encode into new memory: a library or a neighbour may still read the last message."""
        message = self.flat.new_empty(
            message_bytes(codec, start, stop, self.body, self.flat.element_size()), dtype=torch.uint8
        )
        for part, encoded, wire in self._sections(codec, (start, stop), message):
            if encoded:
                codec.encode_into(part, wire, self._noise(codec, start, hop))
            else:
                wire.copy_(part.view(torch.uint8))
        return message

    def _noise(self, codec: Codec, start: int, hop: int) -> Generator | None:
        if not codec.stochastic:
            return None
        device = "cpu" if self.flat.is_meta else self.flat.device
        seed = derive_seed(self.ctx.seed, f"codec/{self.bucket}/{hop}/{start}", self.ctx.rank, self.step)
        return Generator(device).manual_seed(seed)

    def _decode_and_sum(self, codec: Codec, start: int, stop: int, message: Tensor) -> None:
        for part, encoded, wire in self._sections(codec, (start, stop), message):
            if encoded:
                codec.add(_aligned(wire), part)
            else:
                part.add_(_aligned(wire).view(part.dtype))

    def _put(self, codec: Codec, cuts: Sequence[int], message: Tensor) -> None:
        for part, encoded, wire in self._sections(codec, cuts, message):
            if encoded:
                codec.decode_into(_aligned(wire), part)
            else:
                part.view(torch.uint8).copy_(wire)

    def _sections(self, codec: Codec, cuts: Sequence[int], message: Tensor) -> Iterator[tuple[Tensor, bool, Tensor]]:
        """Yield (slice of the buffer, is encoded, bytes): for each range between cuts its parameters, then its tail."""
        begin = 0
        for start, stop in pairwise(cuts):
            cut = max(start, min(stop, self.body))
            for part, encoded in ((self.flat[start:cut], True), (self.flat[cut:stop], False)):
                if part.numel():
                    end = begin + (codec.wire_bytes(part.numel()) if encoded else part.numel() * part.element_size())
                    yield part, encoded, message[begin:end]
                    begin = end


def wires(ctx: Context, value: Value, codec: Codec | None) -> list[Wire]:
    """Return a value as one wire for each bucket; a plain tensor is one bucket without a tail.

    Raises:
        ConfigError: a codec with numbers that are not floating-point.
    """
    if codec is not None and not (value.flat if isinstance(value, Gradient) else value).is_floating_point():
        raise ConfigError(f"{codec} encodes floating-point numbers: sum other types by a collective without a codec")
    if not isinstance(value, Gradient):
        flat = value.view(-1)
        step = (
            count_sum(ctx.memory, f"wire.calls/tensor-{flat.numel()}") if codec is not None and codec.stochastic else 0
        )
        return [Wire(ctx=ctx, flat=flat, body=flat.numel(), codec=codec, step=step)]
    return [
        Wire(ctx=ctx, flat=flat, body=piece.tail - piece.start, codec=codec, bucket=piece.index, step=value.step)
        for piece, flat in value.slices()
    ]


def message_bytes(codec: Codec | None, start: int, stop: int, body: int, itemsize: int) -> int:
    """Return the length of the message of one range of a value; the first `body` elements of the value are encoded.

    >>> message_bytes(None, 2, 10, 8, 4)
    32
    """
    if codec is None:
        return (stop - start) * itemsize
    encoded = max(0, min(stop, body) - start)
    return (codec.wire_bytes(encoded) if encoded else 0) + (stop - start - encoded) * itemsize


def wire_share(codec: Codec | None, num_bytes: float) -> float:
    """Return the bytes on the wire for each byte of float32 values, in a message of `num_bytes` of them."""
    if codec is None:
        return 1.0
    numel = max(1, round(num_bytes / 4))
    return codec.wire_bytes(numel) / (4 * numel)


def check_codec(codec: object) -> None:
    """Raise `ConfigError` unless it is None or a codec that needs no memory."""
    if codec is not None:
        codecs.check_codec(codec)


def check_chunks(chunks: object) -> None:
    """Raise `ConfigError` unless a block can be cut into this many chunks."""
    check_whole("chunks", chunks, 1, "the number of pieces of a block, 1 or more (2 to 8 hide a codec's time)")


def _add(total: Tensor, values: Tensor) -> None:
    total.add_(values)


def _aligned(wire: Tensor) -> Tensor:
    """Return bytes that a codec may view as numbers; copies them only if their address is not aligned."""
    return wire if wire.storage_offset() % ALIGNMENT == 0 else wire.clone()
