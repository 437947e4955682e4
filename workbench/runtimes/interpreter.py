"""Runs one rank's program on a real communication library: answers its requests, keeps time, counts bytes, writes the trace.

Foreground requests run on the calling thread. In the background, sends, receives and native all-reduces are the library's
own where it makes progress by itself (gloo, NCCL); everything else runs in order of starting on one lane thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from workbench import ops
from workbench.backward import Hooks, Micro
from workbench.gradients import Gradient
from workbench.ops import Program, Request, Ticket
from workbench.program import perform
from workbench.replica import Replica
from workbench.runtimes.endpoint import Endpoint, Ledger, bucket_of
from workbench.runtimes.transport import Handle, Patience, Transport
from workbench.trace.recorder import Recorder

LANE_SPINS = 20  # a lane polls beside a thread that computes, and each poll takes the interpreter from it
TAG_SPAN = 1024  # tags a sub-program may use; each started one has its own range
NUM_TAG_RANGES = 28  # MPI guarantees tags up to 32767 only


@final
class Interpreter:
    """One rank's program counter, lanes and ledger.

    Args:
        minibatch: step -> the micro-batches of this rank.
        timeout_s: how long to wait for peers; None for ever.
    """

    def __init__(
        self,
        transport: Transport,
        replica: Replica,
        recorder: Recorder,
        minibatch: Callable[[int], Sequence[Micro]],
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.transport = transport
        self.replica = replica
        self.recorder = recorder
        self.ledger = Ledger(transport, recorder, timeout_s)
        self.loss: torch.Tensor | None = None  # of the last backward
        self.staleness: int | None = None  # the largest applied since the last EndStep
        self._minibatch = minibatch
        self._here = Endpoint(transport, self.ledger, "comm")
        self._num_started = 0
        self._lane: _Lane | None = None

    @property
    def bytes_sent(self) -> float:
        """Bytes this rank has put on the wire."""
        return self._here.bytes_sent + (self._lane.endpoint.bytes_sent if self._lane else 0.0)

    def advance(self, program: Program) -> ops.EndStep | None:
        """Run to the next `EndStep`, which is returned, or to the program's end (None)."""
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return None
            if isinstance(request, ops.EndStep):
                return request
            answer = self._answer(request)

    def _answer(self, request: Request) -> Any:
        match request:
            case ops.Backward():
                return self._backward(request)
            case ops.Start(work):
                return self.start(work)
            case ops.Wait(ticket):
                return self._wait(ticket)
            case ops.WaitAny(tickets, timeout_s):
                return self._wait_any(tickets, timeout_s)
            case ops.Apply(gradient, lr_scale):
                return self._apply(gradient, lr_scale)
            case ops.ReadParameters():
                return self.replica.read_parameters()
            case ops.WriteParameters(value):
                return self.replica.write_parameters(value)
            case ops.Now():
                return self.ledger.now()
            case _:
                begin = self.ledger.now()
                value = self._here.perform(request)
                self._waited(begin)
                return value

    def _waited(self, begin: float) -> None:
        self.recorder.span("wait", "compute", begin, self.ledger.now(), self.ledger.step)

    # -- compute -----------------------------------------------------------------------------------------------

    def _backward(self, request: ops.Backward) -> Any:
        self.ledger.step = request.step
        tickets: list[Ticket] = []
        phase, since = "", self.ledger.now()

        def turn(name: str) -> None:
            nonlocal phase, since
            now = self.ledger.now()
            if phase:
                self.recorder.span(phase, "compute", since, now, request.step)
            phase, since = name, now

        def launch(bucket: Gradient) -> None:
            assert request.on_bucket is not None
            tickets.append(self.start(request.on_bucket(bucket)))

        hooks = Hooks(turn, launch if request.on_bucket else None)
        gradient, self.loss = self.replica.backward(request.step, self._minibatch(request.step), hooks)
        return tuple(tickets) if request.on_bucket else gradient

    def _apply(self, gradient: Gradient, lr_scale: float) -> None:
        begin = self.ledger.now()
        staleness = self.replica.apply(gradient, lr_scale)
        self.staleness = staleness if self.staleness is None else max(staleness, self.staleness)
        self.recorder.span("apply", "compute", begin, self.ledger.now(), gradient.step, bucket_of(gradient))

    # -- background --------------------------------------------------------------------------------------------

    def start(self, work: Request | Program) -> Ticket:
        """Begin a request or sub-program in the background."""
        self._num_started += 1
        ticket = self._here.start(work) if isinstance(work, Request) else None
        if ticket is None:
            ticket = Ticket(self._num_started, work)
            if self._lane is None:
                self._lane = _Lane(Endpoint(self.transport.for_lane(), self.ledger, "comm", spins=LANE_SPINS))
            self._lane.submit(ticket, perform(work) if isinstance(work, Request) else work)
        return ticket

    def _wait(self, ticket: Ticket) -> Any:
        if not ticket.done:
            begin = self.ledger.now()
            self._complete(ticket)
            self._waited(begin)
        if ticket.error is not None:
            raise ticket.error
        return ticket.value

    def _complete(self, ticket: Ticket) -> None:
        handle = ticket.runtime
        if isinstance(handle, _LaneHandle):
            handle.wait(self.ledger.patience(f"background work {ticket.key} (step {self.ledger.step})"))
            ticket.done, ticket.value, ticket.error = True, handle.value, handle.error
        else:
            self._here.finish(ticket)

    def _wait_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> tuple[int, Any] | None:
        if not tickets:
            raise ValueError("WaitAny of no tickets would wait for ever")
        begin = self.ledger.now()
        patience = self.ledger.patience(f"any of {len(tickets)} background works")
        while True:
            for position, ticket in enumerate(tickets):
                if ticket.done or ticket.runtime.poll():
                    self._waited(begin)
                    return position, self._wait(ticket)
            if timeout_s is not None and self.ledger.now() - begin > timeout_s:
                return None
            patience.pause()

    def complete_all(self, state: tuple[Any, ...]) -> None:
        """Wait for every ticket in a program's state, so that it can be kept."""
        for item in state:
            if isinstance(item, Ticket):
                self._wait(item)

    def close(self) -> None:
        """End the lane thread; work still in it is abandoned."""
        if self._lane is not None:
            self._lane.close()


