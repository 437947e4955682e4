"""Recursive halving and doubling: as many bytes as a ring, and as many messages as a tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from workbench.codecs.base import Codec
from workbench.collectives.base import Collective, Link
from workbench.collectives.wire import Wire, check_codec, message_bytes, wire_share, wires
from workbench.gradients import block_bounds
from workbench.ops import Program, Ticket, Value
from workbench.program import Context

FOLD_IN, FIRST = 0, 1  # hops


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class HalvingDoubling(Collective):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling, on the largest power of two q of ranks.

    In the rounds of halving, ranks at distance q/2, q/4, ..., 1 exchange halves of what they still sum; rank i ends
    with block i of q. Doubling reverses these rounds. If p > q, the ranks 0, 2, 4, ... of the p - q first pairs give
    their value to ranks 1, 3, 5, ... at the beginning, and receive the sum at the end.

    With a codec each message that is summed is encoded again. A complete block is encoded once, by its owner, and the
    same message is forwarded in later rounds.

    Attributes:
        codec: compression of each message; none: values are sent as they are.

    Paper: thakur2005optimization ("Rabenseifner's algorithm").
    """

    codec: Codec | None = None

    def __post_init__(self) -> None:
        check_codec(self.codec)

    @property
    def fixed_schedule(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        place = Position.of(ctx.rank, ctx.num_workers)
        for wire in wires(ctx, value, self.codec):
            if ctx.num_workers > 1:
                yield from self._folded(wire, place) if place.folded else self._sum(wire, place)
        return value

    def _folded(self, wire: Wire, place: Position) -> Program:
        cuts, neighbour = block_bounds(wire.numel, place.size), wire.ctx.rank + 1
        receiving = yield from wire.start_receive(neighbour, cuts, FOLD_IN)
        message = yield from wire.pack(0, wire.numel, FOLD_IN)
        yield from wire.send(neighbour, message, FOLD_IN)
        message = yield from wire.received(receiving, cuts)
        yield from wire.put(cuts, message)

    def _sum(self, wire: Wire, place: Position) -> Program:
        cuts, rounds = block_bounds(wire.numel, place.size), list(place.rounds())
        if place.has_folded_rank:
            message = yield from wire.receive(wire.ctx.rank - 1, (0, wire.numel), FOLD_IN)
            yield from wire.add(0, wire.numel, message)
        arriving: list[tuple[int, tuple[int, ...]]]
        arriving = [(partner, (cuts[mine.start], cuts[mine.stop])) for partner, mine, _ in rounds]
        arriving += [(partner, tuple(cuts[theirs.start : theirs.stop + 1])) for partner, _, theirs in reversed(rounds)]
        # Each receive is posted before the send to the same rank: see `Ring`.
        receiving: deque[Ticket | None] = deque()
        hop = FIRST
        for partner, mine, theirs in rounds:
            message = yield from wire.pack(cuts[theirs.start], cuts[theirs.stop], hop)
            receiving.append((yield from self._listen(wire, arriving, hop - FIRST)))
            sending = yield from wire.start_send(partner, message, hop)
            part = cuts[mine.start], cuts[mine.stop]
            message = yield from wire.received(receiving.popleft(), part)
            yield from wire.add(*part, message)
            yield from wire.finish(sending)
            hop += 1
        own = cuts[place.index], cuts[place.index + 1]
        held = encoded = yield from wire.pack(*own, hop)
        for number, (partner, mine, theirs) in enumerate(reversed(rounds)):
            receiving.append((yield from self._listen(wire, arriving, hop - FIRST)))
            sending = yield from wire.start_send(partner, held, hop)
            if number == 0:
                yield from wire.adopt(*own, encoded)
            missing = cuts[theirs.start : theirs.stop + 1]
            message = yield from wire.received(receiving.popleft(), missing)
            yield from wire.put(missing, message)
            yield from wire.finish(sending)
            both = (held, message) if mine.start < theirs.start else (message, held)
            held = wire.join(cuts[min(mine.start, theirs.start) : max(mine.stop, theirs.stop) + 1], *both)
            hop += 1
        if place.has_folded_rank:
            yield from wire.send(wire.ctx.rank - 1, held, FOLD_IN)

    def _listen(self, wire: Wire, arriving: list[tuple[int, tuple[int, ...]]], number: int) -> Program:
        """Start to receive the message of the exchange with this number; None after the last one."""
        if number == len(arriving):
            return None
        partner, cuts = arriving[number]
        return (yield from wire.start_receive(partner, cuts, FIRST + number))

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        place, body = Position.of(rank, num_workers), numel - tail
        if num_workers == 1:
            return 0
        if place.folded:
            return message_bytes(self.codec, 0, numel, body, itemsize)
        cuts = block_bounds(numel, place.size)
        blocks = [
            message_bytes(self.codec, cuts[block], cuts[block + 1], body, itemsize) for block in range(place.size)
        ]
        total = sum(blocks) if place.has_folded_rank else 0
        for _, mine, theirs in place.rounds():
            total += message_bytes(self.codec, cuts[theirs.start], cuts[theirs.stop], body, itemsize)
            total += sum(blocks[mine.start : mine.stop])
        return total

    def mean_bytes(self, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """The mean over three kinds of ranks: folded into another rank, summing for two, summing for itself.

        It is approximate: ranks of one kind differ by at most one element in each round.
        """
        extra = Position.of(0, num_workers).extra
        kinds = ((0, extra), (1, extra), (2 * extra, num_workers - 2 * extra))
        return (
            sum(many * self.bytes_sent(rank, num_workers, numel, itemsize, tail) for rank, many in kinds if many)
            / num_workers
        )

    def seconds(self, num_bytes: float, num_workers: int, link: Link) -> float:
        """2 log2 q alpha + 2 (q-1)/q n beta + (q-1)/q n gamma; if q < p, 2 (alpha + n beta) + n gamma more."""
        q = Position.of(0, num_workers).size
        share = (q - 1) / q * num_bytes
        wire_s = num_bytes * wire_share(self.codec, num_bytes) / link.bandwidth_bytes_per_s
        folding_s = 2 * (link.latency_s + wire_s) + num_bytes * link.sum_s_per_byte if q < num_workers else 0.0
        return (
            2 * (q.bit_length() - 1) * link.latency_s
            + 2 * (q - 1) / q * wire_s
            + share * link.sum_s_per_byte
            + folding_s
        )


@final
@dataclass(frozen=True, slots=True)
class Position:
    """A rank's place among the q = `size` ranks that halve and double.

    Attributes:
        index: its number there.
        extra: p - q; of the first 2 * extra ranks the even ones are folded into the odd ones.
    """

    index: int
    size: int
    extra: int
    folded: bool

    @classmethod
    def of(cls, rank: int, num_workers: int) -> Position:
        """Return a rank's place.

        >>> [Position.of(rank, 6).index for rank in (1, 3, 4, 5)], Position.of(2, 6).folded
        ([0, 1, 2, 3], True)
        """
        size = 1 << (num_workers.bit_length() - 1)
        extra = num_workers - size
        paired = rank < 2 * extra
        return cls(rank // 2 if paired else rank - extra, size, extra, paired and rank % 2 == 0)

    @property
    def has_folded_rank(self) -> bool:
        """Return True if another rank is folded into this one."""
        return self.index < self.extra and not self.folded

    def rounds(self) -> Iterator[tuple[int, range, range]]:
        """Yield each round of halving: the partner's rank, the blocks that this rank keeps, and those of the partner.

        >>> list(Position.of(2, 4).rounds())
        [(0, range(2, 4), range(0, 2)), (3, range(2, 3), range(3, 4))]
        """
        distance = self.size // 2
        while distance:
            other = self.index ^ distance
            mine, theirs = self.index - self.index % distance, other - other % distance
            partner = 2 * other + 1 if other < self.extra else other + self.extra
            yield partner, range(mine, mine + distance), range(theirs, theirs + distance)
            distance //= 2
