"""Run one rank's program on a real communication library: answer requests, keep time, count bytes, write the trace.

`HANDLERS` names what each request does. It is one table, for the rank's own program and for the programs that this one
starts. They differ in how they wait: the rank's own program blocks the calling thread (`Interpreter`), and `progress`
polls the others (`tasks.Task`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from workbench import ops
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import Program, Request, State, Ticket
from workbench.program import Context, leaves
from workbench.replica.backward import Hooks, MicroBatch
from workbench.replica.replica import Replica
from workbench.runtimes.execution.endpoint import (
    COMMUNICATION,
    Caller,
    Endpoint,
    Handler,
    RankClock,
    bucket_of,
    not_answered,
)
from workbench.runtimes.execution.progress import ProgressEngine
from workbench.runtimes.execution.shared_state import share_tensors
from workbench.runtimes.execution.slept_compute import Sleep, SleptCompute, SleptPass
from workbench.runtimes.execution.tasks import TaskHandle
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.transport.base import Transport
from workbench.runtimes.transport.mailbox import Mailbox, flush
from workbench.trace.kinds import SLEPT_LANE
from workbench.trace.recorder import Recorder


@final
class Interpreter(Caller):
    """Runs one rank's program, its lanes and its clock.

    Args:
        minibatch: step -> the micro-batches of this rank.
        timeout_s: how long to wait for peers; None: no limit.
        progress: how background work makes progress (see `progress`).
        detector: the failure detector, made on the calling thread.
        slept: the slept compute; None: compute takes its real time.
        reads_data: whether `minibatch` reads data, which is recorded. In a user's own loop it does not.
    """

    def __init__(
        self,
        transport: Transport,
        replica: Replica,
        recorder: Recorder,
        minibatch: Callable[[int], Sequence[MicroBatch]],
        *,
        timeout_s: float | None = None,
        progress: str = "auto",
        detector: FailureDetector | None = None,
        slept: SleptCompute | None = None,
        reads_data: bool = True,
    ) -> None:
        self.transport = transport
        self.replica = replica
        self.recorder = recorder
        self.clock = RankClock(transport, recorder, timeout_s, detector)
        self.slept = slept
        if slept is not None:
            self.clock.compute_lane = SLEPT_LANE
        self.loss: torch.Tensor | None = None  # of the last backward
        self.staleness: int | None = None  # the largest applied since the last EndStep
        self.shares_buffers = False  # whether each step begins with rank 0's buffers: see `program.shares_buffers`
        self.context: Context | None = None  # of the program, once it runs
        # Called on the server's thread, for each update.
        self.on_update: Callable[[ops.Apply, float], None] | None = None
        self._minibatch, self._reads_data = minibatch, reads_data
        self._mailbox = Mailbox(transport)
        self.endpoint = Endpoint(transport, self.clock, self._mailbox)
        self._progress = progress
        self._background = self._in_background()
        self._num_waits = 0
        self._thread = threading.get_ident()  # the one that runs the program

    def _in_background(self) -> ProgressEngine:
        return ProgressEngine(
            self.transport, self.clock, self._mailbox, self.endpoint, self.answer, progress=self._progress
        )

    def reset_transport(self) -> None:
        """Continue with other ranks on the transport.

        Background work is abandoned, with its threads and its failures.
        """
        self._background.close()
        self.clock.failure = None
        self._mailbox = Mailbox(self.transport)
        self.endpoint = Endpoint(self.transport, self.clock, self._mailbox)
        self._background = self._in_background()

    def continue_from_state(self, state: State | None) -> None:
        """Prepare for another program, which begins from this state of the one before."""
        self.complete_all(state)
        self._mailbox.forget_departures()

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent."""
        return self.clock.bytes_sent

    def advance(self, program: Program) -> ops.EndStep | None:
        """Run to the next `EndStep` and return it, or to the program's end (None).

        The error of a request is raised in the program, at the `yield` of the request.
        """
        try:
            request = next(program)
            while not isinstance(request, ops.EndStep):
                try:
                    answer = self.answer(request)
                except Exception as error:  # noqa: BLE001 - the program may handle it
                    request = program.throw(error)
                else:
                    request = program.send(answer)
        except StopIteration:
            return None
        self.replica.end_step()
        return request

    def answer(self, request: Request, caller: Caller | None = None) -> Any:
        """Answer a request of a started program, or of the rank's own (None).

        A server's requests come from another thread.
        """
        if caller is None:
            caller = self
            if self._background.ticks:
                self._background.tick()
        handler = HANDLERS.get(type(request))
        if handler is None:
            raise not_answered(request)
        return handler(self, caller, request)

    # -- how the rank's own program waits ----------------------------------------------------------------------

    def message(self, request: ops.Send | ops.Recv) -> Any:
        begin = self.clock.now()
        value = self.endpoint.finish(self.endpoint.start_message(request))
        self._waited(begin)
        return value

    def collective(self, operation: Callable[[Any], Any], request: Request) -> Any:
        begin = self.clock.now()
        value = operation(request)
        self._waited(begin)
        return value

    def start(self, request: ops.Start) -> Ticket:
        return self._background.start(request)

    def wait(self, ticket: Ticket) -> Any:
        if not ticket.done:
            begin = self.clock.now()
            self._complete(ticket)
            self._waited(begin)
        if ticket.error is not None:
            raise ticket.error
        return ticket.value

    def _complete(self, ticket: Ticket) -> None:
        handle = ticket.runtime
        if isinstance(handle, TaskHandle):
            deadline = self.clock.deadline(f"background work {ticket.key} (step {self.clock.step})")
            self._background.wait(handle, deadline)
            ticket.done, ticket.value, ticket.error = True, handle.value, handle.error
            self.transport.streams.wait(handle.ready)
            if isinstance(handle.value, Gradient):
                handle.value.ready = handle.ready
        else:
            self.endpoint.finish(ticket)

    def wait_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> tuple[int, Any] | None:
        begin = self.clock.now()
        deadline = self.clock.deadline(f"any of {len(tickets)} background works")
        found = -1
        while found < 0:
            found = next(
                (position for position, ticket in enumerate(tickets) if ticket.done or ticket.runtime.poll()), -1
            )
            if found < 0 and timeout_s is not None and self.clock.now() - begin > timeout_s:
                break
            if found < 0 and not self._background.tick():
                deadline.pause()
        self._waited(begin)
        self.recorder.event({"task": 0, "wait_any": self._num_waits, "position": found})
        self._num_waits += 1
        return None if found < 0 else (found, self.wait(tickets[found]))

    def _waited(self, begin: float) -> None:
        self.recorder.span("wait", self.clock.compute_lane, begin, self.clock.now(), self.clock.step)

    # -- compute -----------------------------------------------------------------------------------------------

    def backward(self, request: ops.Backward) -> Any:
        """Compute the gradient of a minibatch, and start what `on_bucket` returns."""
        self.clock.step = request.step
        self._thread = threading.get_ident()
        try:
            micro_batches = self._load(request.step)
            self._share_buffers()
            current = _Pass(self, request, micro_batches)
            gradient, self.loss = self.replica.backward(request.step, micro_batches, current.hooks)
        finally:
            self.clock.activity = ""
        return tuple(current.tickets) if request.on_bucket else gradient

    def _share_buffers(self) -> None:
        """Wait for rank 0's buffers, if all ranks begin the step with them."""
        buffers = self.replica.module_state.buffers
        if self.shares_buffers and buffers:
            begin = self.clock.now()
            share_tensors(buffers, self.transport, self.clock)
            self._waited(begin)

    def _load(self, step: int) -> Sequence[MicroBatch]:
        """Read a minibatch, before the computation is timed."""
        begin = self.clock.now()
        self.clock.activity = "reading data"
        found = self._minibatch(step)
        if self._reads_data:
            self.recorder.span("load", self.clock.compute_lane, begin, self.clock.now(), step)
        return found

    @property
    def ticks(self) -> bool:
        """Return True if background work moves only in `tick`."""
        return self._background.ticks

    def _end_update(self, gradient: Gradient, begin: float, task: int, *, server: bool = False) -> None:
        if self.slept is not None:
            sleep = Sleep(self.clock, self.tick if task == 0 and self.ticks else None)
            self.slept.end_update(gradient.flat.numel(), begin, sleep, server=server)

    def _updating(self, task: int) -> AbstractContextManager[None]:
        """Report an update by the program's thread. A server's task has a separate thread, which reports nothing."""
        return self.clock.doing("in the update") if task == 0 else nullcontext()

    def is_elsewhere(self) -> bool:
        """Return True on a thread that may not call the library: on a GPU autograd calls hooks from its own thread."""
        return not self.transport.has_threads and threading.get_ident() != self._thread

    def inline(self, program: Program) -> None:
        """Run a sub-program to its end, inside another request."""
        end = self.advance(program)
        if end is not None:
            raise not_answered(end)

    def apply(self, request: ops.Apply, task: int) -> bool | None:
        """Take an optimizer step, for the program with this number."""
        gradient = request.gradient
        if request.server_copy:
            return self._apply_to_server_copy(request, gradient, task)
        begin = self.clock.now()
        with self._updating(task):
            staleness = self.replica.apply(gradient, request.lr_scale, local=request.local)
            self._end_update(gradient, begin, task)
        self.staleness = staleness if self.staleness is None else max(staleness, self.staleness)
        self.recorder.span(
            "apply", self.clock.compute_lane, begin, self.clock.now(), gradient.step, bucket_of(gradient)
        )
        return None

    def _apply_to_server_copy(self, request: ops.Apply, gradient: Gradient, task: int) -> bool:
        """Update the server's copy. Return True if the run was asked to stop."""
        begin = self.clock.now()
        server_copy = self.replica.server_copy
        with self._updating(task):
            server_copy.apply(gradient, request.lr_scale)
            self._end_update(gradient, begin, task, server=True)
        update = max(server_copy.updates) if gradient.bucket is None else server_copy.updates[gradient.bucket]
        if task == 0:  # a server on a dedicated rank: its updates are its steps
            self.clock.step = update - 1
        end = self.clock.now()
        self.recorder.span("apply", "server", begin, end, max(self.clock.step, 0), bucket_of(gradient))
        self.recorder.event(update_event(request, bucket_of(gradient), update, end))
        if self.on_update is not None:
            self.on_update(request, end)
        return bool(server_copy.control_seen)

    # -- the end of a program --------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """Poll background work that no thread drives. Return True if anything moved."""
        return self._background.tick()

    @property
    def ended(self) -> bool:
        """Return True if nothing runs in the background after `close`."""
        return self._background.ended

    def complete_all(self, state: State | None) -> None:
        """Wait for every ticket in a program's state, so that it can be saved."""
        for item in leaves(state):
            if isinstance(item, Ticket):
                self.wait(item)

    def flush(self) -> None:
        """Cancel what is still posted at the end of a run. Every rank must call it."""
        flush(self._mailbox, self.transport, self.clock.deadline)

    def close(self) -> None:
        """End the background threads. Their unfinished work is abandoned."""
        self._background.close()
        self.clock.close()


