"""A program of one simulated worker: its requests answered in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.ops import FREE, Program, Request, Ticket
from workbench.program import perform
from workbench.runtimes.execution.endpoint import bucket_of
from workbench.runtimes.execution.interpreter import update_event
from workbench.runtimes.simulator.checkpoints import when_complete
from workbench.runtimes.simulator.comm_schedule import CommSchedule, SchedulePlayer
from workbench.runtimes.simulator.communication import PENDING, communicate, receive_here
from workbench.runtimes.simulator.compute import begin_backward
from workbench.runtimes.simulator.failures import Halted
from workbench.runtimes.simulator.recorded_answers import RecordedAnswers
from workbench.runtimes.simulator.worker import SimWorker

if TYPE_CHECKING:
    from workbench.runtimes.simulator.simulation import Simulation

Then = Callable[[Any], None]
CLOSED = object()


@final
class SimProcess:
    """A program of one worker: its own, or one that it started.

    Args:
        key: whose messages it sends and receives: 0 for the worker's own program and for servers beside it.
        task: which program of this worker it is, in order of starting; the worker's own is 0.
        then: called with what the program returns.
        priority: of its messages among those that wait for an interface.
    """

    def __init__(self, simulation: Simulation, worker: SimWorker, program: Program, then: Then, *, key: int = 0, task: int = 0) -> None:
        self.simulation, self.worker = simulation, worker
        self.pending: Request | SchedulePlayer | None = None
        self.key, self.task, self.priority = key, task, 0
        self.channel = "foreground"  # of its collectives
        self.free = False  # runs beside everything, and may still wait when a run is stopped
        self.script: RecordedAnswers | None = simulation.script_of(worker.rank, task)
        self._then = then
        self._program, self._ask = program, program.send
        self.agreed: Any = (None, None)  # without values: what arrived last, and what it was asked for as
        self._lanes: dict[int, deque[SimProcess]] = {}
        self.num_started = self._num_strands = 0  # works in the background
        self._waiting_since = self.begun_s = 0.0  # `begun_s`: the receive that it waits for

    def take_up(self, program: Program) -> None:
        """Another program, to begin with next."""
        self._program.close()
        self._program, self._ask = program, program.send

    def begin(self, _: None = None) -> None:
        """Set off."""
        self.resume(None)

    def resume(self, answer: Any) -> None:
        """Go on until something takes time."""
        self.pending = None
        while True:
            try:
                request = self._ask(answer)
            except StopIteration as stop:
                self.simulation.threads.pop(self, None)
                self._then(stop.value)
                return
            answer = _ANSWERS.get(request.__class__, _COMMUNICATE)(self, request)
            if answer is PENDING:
                if self.pending is None:
                    self.pending = request
                return
            if answer is CLOSED:
                self._program.close()  # stopped here
                self.simulation.threads.pop(self, None)
                return

    # Each answers a request, or begins what it takes and says that it is pending.

    def _communicate(self, request: Request) -> Any:
        begin = self.simulation.clock.now_s
        self.pending = request
        communicate(self, request, lambda value: self._waited(value, begin), self.channel)
        return PENDING

    def _play(self, tape: CommSchedule) -> Any:
        self.pending = player = SchedulePlayer(self, tape, self.resume)
        player.go()
        return PENDING

    def _wait(self, request: ops.Wait) -> Any:
        ticket = request.ticket
        if ticket.done:
            return ticket.value
        self._on_done((ticket,), lambda: self._waited(ticket.value))
        return PENDING

    def _wait_any(self, request: ops.WaitAny) -> Any:
        done, answer = self._look(request.tickets)
        if done:
            return answer
        self._wait_for_any(request.tickets, request.timeout_s)
        return PENDING

    def _discard(self, request: ops.Discard) -> Any:
        return self.worker.replica.discard(request.gradient)

    def _read(self, request: ops.ReadParameters) -> Any:
        return self.worker.replica.read_parameters()

    def _write(self, request: ops.WriteParameters) -> Any:
        return self.worker.replica.write_parameters(request.value)

    def _pack(self, request: ops.PackParameters) -> Any:
        return self.worker.replica.pack_parameters(request.bucket, master=request.master, step=request.step)

    def _now(self, request: ops.Now) -> Any:
        return self.script.now() if self.script else self.simulation.clock.now_s

    def _end_step(self, request: ops.EndStep) -> Any:
        simulation, worker = self.simulation, self.worker
        if simulation.alone and not worker.has_values:
            worker.end_step(request, simulation.clock.now_s)
            return None
        if simulation.end_step(worker, request):
            when_complete(request.state, lambda: simulation.writer.keep(worker, request))  # in virtual time that no longer counts
            return CLOSED
        return PENDING if simulation.writer.behind(self, request) else None

    def _waited(self, answer: Any, begin: float | None = None) -> None:
        if self.task == 0 and self.worker.traced:
            since, now = self._waiting_since if begin is None else begin, self.simulation.clock.now_s
            self.worker.recorder.span("wait", "compute", since, now, self.worker.step)
        self.resume(answer)

    def source_of_any(self) -> int:
        """From whom a receive from any rank is to come: whom the record names, or indeed any."""
        return self.script.source() if self.script else ops.ANY

    # -- compute -----------------------------------------------------------------------------------------------

    def _backward(self, request: ops.Backward) -> Any:
        begin_backward(self, request)
        return PENDING

    def inline(self, program: Program, then: Then) -> None:
        """Run a sub-program to its end, inside another request."""
        thread = SimProcess(self.simulation, self.worker, program, then)
        self.simulation.threads[thread] = None
        thread.begin()

    def _apply(self, request: ops.Apply) -> Any:
        worker, simulation, gradient = self.worker, self.simulation, request.gradient
        now_s = simulation.clock.now_s
        end = now_s + simulation.compute.update_s * gradient.flat.numel() / gradient.layout.numel
        if request.master:
            update, bucket = worker.apply_master(gradient, request.lr_scale), -1 if gradient.bucket is None else gradient.bucket
            if self.task == 0:  # a server on a rank of its own: its updates are its steps
                worker.step = update - 1
            worker.recorder.events.append(update_event(request, bucket, update, end))
            if worker.has_values:
                simulation.look_for_stop(worker)
                simulation.updated(worker, request, end)
        else:
            worker.apply(gradient, request.lr_scale, request.local)
        if worker.traced:
            lane = "server" if request.master else "compute"
            worker.recorder.span("apply", lane, now_s, end, gradient.step if gradient.step >= 0 else worker.step, bucket_of(gradient))
        simulation.clock.at(end, self.resume)
        return PENDING

    def _local(self, request: ops.Local) -> Any:
        skipped = request.kind == "sum" and not self.worker.has_values
        answer, clock = None if skipped else request.action(), self.simulation.clock
        seconds = self.simulation.network.local_s(request.kind, request.num_bytes)
        end = clock.now_s + seconds
        if self.worker.traced:
            self.worker.recorder.span(request.kind, "comm", clock.now_s, end, self.worker.step, -1, request.num_bytes)
        if seconds <= 0:
            return answer
        clock.at(end, self.resume, answer)
        return PENDING

    # -- background --------------------------------------------------------------------------------------------

    def start(self, request: ops.Start) -> Ticket:
        work, lane = request.work, request.lane
        self.num_started += not request.shares_tags
        ticket = Ticket(self.num_started, work)
        ticket.runtime = []  # what to do when it is done

        def finish(value: Any) -> None:
            ticket.done, ticket.value = True, value
            for action in ticket.runtime:
                action()

        if isinstance(work, ops.AllReduce | ops.Send | ops.Recv):
            communicate(self, work, finish, f"lane {lane}")
            return ticket
        assert self.task == 0, f"a sub-program cannot start {type(work).__name__} in the background"
        task, program = -1, perform(work) if isinstance(work, Request) else work
        if not isinstance(work, Request):
            self._num_strands += 1
            task = self._num_strands
        key = 0 if request.shares_tags else self.num_started
        thread = SimProcess(self.simulation, self.worker, program, finish, key=key, task=task)
        thread.priority, thread.free, thread.channel = request.priority, lane == FREE, f"lane {lane}"
        self.simulation.threads[thread] = None
        if lane == FREE:
            self.simulation.clock.at(self.simulation.clock.now_s, thread.begin)
        else:
            self._queue(thread, lane, finish)
        return ticket

    def _queue(self, thread: SimProcess, lane: int, finish: Then) -> None:
        """Sub-programs of one lane run one after the other, in order of starting."""
        line = self._lanes.setdefault(lane, deque())

        def then(value: Any) -> None:
            line.popleft()
            more = bool(line)  # what `finish` starts sets off by itself
            finish(value)
            if more:
                line[0].begin()

        thread._then = then
        line.append(thread)
        if len(line) == 1:
            self.simulation.clock.at(self.simulation.clock.now_s, thread.begin)

    # -- tickets -----------------------------------------------------------------------------------------------

    def _on_done(self, tickets: tuple[Ticket, ...], action: Callable[[], None]) -> None:
        self._waiting_since = self.simulation.clock.now_s
        for ticket in tickets:
            ticket.runtime.append(action)

    def _look(self, tickets: tuple[Ticket, ...]) -> tuple[bool, Any]:
        """`WaitAny`, where its answer is known already: (True, answer)."""
        if not tickets:
            raise ValueError("WaitAny of no tickets would wait for ever")
        if self.script:
            position = self.script.next_position()
            if position < 0:
                return True, None
            return (True, (position, tickets[position].value)) if tickets[position].done else (False, None)
        found = _first_done(tickets)
        return found is not None, found

    def _wait_for_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> None:
        if self.script:
            position = self.script.position
            self._on_done((tickets[position],), lambda: self._waited((position, tickets[position].value)))
            return
        answered = False

        def answer(_: None = None) -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._waited(_first_done(tickets))

        self._on_done(tickets, answer)
        if timeout_s is not None:
            self.simulation.clock.at(self.simulation.clock.now_s + timeout_s, answer)


def _first_done(tickets: tuple[Ticket, ...]) -> tuple[int, Any] | None:
    return next(((position, ticket.value) for position, ticket in enumerate(tickets) if ticket.done), None)


_ANSWERS: dict[type, Callable[[SimProcess, Any], Any]] = {
    Halted: lambda thread, request: PENDING,
    ops.Apply: SimProcess._apply,
    ops.Backward: SimProcess._backward,
    ops.Discard: SimProcess._discard,
    ops.EndStep: SimProcess._end_step,
    ops.Local: SimProcess._local,
    ops.Now: SimProcess._now,
    ops.PackParameters: SimProcess._pack,
    ops.ReadParameters: SimProcess._read,
    ops.Recv: receive_here,
    ops.Start: SimProcess.start,
    ops.UnpackParameters: lambda thread, request: thread.worker.replica.unpack_parameters(request.value),
    ops.Wait: SimProcess._wait,
    ops.WaitAny: SimProcess._wait_any,
    ops.WriteParameters: SimProcess._write,
    CommSchedule: SimProcess._play,
}
_COMMUNICATE: Callable[[SimProcess, Any], Any] = SimProcess._communicate  # what is not there
