"""One thread's way to the communication library: answers communication requests, books their bytes and spans."""

from __future__ import annotations

import time
from typing import Any, final

import torch

from workbench import ops
from workbench.collectives import flat_of, native_bytes
from workbench.gradients import Gradient
from workbench.ops import Message, Request, Ticket
from workbench.runtimes.transport import SPINS, Patience, Transport
from workbench.trace.recorder import Recorder


@final
class Ledger:
    """What a rank's threads share: the clock, the recorder, the step under way, and how long to wait."""

    def __init__(self, transport: Transport, recorder: Recorder, timeout_s: float | None) -> None:
        self.recorder = recorder
        self.origin_s = time.perf_counter()
        self.step = 0
        self._transport = transport
        self._timeout_s = timeout_s

    def now(self) -> float:
        """Seconds since the origin, on this rank's clock."""
        return time.perf_counter() - self.origin_s

    def patience(self, what: str, spins: int = SPINS) -> Patience:
        """How this rank waits for `what`."""
        return Patience(what, self._transport.peer_failure, self._timeout_s, spins)


@final
class Endpoint:
    """Requests of one thread: the program's own, or a lane's.

    Args:
        lane: where its spans are drawn.
        spins: see `Patience`.
    """

    def __init__(self, transport: Transport, ledger: Ledger, lane: str, spins: int = SPINS) -> None:
        self.tags = 0  # added to every tag: a sub-program has a range of its own
        self.bytes_sent = 0.0
        self._transport = transport
        self._ledger = ledger
        self._lane = lane
        self._spins = spins

    def enter_thread(self) -> None:
        """To be called first on a thread of its own."""
        self._transport.enter_thread()

    def perform(self, request: Request) -> Any:
        """A communication request, to its end, on the calling thread."""
        transport, ledger = self._transport, self._ledger
        begin = ledger.now()
        match request:
            case ops.AllReduce(value):
                transport.all_reduce(flat_of(value), self._patience(f"the all-reduce of step {ledger.step}"))
            case ops.Broadcast(value, root):
                transport.broadcast(flat_of(value), root, self._patience(f"the broadcast from rank {root}"))
            case ops.Barrier():
                transport.barrier(self._patience("the barrier"))
            case ops.Send() | ops.Recv():
                return self.finish(self._start_point(request))
            case _:
                raise TypeError(f"{type(request).__name__} is not a request that can be answered here")
        return self._book(request, begin, ledger.now())

    def _patience(self, what: str) -> Patience:
        return self._ledger.patience(what, self._spins)

    def start(self, request: Request) -> Ticket | None:
        """The same in the background of the library itself; None where a lane thread is needed."""
        if isinstance(request, ops.Send | ops.Recv):
            return self._start_point(request)
        if isinstance(request, ops.AllReduce):
            handle = self._transport.start_all_reduce(flat_of(request.value))
            return None if handle is None else Ticket(0, request, handle)
        return None

    def _start_point(self, request: ops.Send | ops.Recv) -> Ticket:
        if isinstance(request, ops.Send):
            return Ticket(0, request, self._transport.start_send(request.to, flat_of(request.value), self.tags + request.tag))
        flat = torch.empty_like(request.like)
        ticket = Ticket(0, request, self._transport.start_recv(request.source, flat, self.tags + request.tag))
        ticket.value = flat
        return ticket

    def finish(self, ticket: Ticket) -> Any:
        """Wait for a ticket that `start` gave, book it, and return its value."""
        if not ticket.done:
            ticket.runtime.wait(self._patience(f"{_sentence(ticket.request)} (step {self._ledger.step})"))
            handle = ticket.runtime
            end = handle.finished_s if handle.finished_s is not None else time.perf_counter()
            origin = self._ledger.origin_s
            received = ticket.value
            ticket.value = self._book(ticket.request, handle.started_s - origin, end - origin, received, getattr(handle, "source", -1))
            ticket.done = True
        return ticket.value

    def _book(self, request: Any, begin: float, end: float, received: Any = None, source: int = -1) -> Any:
        """Record what a request did; returns its answer."""
        match request:
            case ops.AllReduce(value):
                self._sent("all_reduce", begin, end, value, native_bytes(self._transport.num_workers, size_of(value)))
                return value
            case ops.Broadcast(value, root):
                self._sent("broadcast", begin, end, value, size_of(value) if self._transport.rank == root else 0)
                return value
            case ops.Send(to, value):
                self._sent("send", begin, end, value, size_of(value), to)
                return None
            case ops.Recv():
                self._ledger.recorder.span("recv", self._lane, begin, end, self._ledger.step, -1, size_of(received), source)
                return Message(source, received)
            case _:
                self._ledger.recorder.span("barrier", self._lane, begin, end, self._ledger.step)
                return None

    def _sent(self, kind: str, begin: float, end: float, value: ops.Value, num_bytes: float, peer: int = -1) -> None:
        self.bytes_sent += num_bytes
        step = value.step if isinstance(value, Gradient) else self._ledger.step
        self._ledger.recorder.span(kind, self._lane, begin, end, step, bucket_of(value), int(num_bytes), peer)


def bucket_of(value: Any) -> int:
    """Which bucket a value is; -1 for none."""
    return value.bucket if isinstance(value, Gradient) and value.bucket is not None else -1


def size_of(value: ops.Value) -> int:
    """Its bytes on the wire."""
    flat = flat_of(value)
    return flat.numel() * flat.element_size()


def _sentence(request: Any) -> str:
    match request:
        case ops.Send(to):
            return f"rank {to} to receive"
        case ops.Recv(source):
            return f"a message from {'any rank' if source == ops.ANY else f'rank {source}'}"
        case ops.AllReduce(value):
            return f"the all-reduce started at step {value.step}" if isinstance(value, Gradient) else "an all-reduce"
        case _:
            return type(request).__name__
