"""Runs one program for thousands of workers that make the same requests. Time is a vector over workers.

With a symmetric algorithm (`Algorithm.symmetric`) on identical replicas, every rank yields the same requests, at any
time, and uses only sums of gradients. So one program is run, on one replica. `Backward` computes every worker's
minibatch, one after the other, and adds each gradient to the sum at once, in order of rank. An all-reduce then returns
this sum. It is bit-identical to the sum of messages in `runtimes.simulator.simulation`. Times are arrays of shape (p,),
because workers compute at different speeds. A sum begins when the last worker has arrived.

Programs run ahead as far as they can. Collectives are carried out in order of time, because they share the network.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch

from workbench import ops
from workbench.collectives import Collective, Native, Ring, native_bytes
from workbench.costs import AnyNetwork, Compute, Network
from workbench.costs.stragglers import Array
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import FREE, Program, Request, Ticket, Value
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context, Sum, lower, perform
from workbench.replica.local_training import model_info, run_info
from workbench.replica.replica import compute_threads
from workbench.runtimes.execution.endpoint import size_of
from workbench.runtimes.simulator.lockstep.worker_group import WorkerGroup
from workbench.runtimes.simulator.worker import simulation_notes
from workbench.settings import Settings
from workbench.trace.run import Run

_PENDING = object()


@final
@dataclass(slots=True, eq=False)
class _Thread:
    """A program of all workers, or one that they started."""

    programs: list[Program]  # its generators, the innermost last
    now_s: Array  # (p,) time of each worker
    then: Callable[[Any, Exception | None], None]
    main: bool = False
    pending: Request | None = None


@final
@dataclass(slots=True, eq=False)
class _InProgress:
    """The value of a ticket: when the work ended, and which programs wait for it."""

    end_s: Array | float = 0.0
    waiting: list[_Thread] = field(default_factory=list)


@final
@dataclass(slots=True, eq=False)
class _Lane:
    free_s: Array | float = 0.0  # (p,) when the last sub-program ended
    busy: bool = False
    line: deque[_Thread] = field(default_factory=deque)


def simulate_in_lockstep(
    algorithm: Algorithm,
    problem: Problem,
    settings: Settings,
    num_workers: int,
    *,
    network: AnyNetwork,
    compute: Compute,
    timing_only: bool,
    stop_after: int | None = None,
) -> Run:
    """Simulate a symmetric algorithm whose collectives are the library's or have closed forms.

    Args:
        stop_after: stop at the end of this step, with what is in flight.
    """
    algorithm.check(num_workers)
    group = WorkerGroup(algorithm, problem, settings, num_workers, compute, timing_only=timing_only)
    stopped, layout = stop_after is not None and stop_after + 1 < group.num_steps, group.replica.layout
    last = stop_after if stopped and stop_after is not None else group.num_steps - 1
    ctx = Context(0, num_workers, num_steps=group.num_steps, layout=layout, seed=settings.seed, link=network)
    with torch.random.fork_rng(devices=[]), compute_threads(settings.threads or 1):
        ended_s = Lockstep(group, network, last if stopped else None).run(algorithm, ctx)
        seconds = float(ended_s.max())
        if not stopped:
            group.evaluate(last, seconds)
        group.finish()

    note = f"one program for {num_workers} workers"
    if not isinstance(getattr(algorithm, "collective", None), Native):
        note += ", collectives by formula"
    if len(group.recorders) < num_workers:
        note += f": rank 0's rows of metrics stand for all, spans are of the first {len(group.recorders)}"
    info = run_info(algorithm, problem, settings, "simulated", num_workers)
    info["notes"] += [*simulation_notes(settings, group.sampler, network, compute, timing_only=timing_only), note]
    waited_share = float(group.waited_s.mean() / seconds) if seconds else 0.0  # of a worker's time, for sums
    info |= {
        "model": model_info(layout),
        "status": "stopped" if stopped else "finished",
        "result": {"steps": last + 1, "seconds": seconds, "last_step": last, "waited_share": waited_share},
    }
    return Run.from_memory(info, group.recorders, group.weights())


@final
class Lockstep:
    """Runs the one program.

    Args:
        group: the workers: their replica, their compute, their record.
        network: what collectives cost.
        stop_after: the step at whose end the program is closed.
    """

    def __init__(self, group: WorkerGroup, network: AnyNetwork, stop_after: int | None = None) -> None:
        self.group, self.network, self._stop_after = group, network, stop_after
        self._stopped: ops.EndStep | None = None  # the end of the step after which the program was closed
        self._meetings: list[tuple[float, int, float, Callable[[float], None]]] = []
        self._num_met = self._num_started = 0
        self._free_s = 0.0  # when the network is idle
        self._ready: deque[tuple[_Thread, Any, Exception | None]] = deque()
        self._errors: list[Exception] = []  # of background work
        self._lanes: dict[int, _Lane] = defaultdict(_Lane)
        self._known: dict[Any, tuple[float, float]] = {}  # (seconds, bytes) of collectives, by size of the value

    def run(self, algorithm: Algorithm, ctx: Context) -> Array:
        """Run to the end. Return (p,), the time at which each worker ended."""
        program = lower(ctx, algorithm.worker(ctx), _select)
        main = _Thread([program], np.zeros(self.group.num_workers), lambda value, error: None, main=True)
        self._ready.append((main, None, None))
        while self._ready or self._meetings:
            while self._ready:
                self._advance(*self._ready.popleft())
            if self._meetings:
                met_s, _, seconds, then = heapq.heappop(self._meetings)
                self._free_s = max(met_s, self._free_s) + seconds
                then(self._free_s)
        if self._errors:
            raise self._errors[0]
        assert main.pending is None, f"the program still waits for {main.pending}"
        return main.now_s

    def _advance(self, thread: _Thread, answer: Any, error: Exception | None) -> None:
        """Continue until the next event depends on other programs. `error` is of the work that the program waited for."""
        thread.pending = None
        try:
            self._continue(thread, answer, error)
        except Exception as raised:
            if thread.main:
                raise
            thread.then(None, raised)

    def _continue(self, thread: _Thread, answer: Any, error: Exception | None) -> None:
        """Answer requests until one is pending, or to the program's end. Errors are raised in the program."""
        while True:
            program = thread.programs[-1]
            try:
                request = program.send(answer) if error is None else program.throw(error)
            except StopIteration as stop:
                thread.programs.pop()
                if not thread.programs:
                    thread.then(stop.value, None)
                    return
                answer, error = stop.value, None
                continue
            except Exception as unhandled:
                thread.programs.pop()
                if not thread.programs:
                    raise
                error = unhandled
                continue
            error = None
            try:
                answer = self._answer(thread, request)
            except Exception as raised:  # noqa: BLE001 - the program may handle it
                error = raised
                continue
            if answer is _PENDING:
                thread.pending = request
                return
            if isinstance(request, ops.EndStep) and request.step == self._stop_after:
                thread.programs.pop().close()
                self._stopped = request
                self._ready.clear()  # what is in flight is abandoned
                self._meetings.clear()
                return

    def _answer(self, thread: _Thread, request: Request) -> Any:
        group = self.group
        match request:
            case ops.Wait(ticket):
                return self._wait(thread, ticket)
            case ops.Start():
                return self._start(request, thread.now_s)
            case ops.Apply():
                thread.now_s = group.apply(request, thread.now_s)
                return None
            case ops.Backward():
                thread.programs.append(self._pass(thread, request))
                return None
            case ops.EndStep():
                group.end_step(request, thread.now_s)
                return None
            case ops.ReadParameters():
                return group.replica.read_parameters()
            case ops.WriteParameters(value):
                return group.replica.write_parameters(value)
            case ops.Discard(gradient):
                return group.replica.discard(gradient)
            case _:
                self._start_collective(request, thread.now_s, partial(self._end_collective, thread, request))
                return _PENDING

    def _pass(self, thread: _Thread, request: ops.Backward) -> Program:
        """Compute forward, in parts if buckets must arrive first, and then backward."""
        group, parts = self.group, self.group.forward_parts
        group.step = request.step
        if request.before_forward is None:
            thread.now_s = group.forward(request.step, thread.now_s, 1.0)
        else:
            for bucket in reversed(range(len(parts))):
                yield from request.before_forward(bucket)
                thread.now_s = group.forward(request.step, thread.now_s, parts[bucket])
        gradient, begin_s, thread.now_s = group.backward(request.step, thread.now_s)
        if request.on_bucket is None:
            return gradient
        tickets = []
        for piece, share in zip(gradient.layout.buckets, group.ready_shares, strict=True):
            work = request.on_bucket(gradient.bucket_view(piece.index))
            if work is None:
                continue
            ready_s = np.minimum(begin_s + (thread.now_s - begin_s) * share, thread.now_s)
            tickets.append(self._start(work if isinstance(work, ops.Start) else ops.Start(work), ready_s))
        return tuple(tickets)

    # -- background --------------------------------------------------------------------------------------------

    def _start(self, request: ops.Start, now_s: Array) -> Ticket:
        self._num_started += 1
        going = _InProgress()
        ticket = Ticket(self._num_started, request.work, going)

        def end(end_s: Array | float, value: Any, error: Exception | None = None) -> None:
            ticket.done, ticket.value, ticket.error, going.end_s = True, value, error, end_s
            if going.waiting and error is not None:
                self._waited_for(error)
            for thread in going.waiting:
                self._waited(thread, end_s)
                self._ready.append((thread, value, error))

        if isinstance(request.work, ops.AllReduce) and request.work.collective is None:
            work = request.work
            self._start_collective(work, now_s, lambda end_s: end(end_s, work.value))
            return ticket
        lane = self._lanes[request.lane] if request.lane != FREE else _Lane()
        thread = _Thread(
            [perform(request.work)], now_s, lambda value, error: self._ended(lane, thread, value, error, end)
        )
        lane.line.append(thread)
        if not lane.busy:
            self._next(lane)
        return ticket

    def _next(self, lane: _Lane) -> None:
        """Run the sub-programs of one lane one after the other, in order of starting."""
        lane.busy = bool(lane.line)
        if lane.line:
            thread = lane.line.popleft()
            thread.now_s = np.maximum(thread.now_s, lane.free_s)
            self._ready.append((thread, None, None))

    def _ended(
        self,
        lane: _Lane,
        thread: _Thread,
        value: Any,
        error: Exception | None,
        end: Callable[[Array | float, Any, Exception | None], None],
    ) -> None:
        lane.free_s = thread.now_s
        if error is not None:
            self._errors.append(error)
        end(thread.now_s, value, error)
        self._next(lane)

    def _wait(self, thread: _Thread, ticket: Ticket) -> Any:
        going = ticket.runtime
        if ticket.done:
            if going is not None:
                self._waited(thread, going.end_s)
            if ticket.error is not None:
                self._waited_for(ticket.error)
                raise ticket.error
            return ticket.value
        going.waiting.append(thread)
        return _PENDING

    def _waited_for(self, error: BaseException) -> None:
        """Forget an error that is raised in a program: the program may handle it."""
        self._errors = [other for other in self._errors if other is not error]

    def _waited(self, thread: _Thread, end_s: Array | float) -> None:
        later = np.maximum(thread.now_s, end_s)
        if thread.main:
            self.group.waited(thread.now_s, later)
        thread.now_s = later

    # -- collectives -------------------------------------------------------------------------------------------

    def _start_collective(self, request: Request, now_s: Array, then: Callable[[float], None]) -> None:
        """Let all workers join a collective, each at its own time.

        It begins when the last has arrived and the network is idle.
        """
        kind, value, seconds, num_bytes = self._cost(request)

        def end(end_s: float) -> None:
            self.group.communicated(kind, value, now_s, end_s, num_bytes)
            then(end_s)

        self._num_met += 1
        heapq.heappush(self._meetings, (float(now_s.max()), self._num_met, seconds, end))

    def _end_collective(self, thread: _Thread, request: Any, end_s: float) -> None:
        """End a collective of the foreground."""
        self._waited(thread, end_s)
        self._ready.append((thread, getattr(request, "value", None), None))

    def _cost(self, request: Request) -> tuple[str, Value | None, float, float]:
        """Return kind, value, seconds, and bytes that a worker sends on average."""
        network, p = self.network, self.group.num_workers
        match request:
            case ops.AllReduce(value, None):
                return "all_reduce", value, network.all_reduce_s(size_of(value), p), native_bytes(p, size_of(value))
            case ops.ReduceScatter(value, None):
                return (
                    "reduce_scatter",
                    value,
                    network.reduce_scatter_s(size_of(value), p),
                    native_bytes(p, size_of(value)) / 2,
                )
            case ops.AllGather(value, None):
                return "all_gather", value, network.all_gather_s(size_of(value), p), native_bytes(p, size_of(value)) / 2
            case ops.Barrier():
                return "barrier", None, network.barrier_s(p), 0.0
            case ops.AllReduce(value) | ops.ReduceScatter(value) | ops.AllGather(value):
                return "all_reduce", value, *self._closed_form(request)
            case _:
                raise ConfigError(
                    f"{type(request).__name__}: workers do not all make the same requests: use detail='messages'"
                )

    def _closed_form(self, request: Sum) -> tuple[float, float]:
        """Return the seconds of a collective of messages, and the bytes that a worker sends on average."""
        value, collective = request.value, request.collective
        assert isinstance(collective, Collective)
        size = (value.bucket, value.layout.numel) if isinstance(value, Gradient) else (value.numel(), value.dtype)
        key = (type(request), collective, size)
        if key not in self._known:
            p = self.group.num_workers
            is_whole = isinstance(request, ops.AllReduce)
            self._known[key] = (
                _whole(collective, self.network, value, p) if is_whole else _half(request, collective, self.network, p)
            )
        return self._known[key]


