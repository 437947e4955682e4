"""A simulated cluster in one process: virtual time from a cost model, real gradients or none at all.

The same programs as on real ranks. Work of the foreground and of one background lane a worker is timed; a minibatch's
gradients are really computed (unless timing only), and sums are taken in rank order, so a run is a pure function of its inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch

from workbench import ops
from workbench.collectives import flat_of, native_bytes
from workbench.costs import Compute, Network
from workbench.errors import ConfigError, Stalled
from workbench.gradients import Gradient
from workbench.ops import Message, Program, Request, Ticket
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context, perform
from workbench.runtimes.endpoint import bucket_of, size_of
from workbench.runtimes.sim_worker import SimWorker, build_workers
from workbench.runtimes.virtual import Clock, Fabric
from workbench.runtimes.worker import model_info, pack_state, run_info, unpack_state
from workbench.settings import Settings
from workbench.trace.recorder import MemoryRecorder
from workbench.trace.run import Run

FOREGROUND, LANE = "foreground", "lane"


@final
class Simulation:
    """One run on `workers` simulated workers. Afterwards `workers` holds their replicas and `checkpoints` where they stopped.

    Args:
        network, compute: what things cost in virtual seconds.
        timing_only: no data, no tensors: what time does, and nothing else.
        stop_after: stop at the end of this step; `checkpoints` can then be given to another simulation as `resume`.
        check_in_flight: verify that no value changes between its request and its use by the network.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        settings: Settings,
        workers: int,
        *,
        network: Network,
        compute: Compute,
        timing_only: bool = False,
        check_in_flight: bool = False,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers={workers}: a simulated cluster has at least 1")
        self.algorithm, self.problem, self.settings = algorithm, problem, settings
        self.num_workers = workers
        self.clock = Clock()
        self.fabric = Fabric(self.clock, network, workers)
        self.network, self.compute = network, compute
        self.check_in_flight = check_in_flight
        self.workers = build_workers(algorithm, problem, settings, workers, timing_only)
        self.checkpoints: list[dict[str, Any]] = []
        self.stop_after: int | None = None
        self._threads: list[_Thread] = []

    def run(self, resume: list[dict[str, Any]] | None = None, stop_after: int | None = None) -> Run:
        """From the first step (or a checkpoint) to the last.

        Raises:
            Stalled: nobody can move; names what each rank waits for.
            Diverged: a loss is not a finite number.
        """
        self.stop_after = stop_after
        self.checkpoints = [{} for _ in self.workers]
        with torch.random.fork_rng(devices=[]):
            for worker in self.workers:
                ctx = Context(worker.rank, self.num_workers, num_steps=worker.num_steps)
                if resume is not None:
                    saved = resume[worker.rank]
                    worker.replica.load(saved["replica"])
                    ctx.first_step, ctx.resumed = saved["step"] + 1, unpack_state(saved["program"], worker.replica)
                thread = _Thread(self, worker, self.algorithm.worker(ctx), FOREGROUND, 0, lambda value: None)
                self._threads.append(thread)
                self.clock.at(0.0, thread.begin)
            self.clock.run()
            waiting = [thread for thread in self._threads if thread.pending is not None]
            if waiting:
                named = "; ".join(f"rank {thread.worker.rank}: {thread.pending}" for thread in waiting[:16])
                raise Stalled(f"nobody can move at {self.clock.now_s:.6f} virtual seconds. Pending: {named}")
            if stop_after is None:
                self._evaluate_at_end()
        return Run.from_memory(self._info(), [worker.recorder for worker in self.workers])

    def _evaluate_at_end(self) -> None:
        first = self.workers[0]
        first.evaluate(first.num_steps - 1, self.clock.now_s)

    def _info(self) -> dict[str, Any]:
        info = run_info(self.algorithm, self.problem, self.settings, "simulated", self.num_workers)
        done = self.workers[0].last_step + 1
        costs = [f"simulated: {self.network}", f"simulated: {self.compute}"]
        status = "stopped" if self.stop_after is not None else "finished"
        result = {"steps": done, "seconds": self.clock.now_s, "last_step": done - 1}
        return {**info, "notes": [*info["notes"], *costs], "model": model_info(self.workers[0].replica), "status": status, "result": result}


@final
class _Thread:
    """A program of one worker: its own, or a sub-program on its lane."""

    def __init__(self, simulation: Simulation, worker: SimWorker, program: Program, channel: str, key: int, then: Callable[[Any], None]) -> None:
        self.simulation, self.worker = simulation, worker
        self.pending: Request | None = None
        self._program, self._channel, self._key, self._then = program, channel, key, then
        self._lane: deque[_Thread] = deque()
        self._num_started = 0

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
        for piece in layout.buckets:
            finished += sum(slot.numel for slot in piece.slots)
            ready = forward_end + (end - forward_end) * finished / layout.parameter_numel
            clock.at(min(ready, end), lambda index=piece.index: tickets.append(self._start(on_bucket(gradient.part(index)))))
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
            self._queue(_Thread(self.simulation, self.worker, program, LANE, self._num_started, finish), finish)
        return ticket

    def _queue(self, thread: _Thread, finish: Callable[[Any], None]) -> None:
        """One lane a worker: sub-programs run one after the other, in order of starting."""

        def then(value: Any) -> None:
            self._lane.popleft()
            finish(value)
            if self._lane:
                self._lane[0].begin()

        thread._then = then
        self.simulation._threads.append(thread)
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
                        raise ConfigError(f"rank {worker.rank} expected {like.numel()} elements from rank {sender}, which sent {flat.numel()}")
                    box.append(Message(sender, flat))

                def received_at(begin: float) -> None:
                    worker.recorder.span("recv", "comm", begin, simulation.clock.now_s, worker.step, -1, size_of(like), box[0].source)
                    then(box[0])

                simulation.fabric.receive((channel, self._key, tag), source, (worker.rank, receive, received_at))
            case _:
                raise TypeError(f"{type(request).__name__} is not a request that can be answered here")

    def _join(self, channel: str, kind: str, value: Any, seconds: float, num_bytes: float, combine: Any, then: Callable[[Any], None]) -> None:
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
                saved = {"step": step, "replica": self.worker.replica.state(), "program": pack_state(state)}
                self.simulation.checkpoints[self.worker.rank] = saved

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


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    *,
    workers: int,
    network: Network,
    compute: Compute,
    timing_only: bool = False,
    **settings: Any,
) -> Run:
    """Train on a simulated cluster and return the run.

    Args:
        algorithm, problem: the same objects that real ranks are given.
        workers: how many.
        network: `workbench.costs.ethernet_10g`, say.
        compute: of one worker; `workbench.costs.measure_compute(problem)` measures this machine's.
        timing_only: compute no gradients: what time does, and nothing else.
        settings: those of `workbench.settings.Settings`.
    """
    return Simulation(algorithm, problem, Settings(**settings), workers, network=network, compute=compute, timing_only=timing_only).run()
