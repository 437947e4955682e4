"""One program's endpoint of the communication library: performs requests, and records their bytes and spans.

`COMMUNICATION` is the part of the table of requests (`interpreter.HANDLERS`) that needs no replica.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, final

import torch

from workbench import ops
from workbench.collectives import flat_of, native_bytes
from workbench.gradients import Gradient
from workbench.ops import ANY, Message, Request, Ticket
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.transport.base import SPINS, Deadline, Transport
from workbench.runtimes.transport.mailbox import STAMP_BYTES, AnySourceRecv, Mailbox, StampedHandle, without_header
from workbench.trace.recorder import Recorder


@final
class RankClock:
    """What a rank's threads share: the clock, the recorder, the current step, and the deadline of waits."""

    def __init__(
        self, transport: Transport, recorder: Recorder, timeout_s: float | None, detector: FailureDetector | None = None
    ) -> None:
        self.recorder = recorder
        self.origin_s = time.perf_counter()
        self.step = 0
        self.compute_lane = "compute"  # the timeline's row of what the program's thread does
        self.activity = ""  # what the program's thread does, for ranks that wait for this one; "" for anything else
        self.bytes_sent = 0.0
        self.left: set[int] = set()  # ranks that a server on this rank knows to have left
        self.failure: BaseException | None = None  # of a server on this rank: no thread waits for it
        self.watch: Callable[[], object] | None = None  # called by the waiting thread; raises what must end the wait
        self._transport = transport
        self._timeout_s = timeout_s
        self._detector = detector
        self._paused_s = 0.0
        self._paused_since: float | None = None
        self._lock = Lock()
        if detector is not None:  # `bytes_sent` differs between two calls: each call sends bytes
            bound = lambda: self.bytes_sent if transport.bound else None  # noqa: E731
            detector.begin_training(lambda: self.step, bound, timeout_s, lambda: self.activity)

    def now(self) -> float:
        """Return the seconds since the origin, on this rank's clock."""
        return time.perf_counter() - self.origin_s

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Report what the program's thread does, until the block ends or fails."""
        self.activity = activity
        try:
            yield
        finally:
            self.activity = ""

    def sent(self, num_bytes: float) -> None:
        """Count bytes that any thread has sent."""
        with self._lock:
            self.bytes_sent += num_bytes

    def deadline(self, what: str, spins: int = SPINS, step: int | None = None) -> Deadline:
        """Return the deadline of a wait for `what`, and its step if there is one."""
        return Deadline(what, self._failed, self._timeout_s, spins, self.pause_seconds, step, self._detector)

    def peers(self) -> Deadline:
        """Return a deadline without end, to look for failed peers."""
        return Deadline("", self._failed, None)

    def close(self) -> None:
        """End the training of this rank."""
        if self._detector is not None:
            self._detector.end_training()  # breaks a cycle that would keep the library's sockets open

    def set_paused(self, on: bool) -> None:
        """Pause or continue the run. Waits during the pause keep their time-outs: the pause does not count."""
        if on and self._paused_since is None:
            self._paused_since = time.perf_counter()
        elif not on and self._paused_since is not None:
            # First, so that a concurrent reader waits longer, not shorter.
            self._paused_s += time.perf_counter() - self._paused_since
            self._paused_since = None

    def pause_seconds(self) -> float:
        """Return the seconds that the run has been paused until now."""
        since, before = self._paused_since, self._paused_s
        return before + (time.perf_counter() - since if since is not None else 0.0)

    def _failed(self) -> str | None:
        if self.failure is not None:
            raise self.failure
        reason = self._transport.peer_failure()
        if reason is None and self.watch is not None:
            self.watch()
        return reason


