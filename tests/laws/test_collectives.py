"""Ring and Linear by themselves: exact sums of integers, whatever the length, the number of ranks and the order of events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workbench.collectives import Collective, Linear, Ring
from workbench.ops import Message, Program, Recv, Request, Send, Start, Ticket, Value, Wait
from workbench.program import Context

COLLECTIVES = pytest.mark.parametrize("collective", [Ring(), Linear()], ids=["ring", "linear"])


class Deadlock(AssertionError):
    pass


@dataclass
class Sending:
    source: int
    send: Send
    ticket: Ticket | None  # None: its rank waits for it


@dataclass
class World:
    """Runs one program a rank; who moves next is random, and so is when a posted message crosses.

    Messages are rendezvous: a value is read when it crosses, which may be as late as the sender's `Wait`, so that a
    buffer written in between is seen to be. Between two ranks, messages of one tag keep their order.
    """

    programs: list[Program]
    random: Random
    bytes_sent: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)

    def run(self) -> list[Any]:
        num = len(self.programs)
        self.bytes_sent, self.messages = [0] * num, [0] * num
        self.results: list[Any] = [None] * num
        self.ready: dict[int, Any] = dict.fromkeys(range(num))  # rank -> the answer it is resumed with
        self.sending: list[Sending] = []
        self.receiving: dict[int, Recv] = {}
        self.waiting: dict[int, Ticket] = {}
        self.running = set(range(num))
        while self.running:
            moves = [*((self.step, (rank,)) for rank in sorted(self.ready)), *((self.cross, pair) for pair in self.pairs())]
            if not moves:
                raise Deadlock(f"waiting: {self.waiting}, receiving: {self.receiving}, sending: {self.sending}")
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
            case Wait(ticket):
                if ticket.done:
                    self.ready[rank] = ticket.value
                else:
                    self.waiting[rank] = ticket
            case _:
                raise AssertionError(f"a collective is made of sends and receives, not of {request}")

    def cross(self, item: Sending, to: int) -> None:
        self.sending.remove(item)
        value = item.send.value
        assert isinstance(value, Tensor)
        recv = self.receiving.pop(to)
        assert recv.like.numel() == value.numel() and recv.like.dtype == value.dtype
        self.bytes_sent[item.source] += value.numel() * value.element_size()
        self.messages[item.source] += 1
        self.ready[to] = Message(item.source, value.clone())
        if item.ticket is None:
            self.ready[item.source] = None
            return
        item.ticket.done = True
        if self.waiting.get(item.source) is item.ticket:
            del self.waiting[item.source]
            self.ready[item.source] = None


def as_program(collective: Collective, ctx: Context, value: Tensor) -> Program:
    """The collective's sub-program, after which the caller writes what it likes into the buffer; the result is a copy of the sum."""
    work = collective.all_reduce(ctx, value)
    assert not isinstance(work, Request)
    assert (yield from work) is value, "the sum is written in place"
    result = value.clone()
    value.fill_(77)
    return result


def world(collective: Collective, tensors: list[Tensor], seed: int) -> World:
    """Ranks that sum these tensors, one each."""
    programs = [as_program(collective, Context(rank, len(tensors)), tensor) for rank, tensor in enumerate(tensors)]
    return World(programs, Random(seed))


def values(num_ranks: int, numel: int, seed: int) -> np.ndarray:
    """(ranks, numel) integers whose sums stay exact in float32."""
    return np.random.default_rng(seed).integers(-1000, 1000, (num_ranks, numel))


@COLLECTIVES
@given(
    num_ranks=st.integers(1, 9),
    numel=st.integers(0, 40),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]),
)
def test_sums_integers_exactly(collective: Collective, num_ranks: int, numel: int, seed: int, dtype: torch.dtype) -> None:
    inputs = values(num_ranks, numel, seed)
    tensors = [torch.tensor(row).to(dtype) for row in inputs]
    for result in world(collective, tensors, seed).run():
        assert np.array_equal(result.numpy(), inputs.sum(0))


@COLLECTIVES
@given(num_ranks=st.integers(1, 9), numel=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_sends_as_many_bytes_as_its_closed_form_says(collective: Collective, num_ranks: int, numel: int, seed: int) -> None:
    tensors = [torch.zeros(numel) for _ in range(num_ranks)]
    ran = world(collective, tensors, seed)
    ran.run()
    assert ran.bytes_sent == [collective.bytes_sent(rank, num_ranks, numel, 4) for rank in range(num_ranks)]


@given(num_ranks=st.integers(1, 9), numel=st.integers(0, 40))
def test_ring_sends_no_more_than_is_optimal(num_ranks: int, numel: int) -> None:
    """2 (p-1)/p n bytes in 2 (p-1) messages, to within the one element by which blocks differ."""
    tensors = [torch.zeros(numel) for _ in range(num_ranks)]
    ran = world(Ring(), tensors, 0)
    ran.run()
    assert sum(ran.bytes_sent) == 2 * (num_ranks - 1) * numel * 4
    for sent, messages in zip(ran.bytes_sent, ran.messages, strict=True):
        assert abs(sent - 2 * (num_ranks - 1) / num_ranks * numel * 4) < 2 * 4 + 1e-9
        assert messages <= 2 * (num_ranks - 1)


@given(num_ranks=st.integers(1, 5), numel=st.integers(1, 30), cut=st.integers(0, 30), seed=st.integers(0, 2**32 - 1))
def test_linear_is_the_sum_in_rank_order_however_it_is_cut(num_ranks: int, numel: int, cut: int, seed: int) -> None:
    """To the last bit, on numbers whose sum depends on the order."""
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((num_ranks, numel)) * 10.0 ** generator.integers(-8, 8, (num_ranks, numel))
    expected = inputs[0].copy()
    for row in inputs[1:]:
        expected += row
    tensors = [torch.tensor(row) for row in inputs]
    for piece in (slice(0, min(cut, numel)), slice(min(cut, numel), numel)):
        for result in world(Linear(), [tensor[piece] for tensor in tensors], seed).run():
            assert np.array_equal(result.numpy(), expected[piece])


@final
class Hasty(Collective):
    """A ring that never waits for what it sends."""

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        program, answer = Ring().all_reduce(ctx, value), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = None if isinstance(request, Wait) else (yield request)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int) -> float:
        raise NotImplementedError


def test_a_ring_that_does_not_wait_for_its_sends_is_caught() -> None:
    """The caller's next write then goes out in place of the sum, in some order of events."""
    inputs = values(3, 5, seed=0)
    wrong = 0
    for seed in range(50):
        tensors = [torch.tensor(row) for row in inputs]
        results = world(Hasty(), tensors, seed).run()
        wrong += any(not np.array_equal(result.numpy(), inputs.sum(0)) for result in results)
    assert wrong > 0