@final
class _Pass:
    """One forward and backward pass of a rank: what happens at its phases and at its buckets.

    Attributes:
        tickets: what the algorithm has started with its buckets.
    """

    def __init__(self, rank: Interpreter, request: ops.Backward, micro_batches: Sequence[MicroBatch]) -> None:
        self.tickets: list[Ticket] = []
        self._rank, self._request = rank, request
        self._phase, self._begin_s = "", rank.clock.now()  # the present phase
        self._slept: SleptPass | None = None
        if rank.slept is not None:
            sleep = Sleep(rank.clock, self._tick if rank.ticks else None)
            num_samples = [micro.num_samples for micro in micro_batches]
            in_parts = request.before_forward is not None
            self._slept = SleptPass(rank.slept, request.step, num_samples, self._begin_s, sleep, in_parts=in_parts)

    @property
    def hooks(self) -> Hooks:
        """What the replica calls."""
        return Hooks(
            self._begin_phase,
            self._start_bucket if self._request.on_bucket else None,
            self._update_bucket if self._request.before_forward else None,
            self._tick if self._rank.ticks else None,
        )

    def _begin_phase(self, name: str) -> None:
        if self._slept is not None:
            self._slept.turn(name)
        self._record(name)

    def _record(self, name: str) -> None:
        """Record the present phase, and begin another one."""
        clock, now = self._rank.clock, self._rank.clock.now()
        if self._phase:
            self._rank.recorder.span(self._phase, clock.compute_lane, self._begin_s, now, self._request.step)
        self._phase, self._begin_s = name, now
        clock.activity = f"in {name}" if name else ""

    def _start_bucket(self, bucket: Gradient) -> None:
        """Start the algorithm's work with a bucket whose gradients are final."""
        rank = self._rank
        assert self._request.on_bucket is not None
        if rank.is_elsewhere():
            raise ConfigError(
                f"{rank.transport.library} has no MPI_THREAD_MULTIPLE, and on a GPU backward calls from its own "
                "thread: "
                "use an algorithm that takes the gradient whole, such as SynchronousSGD or PipeSGD, or an MPI with "
                "threads"
            )
        if self._slept is not None:
            assert bucket.bucket is not None
            self._slept.wait_for_bucket(bucket.bucket)
        begin = rank.clock.now()
        work = self._request.on_bucket(bucket)
        if work is not None:
            self.tickets.append(rank.start(work if isinstance(work, ops.Start) else ops.Start(work)))
        if self._slept is not None:
            self._slept.interrupt(rank.clock.now() - begin)

    def _update_bucket(self, bucket: int) -> None:
        """Run the algorithm's work before the forward pass uses a bucket's parameters."""
        assert self._request.before_forward is not None
        if self._slept is not None:
            self._slept.end_forward_part()
        self._record("")
        self._rank.inline(self._request.before_forward(bucket))
        self._record("forward")
        if self._slept is not None:
            self._slept.begin_forward_part(bucket, self._rank.clock.now())

    def _tick(self) -> None:
        if not self._rank.is_elsewhere():
            self._rank.tick()