@final
class Endpoint:
    """Performs the communication of one program: the foreground's, or one that was started.

    Args:
        mailbox: the rank's, shared by all its programs.
        lane: the lane of its spans.
        spins: see `Deadline`.
        tags: added to every tag: each sub-program has its own range.
        task: number of the program on this rank, in order of starting; the foreground is 0.
    """

    def __init__(
        self,
        transport: Transport,
        clock: RankClock,
        mailbox: Mailbox,
        lane: str = "comm",
        *,
        spins: int = SPINS,
        tags: int = 0,
        task: int = 0,
    ) -> None:
        self.tags, self.task = tags, task
        self._transport, self._clock, self._mailbox = transport, clock, mailbox
        self._lane = lane
        self._spins = spins
        self._num_any = 0  # receives from any rank, to record their senders

    def enter_thread(self) -> None:
        """Prepare the calling thread. Each background thread calls it first."""
        self._transport.enter_thread()

    # Each of these methods performs its request on the calling thread, and returns the answer when it is complete.

    def all_reduce(self, request: ops.AllReduce) -> ops.Value:
        """Sum over all ranks, by the library."""
        if request.collective is not None:
            raise not_lowered(request)
        clock, value = self._clock, request.value
        begin = clock.now()
        self._transport.all_reduce(flat_of(value), self._deadline("the all-reduce", clock.step))
        return self._record_sum(value, begin, clock.now())

    def reduce_scatter(self, request: ops.ReduceScatter) -> ops.Value:
        """Sum over all ranks. Each rank gets its own block."""
        if request.collective is not None:
            raise not_lowered(request)
        begin = self._clock.now()
        deadline = self._deadline("the reduce-scatter", self._clock.step)
        self._transport.reduce_scatter(flat_of(request.value), deadline)
        return self._record_half("reduce_scatter", request.value, begin)

    def all_gather(self, request: ops.AllGather) -> ops.Value:
        """Give every rank each rank's own block."""
        if request.collective is not None:
            raise not_lowered(request)
        begin = self._clock.now()
        deadline = self._deadline("the all-gather", self._clock.step)
        self._transport.all_gather(flat_of(request.value), deadline)
        return self._record_half("all_gather", request.value, begin)

    def broadcast(self, request: ops.Broadcast) -> ops.Value:
        """Replace every rank's value by the root's."""
        value, root = request.value, request.root
        begin = self._clock.now()
        self._transport.broadcast(flat_of(value), root, self._deadline(f"the broadcast from rank {root}"))
        num_bytes = size_of(value) if self._transport.rank == root else 0
        self._sent("broadcast", begin, self._clock.now(), value, num_bytes)
        return value

    def barrier(self, _: ops.Barrier) -> None:
        """Wait for all ranks."""
        begin = self._clock.now()
        self._transport.barrier(self._deadline("the barrier"))
        self._clock.recorder.span("barrier", self._lane, begin, self._clock.now(), self._clock.step)

    def local(self, request: ops.Local) -> Any:
        """Encode, decode or sum."""
        if request.action is ops.is_done:
            return None
        clock = self._clock
        begin = clock.now()
        answer = request.action()
        clock.recorder.span(request.kind, self._lane, begin, clock.now(), clock.step, -1, request.num_bytes)
        return answer

    def _deadline(self, what: str, step: int | None = None) -> Deadline:
        return self._clock.deadline(what, self._spins, step)

    def start(self, request: Request, *, always: bool = False) -> Ticket | None:
        """Start a request in the library's background. Return None if the request needs a lane's thread."""
        if isinstance(request, ops.Send | ops.Recv):
            return self.start_message(request)
        if isinstance(request, ops.AllReduce):
            if request.collective is not None:
                raise not_lowered(request)
            handle = self._transport.start_all_reduce(flat_of(request.value), always=always)
            return None if handle is None else Ticket(0, request, handle)
        return None

    def start_message(self, request: ops.Send | ops.Recv) -> Ticket:
        """Start to send or to receive a message."""
        tag = self.tags + request.tag
        if isinstance(request, ops.Send):
            flat = flat_of(request.value)
            if request.stamp is not None:
                return Ticket(0, request, self._mailbox.send(request.to, flat, tag, request.stamp))
            to_self = request.to == self._transport.rank
            return Ticket(
                0,
                request,
                self._mailbox.put(flat, tag) if to_self else self._transport.start_send(request.to, flat, tag),
            )
        like, flat = request.like, torch.empty_like(request.like)
        if request.stamped:
            flat = torch.empty(like.numel() * like.element_size() + STAMP_BYTES, dtype=torch.uint8, device=like.device)
        if request.source in (ANY, self._transport.rank):
            ticket = Ticket(self._num_any, request, self._receive_from_any(request, flat, tag))
            self._num_any += request.source == ANY
            return ticket
        if request.stamped:
            return Ticket(0, request, StampedHandle(self._mailbox, request.source, flat, tag, like.dtype))
        ticket = Ticket(0, request, self._transport.start_recv(request.source, flat, tag))
        ticket.value = flat
        return ticket

    def _receive_from_any(self, request: ops.Recv, flat: torch.Tensor, tag: int) -> AnySourceRecv:
        others = request.source == ANY and self._transport.num_workers > 1
        dtype = request.like.dtype if request.stamped else None
        return AnySourceRecv(
            self._mailbox, self._transport.rank, flat, tag, others=others, departures=request.departures, dtype=dtype
        )

    def finish(self, ticket: Ticket, *, inside: bool = False) -> Any:
        """Wait for a ticket of `start`, record it, and return its value.

        `inside`: wait inside the library, if possible.
        """
        if not ticket.done:
            deadline = self._deadline(f"{_describe_request(ticket.request)} (step {self._clock.step})")
            ticket.runtime.wait_inside(deadline) if inside else ticket.runtime.wait(deadline)
            handle = ticket.runtime
            left = getattr(handle, "left", None)
            if left is not None:
                self._clock.left.add(left)
                self._clock.recorder.event(
                    {"task": self.task, "any": ticket.key, "left": left, "seconds": self._clock.now()}
                )
                ticket.value, ticket.done = ops.PeerLeft(left), True
                return ticket.value
            end = handle.finished_s if handle.finished_s is not None else time.perf_counter()
            origin = self._clock.origin_s
            received = handle.flat if isinstance(handle, AnySourceRecv | StampedHandle) else ticket.value
            source = getattr(handle, "source", -1)
            if isinstance(ticket.request, ops.Recv) and ticket.request.source == ANY:
                self._clock.recorder.event({"task": self.task, "any": ticket.key, "source": source})
            stamp = getattr(handle, "stamp", 0)
            ticket.value = self._record_request(
                ticket.request, handle.started_s - origin, end - origin, received, source, stamp
            )
            ticket.done = True
        return ticket.value

    def _record_request(
        self, request: Any, begin: float, end: float, received: Any = None, source: int = -1, stamp: int = 0
    ) -> Any:
        """Record what a started request did, and return its answer."""
        match request:
            case ops.AllReduce(value):
                if isinstance(value, Gradient):
                    value.ready = self._transport.streams.completed_event()  # the host has waited for it
                return self._record_sum(value, begin, end)
            case ops.Send(to, value):
                num_bytes = (
                    0 if to == self._transport.rank else size_of(value) + (0 if request.stamp is None else STAMP_BYTES)
                )
                self._sent("send", begin, end, value, num_bytes, to)
                return None
            case ops.Recv(_, like):
                num_bytes = 0 if source == self._transport.rank else size_of(received)
                self._clock.recorder.span("recv", self._lane, begin, end, self._clock.step, -1, num_bytes, source)
                return Message(source, without_header(received, like.dtype) if request.stamped else received, stamp)
            case _:
                raise AssertionError(f"{type(request).__name__} is not started by the library")

    def _record_sum(self, value: ops.Value, begin: float, end: float) -> ops.Value:
        self._sent("all_reduce", begin, end, value, native_bytes(self._transport.num_workers, size_of(value)))
        return value

    def _record_half(self, kind: str, value: ops.Value, begin: float) -> ops.Value:
        num_bytes = native_bytes(self._transport.num_workers, size_of(value)) / 2
        self._sent(kind, begin, self._clock.now(), value, num_bytes)
        return value

    def _sent(self, kind: str, begin: float, end: float, value: ops.Value, num_bytes: float, peer: int = -1) -> None:
        self._clock.sent(num_bytes)
        step, bucket = self._clock.step, -1
        if isinstance(value, Gradient):
            step, bucket = value.step, bucket_of(value)
        self._clock.recorder.span(kind, self._lane, begin, end, step, bucket, int(num_bytes), peer)