@final
class _LaneHandle(Handle):
    """A sub-program on the lane thread."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.event = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def poll(self) -> bool:
        return self.event.is_set()

    def wait(self, patience: Patience) -> None:
        while not self.event.wait(0.1):
            patience.check()


@final
class _Lane:
    """One thread that runs started sub-programs in order of starting, which is the same on every rank."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._queue: queue.SimpleQueue[tuple[Ticket, Program] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="workbench-lane", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket, program: Program) -> None:
        ticket.runtime = _LaneHandle()
        self._queue.put((ticket, program))

    def _run(self) -> None:
        self.endpoint.enter_thread()
        while (item := self._queue.get()) is not None:
            ticket, program = item
            handle = ticket.runtime
            self.endpoint.tags = (1 + ticket.key % NUM_TAG_RANGES) * TAG_SPAN
            try:
                handle.value = self._perform(program)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits: a thread has nobody else to tell
                handle.error = error
            handle.finished_s = time.perf_counter()
            handle.event.set()

    def _perform(self, program: Program) -> Any:
        """Run a sub-program; of its requests, those that it starts itself must be the library's own."""
        answer: Any = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            match request:
                case ops.Start(work) if isinstance(work, Request):
                    answer = self.endpoint.start(work)
                    assert answer is not None, f"a lane cannot start {type(work).__name__} in the background"
                case ops.Wait(ticket):
                    answer = self.endpoint.finish(ticket)
                case _:
                    answer = self.endpoint.perform(request)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=1.0)
