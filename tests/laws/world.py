"""A world in which sub-programs run alone: no clock and no library, but every possible order of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

from workbench.collectives import Collective, flat_of
from workbench.costs import Network
from workbench.ops import AllReduce, Local, Message, Program, Recv, Request, Send, Start, Ticket, Value, Wait
from workbench.program import Context, lower, perform
from workbench.runtimes.simulator.fabric import Clock, Fabric


class Deadlock(AssertionError):
    pass


@dataclass(eq=False)
class Posted:
    """A send or a receive that has not crossed yet."""

    rank: int
    request: Any
    ticket: Ticket | None  # None: its rank waits for it

    @property
    def channel(self) -> tuple[int, int, int]:
        match self.request:
            case Send(to, _, tag):
                return self.rank, to, tag
            case _:
                return self.request.source, self.rank, self.request.tag


@dataclass
class World:
    """Runs one program a rank. The next rank to continue is random, and so is the time at which a posted message is
    delivered.

    Messages are rendezvous: a value is read at delivery, which may be as late as the sender's `Wait`. So a buffer that
        is written in between is noticed. Between two ranks, messages of one tag keep their order.
    """

    programs: list[Program]
    random: Random
    bytes_sent: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    local_bytes: dict[str, int] = field(default_factory=dict)

    def run(self) -> list[Any]:
        num = len(self.programs)
        self.bytes_sent, self.messages = [0] * num, [0] * num
        self.results: list[Any] = [None] * num
        self.ready: dict[int, Any] = dict.fromkeys(range(num))  # rank -> the answer it is resumed with
        self.sending: list[Posted] = []
        self.receiving: list[Posted] = []
        self.waiting: dict[int, Ticket] = {}
        self.unfinished: list[Ticket] = []  # started and never waited for
        self.running = set(range(num))
        while self.running:
            moves: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
                (self.step, (rank,)) for rank in sorted(self.ready)
            ]
            moves += [(self.cross, pair) for pair in self.pairs()]
            if not moves:
                raise Deadlock(f"waiting: {self.waiting}, receiving: {self.receiving}, sending: {self.sending}")
            action, arguments = self.random.choice(moves)
            action(*arguments)
        assert not self.sending and not self.receiving, "messages that nobody received, or that nobody sent"
        return self.results

    def pairs(self) -> Iterator[tuple[Posted, Posted]]:
        """The oldest send and the oldest receive of each channel that has both."""
        offers: dict[Any, Posted] = {}
        for item in self.sending:
            offers.setdefault(item.channel, item)
        for item in self.receiving:
            if (offer := offers.pop(item.channel, None)) is not None:
                yield offer, item

    def step(self, rank: int) -> None:
        answer = self.ready.pop(rank)
        try:
            request = self.programs[rank].send(answer)
        except StopIteration as stop:
            self.results[rank] = stop.value
            self.running.discard(rank)
            return
        self.take(rank, request)

    def take(self, rank: int, request: Request) -> None:
        match request:
            case Send() | Recv():
                self.post(rank, request, None)
            case Start(work) if isinstance(work, Send | Recv):
                ticket = Ticket(0, work)
                self.post(rank, work, ticket)
                self.ready[rank] = ticket
                self.unfinished.append(ticket)
            case Wait(ticket):
                self.unfinished.remove(ticket)
                if ticket.done:
                    self.ready[rank] = ticket.value
                else:
                    self.waiting[rank] = ticket
            case Local(kind, num_bytes, action):
                self.local_bytes[kind] = self.local_bytes.get(kind, 0) + num_bytes
                self.ready[rank] = action()
            case _:
                raise AssertionError(f"a collective is made of sends, receives and local work, not of {request}")

    def post(self, rank: int, request: Send | Recv, ticket: Ticket | None) -> None:
        assert 0 <= request.tag < 1000, request
        if isinstance(request, Send):
            assert request.to in range(len(self.programs)) and request.to != rank, request
            self.sending.append(Posted(rank, request, ticket))
        else:
            self.receiving.append(Posted(rank, request, ticket))

    def cross(self, sent: Posted, received: Posted) -> None:
        self.sending.remove(sent)
        self.receiving.remove(received)
        value, like = sent.request.value, received.request.like
        assert isinstance(value, Tensor)
        assert like.numel() == value.numel() and like.dtype == value.dtype and value.numel(), (
            "both sides know what a message is"
        )
        self.bytes_sent[sent.rank] += value.numel() * value.element_size()
        self.messages[sent.rank] += 1
        self.complete(received, Message(sent.rank, value.clone()))
        self.complete(sent, None)

    def complete(self, item: Posted, value: Any) -> None:
        if item.ticket is None:
            self.ready[item.rank] = value
            return
        item.ticket.done, item.ticket.value = True, value
        if self.waiting.get(item.rank) is item.ticket:
            del self.waiting[item.rank]
            self.ready[item.rank] = value


@dataclass
class Timed:
    """Runs one program a rank in the simulator's virtual time; sums cost what the network says, encoding and decoding nothing."""

    programs: list[Program]
    network: Network
    clock: Clock = field(default_factory=Clock)

    def run(self) -> float:
        """Seconds until the last rank is done."""
        self.fabric = Fabric(self.clock, self.network, len(self.programs))
        self.left = len(self.programs)
        for rank in range(len(self.programs)):
            self.clock.at(0.0, partial(self.step, rank))
        self.clock.run()
        assert not self.left, "a deadlock"
        return self.clock.now_s

    def step(self, rank: int, answer: Any) -> None:
        try:
            request = self.programs[rank].send(answer)
        except StopIteration:
            self.left -= 1
            return
        match request:
            case Start(work):
                ticket = Ticket(0, work, [])  # whom to resume when it is done
                self.post(rank, work, partial(self.finish, ticket))
                self.step(rank, ticket)
            case Wait(ticket) if not ticket.done:
                ticket.runtime.append(partial(self.step, rank))
            case Wait(ticket):
                self.step(rank, ticket.value)
            case Local(kind, num_bytes, action):
                cost_s = num_bytes * self.network.sum_s_per_byte if kind == "sum" else 0.0
                self.clock.at(self.clock.now_s + cost_s, lambda _: self.step(rank, action()))
            case _:
                self.post(rank, request, partial(self.step, rank))

    def post(self, rank: int, request: Any, then: Callable[[Any], None]) -> None:
        if isinstance(request, Send):
            num_bytes = request.value.numel() * request.value.element_size()
            self.fabric.send((0, request.tag, rank, request.to), num_bytes, request.value, then, None)
            return
        self.fabric.receive(
            (0, request.tag, request.source, rank), lambda _, source, value: then(Message(source, value.clone())), None
        )

    def finish(self, ticket: Ticket, value: Any) -> None:
        ticket.done, ticket.value = True, value
        for resume in ticket.runtime:
            resume(value)


def hasty(program: Program) -> Program:
    """Run a sub-program, after which the caller writes what it likes into the buffer; the result is a copy of the answer."""
    flat = flat_of((yield from program))
    result = flat.clone()
    flat.fill_(77)
    return result


def world(collective: Collective, values: list[Value], seed: int, **told: Any) -> World:
    """Ranks that sum these values, one each; `told` goes into the context."""
    programs = [
        hasty(summed(collective, Context(rank, len(values), **told), value)) for rank, value in enumerate(values)
    ]
    return World(programs, Random(seed))


def summed(collective: Collective, ctx: Context, value: Value) -> Program:
    """The sum that the collective takes, as a sub-program."""
    answer = yield from lower(ctx, perform(AllReduce(value, collective)))
    assert answer is value, "the sum is written in place"
    return answer
