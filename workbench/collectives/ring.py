"""Ring all-reduce: reduce-scatter, then all-gather; each rank exchanges messages only with its two neighbours."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from workbench.codecs.base import Codec
from workbench.collectives.base import Collective, Link
from workbench.collectives.wire import Wire, check_chunks, check_codec, message_bytes, wire_share, wires
from workbench.gradients import block_bounds
from workbench.ops import Program, Ticket, Value
from workbench.program import Context


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ring(Collective):
    """p - 1 hops sum and p - 1 hops distribute; each rank sends 2 (p-1)/p n bytes.

    In hop h rank i sends block (i - h - 1) mod p to i + 1 and receives block (i - h - 2) mod p. While h < p - 1, it
    adds what it receives. So block i is complete at rank i after p - 1 hops, and is then forwarded around the ring.
    Block sizes differ by at most one element, and may be 0.

    With a codec each summing hop decodes, sums and encodes again. A complete block is encoded once, by its owner, which
    keeps the decoded message; the same message is then forwarded. A block is sent in `chunks` pieces: one is encoded,
    decoded and summed while the next is on the wire.

    Attributes:
        codec: compression of each message; none: values are sent as they are.
        chunks: number of pieces of a block; one is summed while the next is on the wire.

    Paper: li2018pipesgd; patarasuk2009bandwidth (the algorithm).
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
        return self._over(ctx, value, 0, 2 * (ctx.num_workers - 1))

    def reduce_scatter(self, ctx: Context, value: Value) -> Program:
        return self._over(ctx, value, 0, ctx.num_workers - 1)

    def all_gather(self, ctx: Context, value: Value) -> Program:
        return self._over(ctx, value, ctx.num_workers - 1, 2 * (ctx.num_workers - 1))

    def _over(self, ctx: Context, value: Value, first: int, last: int) -> Program:
        for wire in wires(ctx, value, self.codec):
            yield from self._pass(wire, first, last)
        return value

    def _pass(self, wire: Wire, first: int, last: int) -> Program:
        """Do the hops from `first` to before `last` of one bucket."""
        rank, p = wire.ctx.rank, wire.ctx.num_workers
        right, left = (rank + 1) % p, (rank - 1) % p
        bounds = block_bounds(wire.numel, p)
        hops = [(hop, part) for hop in range(first, last) for part in self._chunks(bounds, rank - hop - 2)]
        sending: deque[Ticket | None] = deque()
        receiving: deque[Ticket | None] = deque()
        # Receives are posted before sends, because gloo has one stream of bytes to a neighbour. Otherwise a rank would
        # send its request to receive after its message, and two ranks would wait for each other.
        for later, its_part in hops[: self.chunks]:
            receiving.append((yield from wire.start_receive(left, its_part, later)))
        for part in self._chunks(bounds, rank - first - 1) if hops else ():
            sending.append((yield from self._send_chunk(wire, right, first, part)))
        for position, (hop, part) in enumerate(hops):
            message = yield from wire.received(receiving.popleft(), part)
            for later, its_part in hops[position + self.chunks : position + self.chunks + 1]:
                receiving.append((yield from wire.start_receive(left, its_part, later)))
            if hop < p - 1:
                yield from wire.add(*part, message)
                if hop + 1 < last:
                    sending.append((yield from self._send_chunk(wire, right, hop + 1, part)))
            else:
                if hop + 1 < last:
                    sending.append((yield from wire.start_send(right, message, hop + 1)))
                yield from wire.put(part, message)
            # With two ranks a later hop overwrites the block, so it must have left.
            yield from wire.finish(sending.popleft())

    def _send_chunk(self, wire: Wire, right: int, hop: int, part: tuple[int, int]) -> Program:
        """Send this rank's values of a chunk. In the first distributing hop they are the whole sum."""
        message = yield from wire.pack(*part, hop)
        ticket = yield from wire.start_send(right, message, hop)
        if hop == wire.ctx.num_workers - 1:
            yield from wire.adopt(*part, message)
        return ticket

    def _chunks(self, bounds: list[int], block: int) -> list[tuple[int, int]]:
        """Return where each chunk of a block (modulo the number of ranks) begins and ends."""
        block %= len(bounds) - 1
        cuts = block_bounds(bounds[block + 1] - bounds[block], self.chunks)
        return [(bounds[block] + start, bounds[block] + stop) for start, stop in pairwise(cuts)]

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        sizes = self._block_bytes(num_workers, numel, itemsize, tail)
        kept_summing = sizes[rank]  # the one block this rank never passes on while summing
        kept_spreading = sizes[(rank + 1) % num_workers]
        return 2 * sum(sizes) - kept_summing - kept_spreading

    def mean_bytes(self, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """Each block is passed on 2 (p-1) times."""
        return 2 * (num_workers - 1) / num_workers * sum(self._block_bytes(num_workers, numel, itemsize, tail))

    def _block_bytes(self, num_workers: int, numel: int, itemsize: int, tail: int) -> list[int]:
        """Return the bytes of each block on the wire."""
        bounds, body = block_bounds(numel, num_workers), numel - tail
        return [
            sum(message_bytes(self.codec, start, stop, body, itemsize) for start, stop in self._chunks(bounds, block))
            for block in range(num_workers)
        ]

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma.

        With c chunks a hop begins max(alpha + (n beta + n gamma) / (p c), n beta / p, n gamma / p) after the hop before
        it: the first chunk of that hop has been received and summed, and the wire and the processor are done with its
        block. The final hop takes alpha + n beta / p.
        """
        p, c = num_workers, self.chunks
        if p == 1:
            return 0.0
        wire_s = wire_share(self.codec, num_bytes / p / c) * num_bytes / p / link.bandwidth_bytes_per_s
        sum_s = num_bytes / p * link.sum_s_per_byte
        summing_s = max(link.latency_s + (wire_s + sum_s) / c, wire_s, sum_s)
        spreading_s = max(link.latency_s + wire_s / c, wire_s)
        return (p - 1) * summing_s + (p - 2) * spreading_s + link.latency_s + wire_s
