"""Direct all-reduce: each block goes straight to the rank that sums it, and the sum straight back, in two exchanges."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from torch import Tensor

from workbench.codecs.base import Codec
from workbench.collectives.base import Collective, Link
from workbench.collectives.wire import Wire, check_chunks, check_codec, message_bytes, wire_share, wires
from workbench.gradients import block_bounds
from workbench.ops import Program, Ticket, Value
from workbench.program import Context

SUMMING, SPREADING = 0, 1  # hops
NUM_POSTED_RECVS = 2  # receives posted in advance: the next one, so that no sender waits


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Direct(Collective):
    """Rank j receives block j of every rank, sums, and sends the sum to every rank: as many bytes and messages as a ring.

    Each rank sends 2 (p-1)/p n bytes. In turn d = 1 ... p - 1 rank i sends block i + d to rank i + d and receives from
    rank i - d. So each link carries one message in each direction. The sums are sent in the same turns. In a ring, each
    message waits for the one that arrives before it; here it does not. That wait is most of a ring's overhead if
    processors are busy with gradients. On hosts in a chain, prefer a ring. Rank j adds the blocks of j - 1, j - 2, ...
    (mod p) in this order.

    With a codec each rank's block is encoded once. The owner of a block encodes its sum once, and keeps the decoded
    message. A block is sent in `chunks` pieces; with 2 or more the wire does not wait for the last sum.

    Attributes:
        codec: compression of each message; none: values are sent as they are.
        chunks: number of pieces of a block; one is summed while the next is on the wire.

    Paper: thakur2005optimization (the pairwise exchange).
    """

    codec: Codec | None = None
    chunks: int = 1

    def __post_init__(self) -> None:
        check_codec(self.codec)
        check_chunks(self.chunks)

    def messages_sent(self, num_workers: int) -> int:
        return 2 * (num_workers - 1) * self.chunks

    @property
    def splits(self) -> bool:
        return True

    @property
    def fixed_schedule(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        return self._over(ctx, value, sums=True, spreads=True)

    def reduce_scatter(self, ctx: Context, value: Value) -> Program:
        return self._over(ctx, value, sums=True, spreads=False)

    def all_gather(self, ctx: Context, value: Value) -> Program:
        return self._over(ctx, value, sums=False, spreads=True)

    def _over(self, ctx: Context, value: Value, *, sums: bool, spreads: bool) -> Program:
        for wire in wires(ctx, value, self.codec):
            if ctx.num_workers > 1:
                yield from self._exchange(wire, sums=sums, spreads=spreads)
        return value

    def _exchange(self, wire: Wire, *, sums: bool, spreads: bool) -> Program:
        """Exchange one bucket. The next message is encoded and started before the one that arrived is read."""
        rank, p = wire.ctx.rank, wire.ctx.num_workers
        parts = self._parts(wire.numel, p)
        phases = [hop for hop, wanted in ((SUMMING, sums), (SPREADING, spreads)) if wanted]
        turns = [(hop, chunk, distance) for hop in phases for chunk in range(self.chunks) for distance in range(1, p)]
        totals: dict[int, Tensor] = {}  # chunk -> the message of this rank's sum
        receiving: deque[Ticket | None] = deque()
        if not sums:
            for chunk in range(self.chunks):
                yield from self._complete(wire, parts[rank][chunk], chunk, totals)
        for turn in turns[:NUM_POSTED_RECVS]:
            receiving.append((yield from self._listen(wire, parts, turn)))
        leaving = yield from self._start_turn(wire, parts, turns[0], totals)
        for number, (hop, chunk, distance) in enumerate(turns):
            following = turns[number + 1] if number + 1 < len(turns) else None
            early = following is not None and (following[0] == SUMMING or following[1] in totals)
            message = (yield from self._message(wire, parts, following, totals)) if following and early else None
            yield from wire.finish(leaving)
            if following and message is not None:
                leaving = yield from wire.start_send((rank + following[2]) % p, message, following[0])
            source = (rank - distance) % p
            part = parts[rank if hop == SUMMING else source][chunk]
            message = yield from wire.received(receiving.popleft(), part)
            for turn in turns[number + NUM_POSTED_RECVS : number + NUM_POSTED_RECVS + 1]:
                receiving.append((yield from self._listen(wire, parts, turn)))
            if hop == SPREADING:
                yield from wire.put(part, message)  # this rank has sent its own values of that part before
            else:
                yield from wire.add(*part, message)
                if spreads and distance == p - 1:
                    yield from self._complete(wire, part, chunk, totals)
            if following and not early:
                leaving = yield from self._start_turn(wire, parts, following, totals)

    def _listen(self, wire: Wire, parts: list[list[tuple[int, int]]], turn: tuple[int, int, int]) -> Program:
        """Start to receive the messages of a turn."""
        hop, chunk, distance = turn
        source = (wire.ctx.rank - distance) % wire.ctx.num_workers
        return (yield from wire.start_receive(source, parts[wire.ctx.rank if hop == SUMMING else source][chunk], hop))

    def _message(
        self, wire: Wire, parts: list[list[tuple[int, int]]], turn: tuple[int, int, int], totals: dict[int, Tensor]
    ) -> Program:
        """Return the message that is sent in a turn."""
        hop, chunk, distance = turn
        if hop == SPREADING:
            return totals[chunk]
        return (yield from wire.pack(*parts[(wire.ctx.rank + distance) % wire.ctx.num_workers][chunk], hop))

    def _start_turn(
        self, wire: Wire, parts: list[list[tuple[int, int]]], turn: tuple[int, int, int], totals: dict[int, Tensor]
    ) -> Program:
        message = yield from self._message(wire, parts, turn, totals)
        return (yield from wire.start_send((wire.ctx.rank + turn[2]) % wire.ctx.num_workers, message, turn[0]))

    def _complete(self, wire: Wire, part: tuple[int, int], chunk: int, totals: dict[int, Tensor]) -> Program:
        """Encode the complete sum of a chunk of this rank's block once, and keep the values that all ranks decode."""
        totals[chunk] = yield from wire.pack(*part, SPREADING)
        yield from wire.adopt(*part, totals[chunk])

    def _parts(self, numel: int, num_workers: int) -> list[list[tuple[int, int]]]:
        """Return where each chunk of each block begins and ends."""
        return [
            [(start + begin, start + end) for begin, end in pairwise(block_bounds(stop - start, self.chunks))]
            for start, stop in pairwise(block_bounds(numel, num_workers))
        ]

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        body, parts = numel - tail, self._parts(numel, num_workers)
        sizes = [
            sum(message_bytes(self.codec, start, stop, body, itemsize) for start, stop in block) for block in parts
        ]
        return sum(sizes) - sizes[rank] + (num_workers - 1) * sizes[rank]

    def mean_bytes(self, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Each block is sent by p - 1 ranks, and its sum p - 1 times by its owner."""
        body, parts = numel - tail, self._parts(numel, num_workers)
        total = sum(message_bytes(self.codec, start, stop, body, itemsize) for block in parts for start, stop in block)
        return 2 * (num_workers - 1) / num_workers * total

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """Return 2 (p-1) h + s if s < h, else (p-2) (s - h) more, with h = alpha + n beta / p and s = n gamma / p.

        With c chunks there are c times as many messages, each 1 / c as long; s of the last one is hidden.
        """
        p, c = num_workers, self.chunks
        if p == 1:
            return 0.0
        wire_s = wire_share(self.codec, num_bytes / p / c) * num_bytes / p / c / link.bandwidth_bytes_per_s
        sum_s = num_bytes / p / c * link.sum_s_per_byte
        hop_s = link.latency_s + wire_s
        summing_s = hop_s + (c * (p - 1) - 1) * max(hop_s, sum_s)
        return summing_s + (sum_s if c == 1 else max(0.0, sum_s - hop_s)) + c * (p - 1) * hop_s
