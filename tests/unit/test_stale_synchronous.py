"""Whom the server of stale synchronous parallel answers, when, and at what cost."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from workbench.algorithms import StaleSynchronousSGD
from workbench.algorithms.parameter_server import LAST, stamp_of
from workbench.gradients import Gradient, build_layout
from workbench.ops import Apply, Message, PackParameters, PeerLeft, Recv, Send, Start, Ticket, Wait
from workbench.program import Context


@dataclass
class Readable:
    """The rule as the paper states it: an answer is due when clock_k - min_i clock_i <= bound, over those that still push."""

    bound: int
    clocks: dict[int, int]
    waiting: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)

    def push(self, worker: int, *, last: bool) -> list[int]:
        self.clocks[worker] += 1
        (self.last if last else self.waiting).append(worker)
        return self._due()

    def leave(self, worker: int) -> list[int]:
        del self.clocks[worker]
        self.waiting = [other for other in self.waiting if other != worker]
        return self._due()

    def _due(self) -> list[int]:
        slowest = min((clock for worker, clock in self.clocks.items() if worker not in self.last), default=0)
        due = [worker for worker in self.waiting if self.clocks[worker] - slowest <= self.bound]
        self.waiting = [worker for worker in self.waiting if worker not in due]
        return due


class Served:
    """The server's program with hand-made messages; `replies` holds whom it has answered since the last message."""

    def __init__(self, bound: int, num_workers: int) -> None:
        layout = build_layout([("w", nn.Parameter(torch.zeros(1)))])
        self.layout, self.replies, self.version = layout, list[int](), 0
        self.value = torch.zeros(layout.numel)
        self.program = StaleSynchronousSGD(bound=bound).serve(Context(0, num_workers, num_steps=1, layout=layout), 0)
        self.over = False
        self._continue(None)

    def hear(self, message: Message | PeerLeft) -> list[int]:
        self.replies = []
        self._continue(message)
        return self.replies

    def push(self, worker: int, *, last: bool) -> list[int]:
        return self.hear(Message(worker, self.value, stamp_of(0, LAST * last)))

    def _continue(self, answer: Any) -> None:
        while True:
            try:
                request = self.program.send(answer)
            except StopIteration:
                self.over = True
                return
            match request:
                case Recv():
                    return
                case PackParameters():
                    answer = Gradient(self.value, self.layout, -1, self.version, 0)
                case Apply():
                    self.version += 1
                    answer = None
                case Start(Send(to)):
                    self.replies.append(to)
                    answer = Ticket.completed(None)
                case Wait():
                    answer = None
                case _:
                    raise AssertionError(f"a server asked for {request}")


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_answers_is_that_of_the_readable_rule(bound: int, seed: int) -> None:
    chance, num_workers, steps = random.Random(seed), 7, 9
    server, readable = Served(bound, num_workers), Readable(bound, dict.fromkeys(range(num_workers), 0))
    free, left, num_answers = list(range(num_workers)), set[int](), 0
    while free:
        if chance.random() < 0.03 and len(left) < 3:
            worker = chance.choice(
                [worker for worker in range(num_workers) if worker not in readable.last and worker not in left]
            )
            left.add(worker)
            answered, due = server.hear(PeerLeft(worker)), readable.leave(worker)
            free = [other for other in free if other != worker]
        else:
            worker = chance.choice(free)
            free.remove(worker)
            last = readable.clocks[worker] + 1 == steps
            answered, due = server.push(worker, last=last), readable.push(worker, last=last)
        if server.over:
            assert not free and answered[-len(readable.last) :] == readable.last, (
                "the last parameters go to all, in order"
            )
            answered = answered[: -len(readable.last)]
        assert answered == due
        num_answers += len(due)
        free.extend(due)
    assert server.over and num_answers > num_workers * (steps - 2) - 3 * steps


def test_where_two_leave_the_slowest_may_rise_by_more_than_one() -> None:
    server = Served(2, 3)
    assert server.push(1, last=False) == [1] and server.push(1, last=False) == [1] and server.push(1, last=False) == []
    assert server.push(2, last=False) == [2]
    assert server.hear(PeerLeft(0)) == [1], "worker 2 stands at 1, worker 1 at 3"
    assert server.push(1, last=False) == []
    assert server.hear(PeerLeft(2)) == [1]


def opcodes(work: Callable[[], None], files: Iterable[str]) -> int:
    """Bytecode instructions that work executes in these files: a count of loop iterations that no load of the machine changes."""
    names, count = tuple(files), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(names):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_an_update_costs_the_same_whatever_the_number_of_workers() -> None:
    """Three steps of p workers in step are 3 p updates: four times the workers may cost four times as much, and a little."""

    def three_steps(num_workers: int) -> None:
        server = Served(3, num_workers)
        for step in range(3):
            for worker in range(num_workers):
                server.push(worker, last=step == 2)
        assert server.over

    files = ["algorithms/stale_synchronous.py", "algorithms/parameter_server.py"]
    few, many = (opcodes(partial(three_steps, num_workers), files) for num_workers in (50, 200))
    assert many < 4.5 * few
