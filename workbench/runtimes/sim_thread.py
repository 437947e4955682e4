"""A program of one simulated worker: its requests answered in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, final

from workbench import ops
from workbench.ops import FREE, Program, Request, Ticket
from workbench.program import perform
from workbench.runtimes.endpoint import bucket_of
from workbench.runtimes.interpreter import update_event
from workbench.runtimes.script import Script
from workbench.runtimes.sim_comm import communicate
from workbench.runtimes.sim_worker import SimWorker

if TYPE_CHECKING:
    from workbench.runtimes.simulated import Simulation

Then = Callable[[Any], None]


@final
class SimThread:
    """A program of one worker: its own, or one that it started.

    Args:
        key: whose messages it sends and receives: 0 for the worker's own program and for servers beside it.
        strand: which program of this worker it is, in order of starting; the worker's own is 0.
        then: called with what the program returns.
        priority: of its messages among those that wait for an interface.
    """

    def __init__(self, simulation: Simulation, worker: SimWorker, program: Program, then: Then, *, key: int = 0, strand: int = 0) -> None:
        self.simulation, self.worker = simulation, worker
        self.pending: Request | None = None
        self.key, self.strand, self.priority = key, strand, 0
        self.channel = "foreground"  # of its collectives
        self.free = False  # runs beside everything, and may still wait when a run is stopped
        self.script: Script | None = simulation.script_of(worker.rank, strand)
        self._program, self._then = program, then
        self._lanes: dict[int, deque[SimThread]] = {}
        self._num_started = self._num_strands = 0
        self._waiting_since = 0.0

    def begin(self) -> None:
        """Set off."""
        self._resume(None)

    def _resume(self, answer: Any) -> None:
        """Go on until something takes time."""
        self.pending = None
        while True:
            try:
                request = self._program.send(answer)
            except StopIteration as stop:
                self._then(stop.value)
                return
            done, answer = self._at_once(request)
            if not done:
                if isinstance(request, ops.EndStep):
                    self._program.close()  # stopped here
                    return
                self.pending = request
                self._begin(request)
                return

    def _at_once(self, request: Request) -> tuple[bool, Any]:
        """Answers that take no time: (True, answer)."""
        worker, clock = self.worker, self.simulation.clock
        match request:
            case ops.Start():
                return True, self._start(request)
            case ops.Wait(ticket) if ticket.done:
                return True, ticket.value
            case ops.WaitAny(tickets):
                return self._look(tickets)
            case ops.Discard(gradient):
                return True, worker.replica.discard(gradient)
            case ops.ReadParameters():
                return True, worker.replica.read_parameters()
            case ops.WriteParameters(value):
                return True, worker.replica.write_parameters(value)
            case ops.PackParameters(bucket, master):
                return True, worker.replica.pack_parameters(bucket, master=master)
            case ops.UnpackParameters(value):
                return True, worker.replica.unpack_parameters(value)
            case ops.Now():
                return True, self.script.now() if self.script else clock.now_s
            case ops.EndStep():
                stop = self.simulation.end_step(worker, request)
                if stop:
                    self._checkpoint(request)
                return not stop, None
            case _:
                return False, None

    def _begin(self, request: Request) -> None:
        match request:
            case ops.Backward():
                self._backward(request)
            case ops.Apply():
                self._apply(request)
            case ops.Local(kind, num_bytes, action):
                self._local(kind, num_bytes, action)
            case ops.Wait(ticket):
                self._on_done((ticket,), lambda: self._waited(ticket.value))
            case ops.WaitAny(tickets, timeout_s):
                self._wait_any(tickets, timeout_s)
            case _:
                begin = self.simulation.clock.now_s
                communicate(self, request, lambda value: self._waited(value, begin), self.channel)

    def _waited(self, answer: Any, begin: float | None = None) -> None:
        now = self.simulation.clock.now_s
        if self.strand == 0:
            self.worker.recorder.span("wait", "compute", self._waiting_since if begin is None else begin, now, self.worker.step)
        self._resume(answer)

    def source_of_any(self) -> int:
        """From whom a receive from any rank is to come: whom the record names, or indeed any."""
        return self.script.source() if self.script else ops.ANY

    # -- compute -----------------------------------------------------------------------------------------------

    def _backward(self, request: ops.Backward) -> None:
        """Forward, in pieces where buckets must arrive first, then backward."""
        worker, clock, compute = self.worker, self.simulation.clock, self.simulation.compute
        worker.step = request.step
        share = worker.fraction_of_batch(request.step)
        slow = self.simulation.slowness(request.step, worker.rank) * share
        layout = worker.replica.layout
        forward_parts = compute.forward_parts(layout)
        needed = [piece.index for piece in reversed(layout.buckets)] if request.before_forward else []

        def forward(position: int) -> None:
            """The piece of the pass that uses bucket `needed[position]`, once it is there."""
            seconds = compute.forward_s * slow
            if needed:
                seconds *= forward_parts[needed[position]]
            begin, end = clock.now_s, clock.now_s + seconds
            worker.recorder.span("forward", "compute", begin, end, request.step)
            last = position + 1 >= len(needed)
            clock.at(end, partial(self._back, request, slow) if last else partial(need, position + 1))

        def need(position: int) -> None:
            assert request.before_forward is not None
            inline = SimThread(self.simulation, worker, request.before_forward(needed[position]), lambda value: forward(position))
            inline.begin()

        need(0) if needed else forward(0)

    def _back(self, request: ops.Backward, slow: float) -> None:
        worker, clock = self.worker, self.simulation.clock
        begin = clock.now_s
        end = begin + self.simulation.compute.backward_s * slow
        gradient = worker.backward(request.step)
        worker.recorder.span("backward", "compute", begin, end, request.step)
        if request.on_bucket is None:
            clock.at(end, lambda: self._resume(gradient))
            return
        tickets: list[Ticket] = []
        layout, on_bucket = gradient.layout, request.on_bucket

        def launch(bucket: int) -> None:
            work = on_bucket(gradient.part(bucket))
            tickets.append(self._start(work if isinstance(work, ops.Start) else ops.Start(work)))

        for piece, share in zip(layout.buckets, self.simulation.compute.ready_shares(layout), strict=True):
            clock.at(min(begin + (end - begin) * share, end), partial(launch, piece.index))
        clock.at(end, lambda: self._resume(tuple(tickets)))

    def _apply(self, request: ops.Apply) -> None:
        worker, clock, gradient = self.worker, self.simulation.clock, request.gradient
        seconds = self.simulation.compute.update_s * gradient.flat.numel() / gradient.layout.numel
        end = clock.now_s + seconds
        if request.master:
            update = worker.apply_master(gradient, request.lr_scale)
            if self.strand == 0:  # a server on a rank of its own: its updates are its steps
                worker.step = update - 1
            worker.recorder.event(update_event(request, bucket_of(gradient), update, end))
            self.simulation.look_for_stop(worker)
        else:
            worker.apply(gradient, request.lr_scale, request.local)
        lane = "server" if request.master else "compute"
        worker.recorder.span("apply", lane, clock.now_s, end, gradient.step if gradient.step >= 0 else worker.step, bucket_of(gradient))
        clock.at(end, lambda: self._resume(None))

    def _local(self, kind: str, num_bytes: int, action: Callable[[], Any]) -> None:
        answer, clock = action(), self.simulation.clock
        end = clock.now_s + self.simulation.network.local_s(kind, num_bytes)
        self.worker.recorder.span(kind, "comm", clock.now_s, end, self.worker.step, -1, num_bytes)
        clock.at(end, lambda: self._resume(answer))

    # -- background --------------------------------------------------------------------------------------------

    def _start(self, request: ops.Start) -> Ticket:
        work, lane = request.work, request.lane
        self._num_started += not request.shares_tags
        ticket = Ticket(self._num_started, work)
        ticket.runtime = []  # what to do when it is done

        def finish(value: Any) -> None:
            ticket.done, ticket.value = True, value
            for action in ticket.runtime:
                action()

        if isinstance(work, ops.AllReduce | ops.Send | ops.Recv):
            communicate(self, work, finish, f"lane {lane}")
            return ticket
        assert self.strand == 0, f"a sub-program cannot start {type(work).__name__} in the background"
        strand, program = -1, perform(work) if isinstance(work, Request) else work
        if not isinstance(work, Request):
            self._num_strands += 1
            strand = self._num_strands
        key = 0 if request.shares_tags else self._num_started
        thread = SimThread(self.simulation, self.worker, program, finish, key=key, strand=strand)
        thread.priority, thread.free, thread.channel = request.priority, lane == FREE, f"lane {lane}"
        self.simulation.threads.append(thread)
        if lane == FREE:
            self.simulation.clock.at(self.simulation.clock.now_s, thread.begin)
        else:
            self._queue(thread, lane, finish)
        return ticket

    def _queue(self, thread: SimThread, lane: int, finish: Then) -> None:
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

    def _wait_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> None:
        if self.script:
            position = self.script.position
            self._on_done((tickets[position],), lambda: self._waited((position, tickets[position].value)))
            return
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._waited(_first_done(tickets))

        self._on_done(tickets, answer)
        if timeout_s is not None:
            self.simulation.clock.at(self.simulation.clock.now_s + timeout_s, answer)

    def _checkpoint(self, end: ops.EndStep) -> None:
        """Keep this rank's state; gradients in flight are completed first, in virtual time that no longer counts."""
        tickets = [item for item in end.state if isinstance(item, Ticket) and not item.done]

        def keep() -> None:
            if all(ticket.done for ticket in tickets):
                self.simulation.keep(self.worker, end)

        for ticket in tickets:
            ticket.runtime.append(keep)
        keep()


def _first_done(tickets: tuple[Ticket, ...]) -> tuple[int, Any] | None:
    return next(((position, ticket.value) for position, ticket in enumerate(tickets) if ticket.done), None)
