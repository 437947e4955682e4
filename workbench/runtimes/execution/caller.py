"""A program that makes requests, and the answers to those of its requests that communicate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from workbench import ops
from workbench.ops import Request, Ticket
from workbench.runtimes.execution.endpoint import Endpoint

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
        """Wait until one of the tickets is done, or until the time is over."""


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