def _select(ctx: Context, request: Sum) -> Request:
    """Return a sum as `Lockstep` answers it: the library's own, or one with a collective that has a closed form."""
    assert isinstance(request.collective, Collective)
    collective = request.collective.select(ctx, request.value)
    return replace(request, collective=None if isinstance(collective, Native) else collective)


def _whole(collective: Collective, network: Any, value: Value, p: int) -> tuple[float, float]:
    """Return the seconds of an all-reduce, bucket by bucket, and the bytes that a worker sends."""
    pieces = (
        [(flat, piece.stop - piece.tail) for piece, flat in value.slices()]
        if isinstance(value, Gradient)
        else [(value.view(-1), 0)]
    )
    seconds = sum(collective.seconds(flat.numel() * flat.element_size(), p, network) for flat, _ in pieces)
    return seconds, sum(collective.mean_bytes(p, flat.numel(), flat.element_size(), tail=tail) for flat, tail in pieces)


def _half(request: Sum, collective: Collective, network: AnyNetwork, p: int) -> tuple[float, float]:
    """Return the seconds of one half of a ring, and the bytes that a worker sends."""
    if not isinstance(collective, Ring) or collective.codec is not None or collective.chunks != 1:
        raise ConfigError(f"detail='formula': {collective} has no closed form of its halves; use detail='messages'")
    num_bytes = size_of(request.value)
    network = network.of_messages if isinstance(network, Network) else network
    seconds = (
        network.reduce_scatter_s(num_bytes, p)
        if isinstance(request, ops.ReduceScatter)
        else network.all_gather_s(num_bytes, p)
    )
    return seconds, native_bytes(p, num_bytes) / 2
