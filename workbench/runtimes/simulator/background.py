"""Handlers of background work and of its tickets: `Start`, `Wait` and `WaitAny`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench import ops
from workbench.ops import FREE, Request, Ticket
from workbench.program import perform
from workbench.runtimes.simulator.communication import all_reduce, receive, send
from workbench.runtimes.simulator.state import PENDING, SimCluster, SimProcess, complete


def start(cluster: SimCluster, process: SimProcess, request: ops.Start) -> Ticket:
    """Begin a request or a sub-program in the background."""
    work = request.work
    if work.__class__ is ops.Send:
        return start_send(cluster, process, work, shares_tags=request.shares_tags)
    if not request.shares_tags:
        process.num_started += 1
    ticket = Ticket(process.num_started, work, [])
    if work.__class__ is ops.Recv:
        receive(cluster, process, work, ticket)
    elif work.__class__ is ops.AllReduce and work.collective is None:
        all_reduce(cluster, process, work, ticket, f"lane {request.lane}")
    else:
        _start_program(cluster, process, request, ticket)
    return ticket


def start_send(cluster: SimCluster, process: SimProcess, work: ops.Send, *, shares_tags: bool = False) -> Ticket:
    """Begin to send in the background."""
    if not shares_tags:
        process.num_started += 1
    ticket = Ticket(process.num_started, work, [])
    send(cluster, process, work, ticket)
    return ticket


def _start_program(cluster: SimCluster, process: SimProcess, request: ops.Start, ticket: Ticket) -> None:
    work, lane = request.work, request.lane
    assert process.task == 0, f"a sub-program cannot start {type(work).__name__} in the background"
    task = -1
    if not isinstance(work, Request):
        process.num_tasks += 1
        task = process.num_tasks
    started = SimProcess(
        cluster,
        process.worker,
        perform(work) if isinstance(work, Request) else work,
        lambda value, error: complete(cluster, ticket, value, error),
        key=0 if request.shares_tags else process.num_started,
        task=task,
        priority=request.priority,
        free=lane == FREE,
        channel=f"lane {lane}",
        background=True,
    )
    if lane == FREE:
        cluster.clock.at(cluster.clock.now_s, started.resume)
    else:
        _queue(cluster, process.lanes.setdefault(lane, []), started)


def _queue(cluster: SimCluster, lane: list[SimProcess], started: SimProcess) -> None:
    """Run the sub-programs of one lane one after the other, in order of starting."""
    finish = started.then

    def end(value: Any, error: Exception | None) -> None:
        lane.pop(0)
        more = bool(lane)  # read before `finish`: a program that it starts on an empty lane begins in `start`
        finish(value, error)
        if more:
            lane[0].resume()

    started.then = end
    lane.append(started)
    if len(lane) == 1:
        cluster.clock.at(cluster.clock.now_s, started.resume)


def wait(cluster: SimCluster, process: SimProcess, request: ops.Wait) -> Any:
    """Answer with the value of a ticket, once it is done."""
    ticket = request.ticket
    if ticket.done:
        return ticket.value if ticket.error is None else _value_of(cluster, ticket)
    _when_done(process, (ticket,), lambda: _resume_with(process, ticket))
    return PENDING


def wait_any(cluster: SimCluster, process: SimProcess, request: ops.WaitAny) -> Any:
    """Answer with the first ticket that is done, or with None at the time-out."""
    tickets = request.tickets
    if not tickets:
        raise ValueError("WaitAny of no tickets never returns: give at least one")
    if process.recorded is not None:
        return _wait_as_recorded(cluster, process, tickets, process.recorded.next_position())
    position = _first_done(tickets)
    if position is not None:
        return position, _value_of(cluster, tickets[position])
    answered = False

    def answer(_: None = None) -> None:
        nonlocal answered
        if not answered:
            answered = True
            _resume_with_any(process, tickets, _first_done(tickets))

    _when_done(process, tickets, answer)
    if request.timeout_s is not None:
        cluster.clock.at(cluster.clock.now_s + request.timeout_s, answer)
    return PENDING


def _wait_as_recorded(cluster: SimCluster, process: SimProcess, tickets: tuple[Ticket, ...], position: int) -> Any:
    """Answer with the ticket that the recorded run found."""
    if position < 0:
        return None
    if tickets[position].done:
        return position, _value_of(cluster, tickets[position])
    _when_done(process, (tickets[position],), lambda: _resume_with_any(process, tickets, position))
    return PENDING


def _when_done(process: SimProcess, tickets: tuple[Ticket, ...], action: Callable[[], None]) -> None:
    process.waiting_since_s = process.cluster.clock.now_s
    for ticket in tickets:
        ticket.runtime.append(action)


def _resume_with(process: SimProcess, ticket: Ticket) -> None:
    if ticket.error is not None:
        process.resume(error=_raised(process.cluster, ticket.error))
    else:
        process.waited(ticket.value, process.waiting_since_s)


def _resume_with_any(process: SimProcess, tickets: tuple[Ticket, ...], position: int | None) -> None:
    if position is None:
        process.waited(None, process.waiting_since_s)
        return
    ticket = tickets[position]
    if ticket.error is not None:
        process.resume(error=_raised(process.cluster, ticket.error))
    else:
        process.waited((position, ticket.value), process.waiting_since_s)


def _value_of(cluster: SimCluster, ticket: Ticket) -> Any:
    """The value of a ticket that is done. An error of the work is raised here."""
    if ticket.error is not None:
        raise _raised(cluster, ticket.error)
    return ticket.value


def _raised(cluster: SimCluster, error: BaseException) -> Exception:
    assert isinstance(error, Exception)
    if error in cluster.errors:
        cluster.errors.remove(error)
    return error


def _first_done(tickets: tuple[Ticket, ...]) -> int | None:
    return next((position for position, ticket in enumerate(tickets) if ticket.done), None)