PENDING = object()  # instead of an answer: the caller waits, and takes the answer later


class Caller(ABC):
    """A program that makes requests. A subclass says how it waits.

    The rank's own program blocks until the answer is known (`Interpreter`). A started program is polled (`Task`): its
    answer may be `PENDING`.
    """

    endpoint: Endpoint

    @abstractmethod
    def message(self, request: ops.Send | ops.Recv) -> Any:
        """Send or receive a message."""

    @abstractmethod
    def collective(self, operation: Callable[[Any], Any], request: Request) -> Any:
        """Call a collective of the library, which blocks. `operation` is a method of the endpoint."""

    @abstractmethod
    def start(self, request: ops.Start) -> Ticket:
        """Begin a request or sub-program in the background."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> Any:
        """Wait until the ticket's work is done."""

    @abstractmethod
    def wait_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> Any:
        """Wait until one of the tickets is done, at most `timeout_s` seconds."""


Handler = Callable[[Any, Caller, Any], Any]
"""Answers a request of a caller. The first argument is the rank's `Interpreter`."""


def _wait_any(_: Any, caller: Caller, request: ops.WaitAny) -> Any:
    if not request.tickets:
        raise ValueError("WaitAny of no tickets never returns: give at least one")
    return caller.wait_any(request.tickets, request.timeout_s)


