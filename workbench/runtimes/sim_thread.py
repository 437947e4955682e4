"""A program of one simulated worker: its requests answered in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

from workbench import ops
from workbench.collectives import flat_of, native_bytes
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import Message, Program, Request, Ticket
from workbench.program import perform
from workbench.runtimes.checkpoint import take_checkpoint
from workbench.runtimes.endpoint import bucket_of, size_of
from workbench.runtimes.sim_worker import SimWorker

if TYPE_CHECKING:
    from workbench.runtimes.simulated import Simulation

FOREGROUND, LANE = "foreground", "lane"


@final
class SimThread:
    """A program of one worker: its own, or a sub-program on its lane."""

    def __init__(
        self, simulation: Simulation, worker: SimWorker, program: Program, channel: str, key: int, then: Callable[[Any], None]
    ) -> None:
        self.simulation, self.worker = simulation, worker
        self.pending: Request | None = None
        self._program, self._channel, self._key, self._then = program, channel, key, then
        self._lane: deque[SimThread] = deque()
        self._num_started = 0
        self._waiting_since = 0.0

    def begin(self) -> None:
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
            case ops.Start(work):
                return True, self._start(work)
            case ops.Wait(ticket) if ticket.done:
                return True, ticket.value
            case ops.WaitAny(tickets) if (found := _first_done(tickets)) is not None:
                return True, found
            case ops.ReadParameters():
                return True, worker.replica.read_parameters()
            case ops.WriteParameters(value):
                return True, worker.replica.write_parameters(value)
            case ops.Now():
                return True, clock.now_s
            case ops.EndStep(step, state):
                worker.end_step(step, clock.now_s)
                stop = step == self.simulation.stop_after
                if stop:
                    self._checkpoint(step, state)
                return not stop, None
            case _:
                return False, None

    def _begin(self, request: Request) -> None:
        match request:
            case ops.Backward():
                self._backward(request)
            case ops.Apply(gradient, lr_scale):
                self._apply(gradient, lr_scale)
            case ops.Wait(ticket):
                self._on_done((ticket,), lambda: self._waited(ticket.value))
            case ops.WaitAny(tickets, timeout_s):
                self._wait_any(tickets, timeout_s)
            case _:
                begin = self.simulation.clock.now_s
                self._communicate(request, lambda value: self._waited(value, begin))

    def _waited(self, answer: Any, begin: float | None = None) -> None:
        now = self.simulation.clock.now_s
        if self._channel == FOREGROUND:
            self.worker.recorder.span("wait", "compute", self._waiting_since if begin is None else begin, now, self.worker.step)
        self._resume(answer)

    # -- compute -----------------------------------------------------------------------------------------------

    def _backward(self, request: ops.Backward) -> None:
        worker, clock, compute = self.worker, self.simulation.clock, self.simulation.compute
        worker.step = request.step
        share = worker.fraction_of_batch(request.step)
        slow = compute.slowness(self.simulation.settings.seed, worker.rank, request.step) * share
        begin = clock.now_s
        forward_end = begin + compute.forward_s * slow
        end = forward_end + compute.backward_s * slow
        gradient = worker.backward(request.step)
        worker.recorder.span("forward", "compute", begin, forward_end, request.step)
        worker.recorder.span("backward", "compute", forward_end, end, request.step)
        if request.on_bucket is None:
            clock.at(end, lambda: self._resume(gradient))
            return
        tickets: list[Ticket] = []
        layout, on_bucket = gradient.layout, request.on_bucket
        finished = 0

        def launch(bucket: int) -> None:
            tickets.append(self._start(on_bucket(gradient.part(bucket))))

        for piece in layout.buckets:
            finished += sum(slot.numel for slot in piece.slots)
            ready = forward_end + (end - forward_end) * finished / layout.parameter_numel
            clock.at(min(ready, end), partial(launch, piece.index))
        clock.at(end, lambda: self._resume(tuple(tickets)))

    def _apply(self, gradient: Gradient, lr_scale: float) -> None:
        worker, clock = self.worker, self.simulation.clock
        part = gradient.flat.numel() / gradient.layout.numel
        seconds = self.simulation.compute.update_s * part
        worker.apply(gradient, lr_scale)
        worker.recorder.span("apply", "compute", clock.now_s, clock.now_s + seconds, gradient.step, bucket_of(gradient))
        clock.at(clock.now_s + seconds, lambda: self._resume(None))

    # -- communication -----------------------------------------------------------------------------------------

    def _start(self, work: Request | Program) -> Ticket:
        self._num_started += 1
        ticket = Ticket(self._num_started, work)
        ticket.runtime = []  # what to do when it is done

        def finish(value: Any) -> None:
            ticket.done, ticket.value = True, value
            for action in ticket.runtime:
                action()

        if isinstance(work, ops.AllReduce | ops.Send | ops.Recv):
            self._communicate(work, finish, LANE if isinstance(work, ops.AllReduce) else self._channel)
        else:
            program = perform(work) if isinstance(work, Request) else work
            self._queue(SimThread(self.simulation, self.worker, program, LANE, self._num_started, finish), finish)
        return ticket

    def _queue(self, thread: SimThread, finish: Callable[[Any], None]) -> None:
        """One lane a worker: sub-programs run one after the other, in order of starting."""

        def then(value: Any) -> None:
            self._lane.popleft()
            finish(value)
            if self._lane:
                self._lane[0].begin()

        thread._then = then
        self.simulation.threads.append(thread)
        self._lane.append(thread)
        if len(self._lane) == 1:
            self.simulation.clock.at(self.simulation.clock.now_s, thread.begin)

    def _communicate(self, request: Request, then: Callable[[Any], None], channel: str | None = None) -> None:
        simulation, worker = self.simulation, self.worker
        network, p = simulation.network, simulation.num_workers
        channel = channel or self._channel
        match request:
            case ops.AllReduce(value):
                seconds = network.all_reduce_s(size_of(value), p)
                sent = native_bytes(p, size_of(value))
                self._join(f"{channel} all-reduce", "all_reduce", value, seconds, sent, _sum, then)
            case ops.Broadcast(value, root):
                seconds = network.broadcast_s(size_of(value), p)
                sent = size_of(value) if worker.rank == root else 0
                self._join(f"{channel} broadcast", "broadcast", value, seconds, sent, lambda values: _copy_from(values, root), then)
            case ops.Barrier():
                self._join(f"{channel} barrier", "barrier", None, network.barrier_s(p), 0, lambda values: None, then)
            case ops.Send(to, value, tag):
                snapshot = flat_of(value).clone()  # what a wire would have copied

                def sent_at(begin: float) -> None:
                    self._span("send", begin, value, size_of(value), to)
                    then(None)

                simulation.fabric.send((channel, self._key, tag), to, size_of(value), (worker.rank, snapshot, sent_at))
            case ops.Recv(source, like, tag):
                box: list[Message] = []

                def receive(sender: int, flat: torch.Tensor) -> None:
                    if flat.numel() != like.numel():
                        raise ConfigError(
                            f"rank {worker.rank} expected {like.numel()} elements from rank {sender}, which sent {flat.numel()}"
                        )
                    box.append(Message(sender, flat))

                def received_at(begin: float) -> None:
                    worker.recorder.span("recv", "comm", begin, simulation.clock.now_s, worker.step, -1, size_of(like), box[0].source)
                    then(box[0])

                simulation.fabric.receive((channel, self._key, tag), source, (worker.rank, receive, received_at))
            case _:
                raise TypeError(f"{type(request).__name__} is not a request that can be answered here")

    def _join(
        self, channel: str, kind: str, value: Any, seconds: float, num_bytes: float, combine: Any, then: Callable[[Any], None]
    ) -> None:
        seal = _checksum(value) if self.simulation.check_in_flight else None

        def finish(begin: float) -> None:
            self._span(kind, begin, value, num_bytes)
            then(value)

        def combine_checked(values: list[Any]) -> None:
            for held, sealed in values:
                if sealed is not None and _checksum(held) != sealed:
                    raise AssertionError(f"a gradient in flight was overwritten (rank {self.worker.rank}, step {self.worker.step})")
            combine([held for held, _ in values])

        self.simulation.fabric.join(channel, (self.worker.rank, (value, seal), finish), seconds, combine_checked)

    def _span(self, kind: str, begin: float, value: Any, num_bytes: float, peer: int = -1) -> None:
        self.worker.bytes_sent += num_bytes
        step = value.step if isinstance(value, Gradient) else self.worker.step
        self.worker.recorder.span(kind, "comm", begin, self.simulation.clock.now_s, step, bucket_of(value), int(num_bytes), peer)

    # -- tickets -----------------------------------------------------------------------------------------------

    def _on_done(self, tickets: tuple[Ticket, ...], action: Callable[[], None]) -> None:
        self._waiting_since = self.simulation.clock.now_s
        for ticket in tickets:
            ticket.runtime.append(action)

    def _wait_any(self, tickets: tuple[Ticket, ...], timeout_s: float | None) -> None:
        if not tickets:
            raise ValueError("WaitAny of no tickets would wait for ever")
        answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._waited(_first_done(tickets))

        self._on_done(tickets, answer)
        if timeout_s is not None:
            self.simulation.clock.at(self.simulation.clock.now_s + timeout_s, answer)

    def _checkpoint(self, step: int, state: tuple[Any, ...]) -> None:
        """Keep this rank's state; gradients in flight are completed first, in virtual time that no longer counts."""
        tickets = [item for item in state if isinstance(item, Ticket) and not item.done]

        def keep() -> None:
            if all(ticket.done for ticket in tickets):
                simulation, end = self.simulation, ops.EndStep(step, state)
                saved = take_checkpoint(simulation.algorithm, self.worker.trained, simulation.num_workers, end)
                simulation.checkpoints[self.worker.rank] = deepcopy(saved)

        for ticket in tickets:
            ticket.runtime.append(keep)
        keep()


def _first_done(tickets: tuple[Ticket, ...]) -> tuple[int, Any] | None:
    return next(((position, ticket.value) for position, ticket in enumerate(tickets) if ticket.done), None)


def _sum(values: list[Any]) -> None:
    """In rank order, into every rank's own memory."""
    flats = [flat_of(value) for value in values]
    for other in flats[1:]:
        flats[0].add_(other)
    for other in flats[1:]:
        other.copy_(flats[0])


def _copy_from(values: list[Any], root: int) -> None:
    for position, value in enumerate(values):
        if position != root:
            flat_of(value).copy_(flat_of(values[root]))


def _checksum(value: Any) -> int:
    return 0 if value is None or flat_of(value).is_meta else hash(flat_of(value).numpy().tobytes())
