"""Ranks in one process that send, receive, sum and work locally, in random order: for collectives by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from workbench.collectives import Collective, flat_of, native_bytes
from workbench.gradients import Gradient, Layout
from workbench.ops import AllReduce, Local, Message, Program, Recv, Request, Send, Start, Ticket, Value, Wait
from workbench.program import Context, perform


@dataclass
class Sending:
    source: int
    send: Send
    ticket: Ticket | None  # None: its rank waits for it


@dataclass
class SmallWorld:
    """Runs one program a rank. Messages are rendezvous: a value is read when it crosses, as late as the sender's `Wait`.

    `exact` counts the bytes of all-reduces by the bandwidth-optimal closed form, as `Native` does.
    """

    programs: list[Program]
    random: Random = field(default_factory=lambda: Random(0))

    def run(self) -> list[Any]:
        num = len(self.programs)
        self.bytes_sent = [0.0] * num
        self.local_bytes: list[Counter[str]] = [Counter() for _ in range(num)]
        self.results: list[Any] = [None] * num
        self.ready: dict[int, Any] = dict.fromkeys(range(num))  # rank -> the answer it is resumed with
        self.sending: list[Sending] = []
        self.receiving: dict[int, Recv] = {}
        self.summing: dict[int, Tensor] = {}
        self.waiting: dict[int, Ticket] = {}
        self.running = set(range(num))
        while self.running:
            moves = [*((self.step, (rank,)) for rank in sorted(self.ready)), *((self.cross, pair) for pair in self.pairs())]
            if len(self.summing) == num:
                moves.append((self.sum, ()))
            assert moves, f"deadlock: waiting {self.waiting}, receiving {self.receiving}, sending {self.sending}, summing {self.summing}"
            action, arguments = self.random.choice(moves)
            action(*arguments)
        assert not self.sending, "messages that nobody received"
        return self.results

    def pairs(self) -> Iterator[tuple[Sending, int]]:
        for rank, recv in self.receiving.items():
            suiting = (item for item in self.sending if (item.source, item.send.to, item.send.tag) == (recv.source, rank, recv.tag))
            first = next(suiting, None)
            if first is not None:
                yield first, rank

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
            case Send():
                self.sending.append(Sending(rank, request, None))
            case Start(work) if isinstance(work, Send):
                ticket = Ticket(0, work)
                self.sending.append(Sending(rank, work, ticket))
                self.ready[rank] = ticket
            case Recv():
                self.receiving[rank] = request
            case AllReduce(value):
                self.summing[rank] = flat_of(value)
            case Local(kind, num_bytes, action):
                self.local_bytes[rank][kind] += num_bytes
                self.ready[rank] = action()
            case Wait(ticket):
                if ticket.done:
                    self.ready[rank] = ticket.value
                else:
                    self.waiting[rank] = ticket
            case _:
                raise AssertionError(f"not what a collective is made of: {request}")

    def cross(self, item: Sending, to: int) -> None:
        self.sending.remove(item)
        value = item.send.value
        assert isinstance(value, Tensor) and value.numel(), "an empty message"
        recv = self.receiving.pop(to)
        assert recv.like.numel() == value.numel() and recv.like.dtype == value.dtype
        self.bytes_sent[item.source] += value.numel() * value.element_size()
        self.ready[to] = Message(item.source, value.clone())
        if item.ticket is None:
            self.ready[item.source] = None
            return
        item.ticket.done = True
        if self.waiting.get(item.source) is item.ticket:
            del self.waiting[item.source]
            self.ready[item.source] = None

    def sum(self) -> None:
        values = [self.summing[rank] for rank in sorted(self.summing)]
        assert len({(value.dtype, value.numel()) for value in values}) == 1, "ranks that sum different things"
        total = values[0].clone()
        for value in values[1:]:
            total += value
        for rank, value in enumerate(values):
            value.copy_(total)
            self.bytes_sent[rank] += native_bytes(len(values), value.numel() * value.element_size())
            self.ready[rank] = value
        self.summing.clear()


def program(collective: Collective, ctx: Context, value: Value) -> Program:
    """The collective's; afterwards the caller writes what it likes into the buffer, and the result is a copy of the sum."""
    assert (yield from perform(collective.all_reduce(ctx, value))) is value, "the sum is written in place"
    flat = flat_of(value)
    result = flat.clone()
    if not flat.is_meta:
        flat.fill_(77)
    return result


def contexts(num_ranks: int, layout: Layout | None = None, seed: int = 0) -> list[Context]:
    return [Context(rank, num_ranks, layout=layout, seed=seed) for rank in range(num_ranks)]


def world(collective: Collective, ranks: list[Context], values: list[Any], seed: int = 0) -> SmallWorld:
    """Ranks that sum these values, one each."""
    return SmallWorld([program(collective, ctx, value) for ctx, value in zip(ranks, values, strict=True)], Random(seed))


def gradients(layout: Layout, flats: list[Tensor], step: int = 0, bucket: int | None = None) -> list[Gradient]:
    """One a rank, of the whole layout or of one bucket, each in memory of its own."""
    return [Gradient(flat.clone(), layout, step, step, bucket) for flat in flats]


def same(results: list[Tensor]) -> bool:
    """All equal to the last bit, NaN included."""
    return all(torch.equal(result.view(torch.uint8), results[0].view(torch.uint8)) for result in results)