# These answers need no replica, so the first argument may be None.
COMMUNICATION: dict[type[Request], Handler] = {
    ops.AllGather: lambda _, caller, request: caller.collective(caller.endpoint.all_gather, request),
    ops.AllReduce: lambda _, caller, request: caller.collective(caller.endpoint.all_reduce, request),
    ops.Barrier: lambda _, caller, request: caller.collective(caller.endpoint.barrier, request),
    ops.Broadcast: lambda _, caller, request: caller.collective(caller.endpoint.broadcast, request),
    ops.Local: lambda _, caller, request: caller.endpoint.local(request),
    ops.Recv: lambda _, caller, request: caller.message(request),
    ops.ReduceScatter: lambda _, caller, request: caller.collective(caller.endpoint.reduce_scatter, request),
    ops.Send: lambda _, caller, request: caller.message(request),
    ops.Start: lambda _, caller, request: caller.start(request),
    ops.Wait: lambda _, caller, request: caller.wait(request.ticket),
    ops.WaitAny: _wait_any,
}


def not_answered(request: Request) -> TypeError:
    """Return the error for a request that the program may not make."""
    return TypeError(f"{type(request).__name__} is not a request that can be answered here")


def not_lowered(request: ops.AllReduce | ops.ReduceScatter | ops.AllGather) -> TypeError:
    """Return the error for a sum that names a collective, which the library cannot take."""
    return TypeError(
        f"{type(request).__name__} names {request.collective}, which a runtime replaces by messages first: use "
        "program.lower"
    )


def bucket_of(value: Any) -> int:
    """Return the bucket of a value; -1 for none."""
    return value.bucket if isinstance(value, Gradient) and value.bucket is not None else -1


def size_of(value: ops.Value) -> int:
    """Return the bytes of a value on the wire."""
    return int((value.flat if isinstance(value, Gradient) else value).nbytes)


def _describe_request(request: Any) -> str:
    match request:
        case ops.Send(to):
            return f"rank {to} to receive"
        case ops.Recv(source):
            return f"a message from {'any rank' if source == ops.ANY else f'rank {source}'}"
        case ops.AllReduce(value):
            return f"the all-reduce started at step {value.step}" if isinstance(value, Gradient) else "an all-reduce"
        case _:
            return type(request).__name__
