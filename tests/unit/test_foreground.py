"""A request of the program itself is the library's call on the calling thread: no other thread takes part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import ops
from workbench.ops import Program
from workbench.replica.backward import MicroBatch
from workbench.replica.replica import Replica
from workbench.runtimes.execution.endpoint import COMMUNICATION
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.transport.base import Deadline, Handle, SoloTransport
from workbench.trace.recorder import NullRecorder


class Heard(SoloTransport):
    """Rank 0 of two, whose peer adds nothing and answers at once; notes which thread calls it for what."""

    def __init__(self) -> None:
        super().__init__()
        self.num_workers = 2
        self.calls: list[tuple[str, str]] = []

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.current_thread().name))

    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        self._note("AllReduce")

    def reduce_scatter(self, flat: Tensor, deadline: Deadline) -> None:
        self._note("ReduceScatter")

    def all_gather(self, flat: Tensor, deadline: Deadline) -> None:
        self._note("AllGather")

    def broadcast(self, flat: Tensor, root: int, deadline: Deadline) -> None:
        self._note("Broadcast")

    def barrier(self, deadline: Deadline) -> None:
        self._note("Barrier")

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        self._note("Send")
        return self._answered()

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        self._note("Recv")
        return self._answered()

    def _answered(self) -> Handle:
        handle = super().start_all_reduce(torch.empty(0))
        assert handle is not None
        return handle


def sub_program() -> Program:
    yield ops.AllReduce(torch.zeros(3))


REQUESTS: list[ops.Request] = [
    ops.AllReduce(torch.zeros(3)),
    ops.ReduceScatter(torch.zeros(4)),
    ops.AllGather(torch.zeros(4)),
    ops.Broadcast(torch.zeros(3), 0),
    ops.Barrier(),
    ops.Send(1, torch.zeros(3)),
    ops.Recv(1, torch.zeros(3)),
]


@pytest.fixture
def heard() -> Iterator[tuple[Heard, Interpreter]]:
    model, transport = nn.Linear(2, 1), Heard()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    micro = MicroBatch(lambda: model(torch.ones(3, 2)).mean(), 0.5, 3)
    interpreter = Interpreter(transport, replica, NullRecorder(), lambda _: [micro], timeout_s=10.0)
    yield transport, interpreter
    interpreter.close()
    replica.close()


def test_these_are_all_the_requests_that_communicate() -> None:
    others = {ops.Local, ops.Start, ops.Wait, ops.WaitAny}
    assert {type(request) for request in REQUESTS} == set(COMMUNICATION) - others


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda item: type(item).__name__)
def test_a_foreground_request_is_answered_on_the_calling_thread(
    request_: ops.Request, heard: tuple[Heard, Interpreter]
) -> None:
    transport, interpreter = heard

    def program() -> Program:
        gradient = yield ops.Backward(0)
        yield request_
        yield ops.Discard(gradient)
        yield ops.EndStep(0)

    before = set(threading.enumerate())
    interpreter.advance(program())
    assert transport.calls == [(type(request_).__name__, threading.current_thread().name)]
    assert set(threading.enumerate()) <= before, "and no thread was made for it"


def test_what_is_started_is_not(heard: tuple[Heard, Interpreter]) -> None:
    """So that the test above could fail: a sub-program that is started does run on a thread of its own."""
    transport, interpreter = heard

    def program() -> Program:
        ticket: Any = yield ops.Start(sub_program())
        yield ops.Wait(ticket)
        yield ops.EndStep(0)

    interpreter.advance(program())
    assert [what for what, _ in transport.calls] == ["AllReduce"]
    assert transport.calls[0][1] != threading.current_thread().name