def _backward(rank: Interpreter, caller: Caller, request: ops.Backward) -> Any:
    if caller is not rank:  # only the rank's own program computes
        raise not_answered(request)
    return rank.backward(request)


def _now(rank: Interpreter, caller: Caller, _: ops.Now) -> float:
    rank.transport.streams.finish()  # on a GPU: the time when earlier work ends, not when it was queued
    now = rank.clock.now()
    rank.recorder.event({"task": caller.endpoint.task, "now": now})
    return now


HANDLERS: dict[type[Request], Handler] = {  # `EndStep` is `advance`'s own
    **COMMUNICATION,
    ops.Apply: lambda rank, caller, request: rank.apply(request, caller.endpoint.task),
    ops.Backward: _backward,
    ops.Discard: lambda rank, _, request: rank.replica.discard(request.gradient),
    ops.Now: _now,
    ops.PackParameters: lambda rank, _, request: rank.replica.pack_parameters(
        request.bucket, server_copy=request.server_copy, step=request.step
    ),
    ops.ReadParameters: lambda rank, _, request: rank.replica.read_parameters(),
    ops.UnpackParameters: lambda rank, _, request: rank.replica.unpack_parameters(request.value),
    ops.WriteParameters: lambda rank, _, request: rank.replica.write_parameters(request.value),
}


def update_event(request: ops.Apply, bucket: int, update: int, seconds: float) -> dict[str, Any]:
    """Return the record of a server's update: number, and staleness and source of each gradient, used or dropped."""
    of, dropped = request.of or ((-1, request.gradient.version),), request.dropped
    alone = len(of) == 1  # nearly always: a server of an asynchronous algorithm writes one of these for every message
    return {
        "update": update,
        "bucket": bucket,
        "seconds": seconds,
        "sources": [of[0][0]] if alone else [source for source, _ in of],
        "staleness": [update - 1 - of[0][1]] if alone else [update - 1 - version for _, version in of],
        "dropped": [list(item) for item in dropped] if dropped else [],
    }
