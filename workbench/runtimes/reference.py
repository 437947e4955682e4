"""The reference runtime: answers every request of `workbench/ops.py` as its docstring says, in one process.

Read this runtime first. It has no communication library, no model and no cost model. Parameters are one vector, a
gradient is a formula, and the optimizer is heavy-ball SGD. The tests compare algorithms and the other runtimes with it.

It is strict where the other runtimes are fast:

- A send is a rendezvous: it ends when the receiver asks for the message.
- A value that is written while it is sent or summed is an error.
- A gradient that was applied or discarded becomes NaN.
- After a reduce-scatter, the blocks of other ranks are NaN.

Each program has its own virtual clock, so a test can compute `Now`, time-outs and the order of events by hand. The
program with the earliest clock continues. `WaitAny` takes the ticket that is done first on these clocks; a ticket that
is done at the time-out counts. With `shuffle`, the next program to run is drawn at random, and a `WaitAny` whose
tickets are not done may time out at once. No result of an algorithm may depend on that order, unless it declares
`depends_on_timing`.

No rank leaves, so no receive is answered `PeerLeft`. No server is asked to stop.

`ReferenceRuntime.run` is the loop. `_try` answers one request. `_start` and `_communicate` handle background work and
messages.

>>> from workbench.algorithms.synchronous import SynchronousSGD
>>> runtime = ReferenceRuntime(SynchronousSGD(), 2, lambda rank, step, parameters: parameters * 0 + 1 + rank, sizes=(2,), lr=1.0, start=0.0)
>>> [rank.parameters.tolist() for rank in runtime.run(num_steps=1).ranks]  # the gradients are 1 and 2, so their mean is 1.5
[[-1.5, -1.5], [-1.5, -1.5]]
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from workbench import ops
from workbench.gradients import CONTROL, USED, WEIGHT, Gradient, Layout, block_bounds, build_layout
from workbench.ops import Message, Program, Request, State, Ticket
from workbench.program import Algorithm, Context, complete, lower, perform

GradientOf = Callable[[int, int, Tensor], Tensor]  # (rank, step, parameters) -> this rank's mean gradient


@final
@dataclass
class Costs:
    """Seconds that a request takes on the virtual clock. `backward` is a function of (rank, step)."""

    backward: Callable[[int, int], float] = lambda rank, step: 1.0
    apply: float = 0.0
    collective: float = 0.0
    message: float = 0.0


@final
@dataclass
class Applied:
    """One update of a replica."""

    gradient_step: int
    version: int
    staleness: int
    bucket: int | None
    parameters: Tensor  # after the update
    weight: float  # number of minibatches in the sum, divided by the number of ranks
    local: bool = False
    of: tuple[tuple[int, int], ...] = ()


@final
@dataclass
class Rank:
    """One rank's parameters and optimizer state, and what happened on it.

    `server` is the same of the copy that a server on this rank updates; None before its first use.
    """

    parameters: Tensor  # (n,), in order of registration
    velocity: Tensor
    layout: Layout
    updates: list[int]
    # (step, parameters at which the gradient was computed).
    backwards: list[tuple[int, Tensor]] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    ends: list[ops.EndStep] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)  # parameters at each EndStep
    out: set[int] = field(default_factory=set)  # ids of the buffers of gradients that are not yet consumed
    discarded: int = 0
    memory: dict[str, Tensor] = field(default_factory=dict)  # the `Context.memory` of its programs
    alive: list[Any] = field(default_factory=list)
    server: Rank | None = None

    def copy_of_server(self) -> Rank:
        """Return the server's copy, which begins as a copy of the replica."""
        if self.server is None:
            velocity = torch.zeros_like(self.velocity)
            self.server = Rank(self.parameters.clone(), velocity, self.layout, [0] * len(self.updates))
        return self.server

    def offsets(self, bucket: int | None) -> Tensor:
        """Return the positions of a bucket's parameters in `parameters`, in the order of its slots."""
        starts, begin = {}, 0
        for slot in self.layout.slots:
            starts[slot.index], begin = begin, begin + slot.numel
        pieces = self.layout.buckets if bucket is None else [self.layout.buckets[bucket]]
        return torch.cat(
            [
                torch.arange(starts[slot.index], starts[slot.index] + slot.numel)
                for piece in pieces
                for slot in piece.slots
            ]
        )


@final
class Process:
    """A program and its clock."""

    def __init__(
        self, rank: int, program: Program, key: int, now: float, ticket: Ticket | None, priority: int = 0
    ) -> None:
        self.rank = rank
        self.programs = [program]  # the last one runs; its result answers the request of the one before it
        self.key = key  # messages match within one key: each sub-program has its own tags
        self.now = now
        self.ticket = ticket  # None for the program of the rank itself
        self.priority = priority  # of programs with equal clocks, the one with the lowest number continues
        self.request: Request | None = None
        self.answer: Any = None
        self.error: Exception | None = None  # of the request, in place of an answer
        self.ready = True  # `answer` or `error` is known: the program can be resumed
        self.blocked = False  # waits for a message, or for the other ranks of a collective
        self.num_native = 0
        self.num_started = 0  # background work so far: the next key

    @property
    def wakes_at(self) -> float | None:
        """The time at which a waiting `WaitAny` ends, as far as is known; None if that is not known."""
        if self.ready or not isinstance(self.request, ops.WaitAny):
            return None
        times = [max(self.now, ticket.runtime or 0.0) for ticket in self.request.tickets if ticket.done]
        if self.request.timeout_s is not None:
            times.append(self.now + self.request.timeout_s)
        return min(times, default=None)

    @property
    def turn(self) -> tuple[float, bool, int]:
        """The order in which programs continue: at one time, those that may complete a ticket first."""
        wakes_at = self.wakes_at
        return (self.now if wakes_at is None else wakes_at, wakes_at is not None, self.priority)


@final
class ReferenceRuntime:
    """Run `algorithm` on `num_ranks` ranks. After `run`, `ranks` holds what happened.

    Args:
        gradient: (rank, step, parameters) -> this rank's mean gradient.
        sizes: number of elements of each parameter. The first is used first in forward, and its gradient is ready last
            in backward.
        start: the initial parameters: one number, or a tensor with one number for each coordinate.
        costs: seconds of each request on the virtual clock.
        shuffle: seed of a random order of the programs. None: the program with the earliest clock runs next.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        num_ranks: int,
        gradient: GradientOf,
        *,
        sizes: tuple[int, ...] = (2, 3, 1),
        lr: float = 0.5,
        momentum: float = 0.0,
        start: float | Tensor = 1.0,
        costs: Costs | None = None,
        shuffle: int | None = None,
        seed: int = 0,
    ) -> None:
        algorithm.check(num_ranks)
        module = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes])
        buckets = algorithm.requires.buckets
        layout = build_layout(module.named_parameters(), buckets.max_bytes, buckets.count)
        self.algorithm = algorithm
        self.gradient = gradient
        self.lr = lr
        self.momentum = momentum
        self.seed = seed
        self.costs = costs or Costs()
        self.random = None if shuffle is None else random.Random(shuffle)
        numel = layout.parameter_numel
        self.ranks = [
            Rank(
                parameters=torch.zeros(numel, dtype=torch.float64) + start,
                velocity=torch.zeros(numel, dtype=torch.float64),
                layout=layout,
                updates=[0] * len(layout.buckets),
            )
            for _ in range(num_ranks)
        ]
        self.processes: list[Process] = []
        self.lanes: dict[tuple[int, int], deque[Process]] = defaultdict(deque)
        self.sends: list[tuple[Any, ...]] = []  # (key, tag, source, to, value, stamp, ticket or process, now, seal)
        self.receives: list[tuple[Any, ...]] = []  # (key, tag, source, to, like, stamped, ticket or process, now)
        self.joins: dict[Any, dict[int, tuple[Any, Any, float, int]]] = defaultdict(dict)
        self.stop_after: int | None = None
        self.states: list[State | None] = [None] * num_ranks
        self.errors: list[Exception] = []  # of background work

    # -- running -----------------------------------------------------------------------------------------------

    def continue_from(self, stopped: ReferenceRuntime) -> None:
        """Take over parameters, optimizer and memory of each rank. Then give `stopped.states` to `run`."""
        for here, there in zip(self.ranks, stopped.ranks, strict=True):
            here.parameters.copy_(there.parameters)
            here.velocity.copy_(there.velocity)
            here.updates[:] = there.updates
            here.memory = {name: value.clone() for name, value in there.memory.items()}

    def run(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        resumed: list[State | None] | None = None,
        stop_after: int | None = None,
    ) -> ReferenceRuntime:
        """Run every program to its end, or to its first `EndStep` from step `stop_after` on.

        After `stop_after`, `states` holds each rank's state: give it to another runtime as `resumed`, after
        `continue_from`.

        Raises:
            AssertionError: deadlock, with the request that each rank waits for.
            Exception: an error of background work, at its `Wait`, or when no program can continue.
        """
        self.stop_after = stop_after
        for rank, state in enumerate(self.ranks):
            ctx = Context(
                rank, len(self.ranks), first_step=first_step, num_steps=num_steps, layout=state.layout, seed=self.seed
            )
            ctx.memory = state.memory
            ctx.resumed = None if resumed is None else complete(resumed[rank])
            self.processes.append(Process(rank, lower(ctx, self.algorithm.worker(ctx)), 0, 0.0, None))
        while self.processes:
            for process in list(self.processes):
                if not process.ready and not process.blocked:
                    try:
                        self._try(process)
                    except Exception as error:  # noqa: BLE001 - raised in the program, which may handle it
                        self._refuse(process, error, process.now)
            self._deliver()
            able = [process for process in self.processes if process.ready or process.wakes_at is not None]
            if able:
                chosen = (
                    min(able, key=lambda process: process.turn) if self.random is None else self.random.choice(able)
                )
                if not chosen.ready:
                    self._end_wait(chosen)
                self._resume(chosen)
            elif self.errors:
                raise self.errors[0]
            elif self.processes and any(process.ticket is None for process in self.processes):
                raise AssertionError(
                    "deadlock: " + "; ".join(f"rank {process.rank}: {process.request}" for process in self.processes)
                )
            elif self.processes:
                assert self.stop_after is not None, "background work outlived its program"
                break  # only background work of closed programs is left
        if self.errors:
            raise self.errors[0]
        return self

    def _resume(self, process: Process) -> None:
        answer, error = process.answer, process.error
        process.ready = False
        process.answer = process.error = None
        while process.programs:
            program = process.programs[-1]
            try:
                process.request = program.send(answer) if error is None else program.throw(error)
                return
            except StopIteration as stop:
                answer, error = stop.value, None
            except Exception as unhandled:  # noqa: BLE001 - the program before it may handle it
                answer, error = None, unhandled
            process.programs.pop()
        if error is not None:
            self._fail(process, error, process.now)
            return
        self.processes.remove(process)
        if process.ticket is not None:
            self._finish(process.ticket, answer, process.now)

    def _end_wait(self, process: Process) -> None:
        """Answer a `WaitAny`: with the first ticket that is done by then, or with None at the time-out."""
        assert isinstance(process.request, ops.WaitAny) and process.wakes_at is not None
        process.now = process.wakes_at
        for position, ticket in enumerate(process.request.tickets):
            if ticket.done and (ticket.runtime or 0.0) <= process.now:
                try:
                    process.answer = position, self._value_of(ticket)
                except Exception as error:  # noqa: BLE001 - raised in the program, which may handle it
                    process.error = error
                return

    def _refuse(self, process: Process, error: Exception, now: float) -> None:
        """Raise an error of a request in the program that asked."""
        process.now = max(process.now, now)
        process.blocked, process.ready, process.error = False, True, error

    def _fail(self, process: Process, error: Exception, now: float) -> None:
        """End a program with an error. That of background work is raised at `Wait`."""
        if process.ticket is None:
            raise error
        self.processes.remove(process)
        self.errors.append(error)
        process.ticket.error = error
        self._finish(process.ticket, None, now)

    def _value_of(self, ticket: Ticket) -> Any:
        """Return the value of work that is done, or raise its error."""
        if ticket.error is None:
            return ticket.value
        if ticket.error in self.errors:
            self.errors.remove(ticket.error)
        raise ticket.error

    def _finish(self, ticket: Ticket, value: Any, now: float) -> None:
        ticket.done = True
        ticket.value = value
        ticket.runtime = now
        for lane in self.lanes.values():
            if lane and lane[0].ticket is ticket:
                lane.popleft()
                if lane:
                    lane[0].now = max(lane[0].now, now)
                    self.processes.append(lane[0])

    def _try(self, process: Process) -> None:
        """Answer the request of a process if its answer is known.

        `run` then resumes the process in the order of the clocks.
        """
        request, here, costs = process.request, self.ranks[process.rank], self.costs
        answer: Any = None
        match request:
            case ops.Backward() if request.on_bucket is None and request.before_forward is None:
                process.now += costs.backward(process.rank, request.step)
                answer = self._backward(here, process.rank, request.step)
            case ops.Backward():
                process.programs.append(self._by_bucket(here, request))
            case ops.Start(work):
                answer = self._start(process, request, work)
            case ops.Wait(ticket):
                if not ticket.done:
                    return
                process.now, answer = max(process.now, ticket.runtime or 0.0), self._value_of(ticket)
            case ops.WaitAny(tickets):
                if not tickets:
                    raise ValueError("WaitAny of no tickets never returns: give at least one")
                return  # `run` ends it in its turn
            case ops.Apply(gradient):
                process.now += costs.apply
                self._apply(here, request, gradient)
                answer = False if request.server_copy else None
            case ops.Discard(gradient):
                assert not gradient.flat.isnan().any(), "discarded a gradient that was already consumed"
                here.out.discard(id(gradient.flat))
                here.discarded += 1
                gradient.flat.fill_(torch.nan)
            case ops.ReadParameters():
                answer = here.parameters.clone()
            case ops.WriteParameters(value):
                here.parameters.copy_(value)
            case ops.PackParameters(bucket, server_copy, step):
                answer = replace(self._pack(here.copy_of_server() if server_copy else here, bucket), step=step)
            case ops.UnpackParameters(value):
                for piece, _ in value.slices():
                    weight = value.tail(piece.index)[WEIGHT]
                    here.parameters[here.offsets(piece.index)] = (
                        torch.cat([value.view(slot).reshape(-1) for slot in piece.slots]) / weight
                    )
            case ops.Local(_, _, action):
                answer = action()
            case ops.Now():
                answer = process.now
            case ops.EndStep(step, state):
                here.ends.append(request)
                here.seen.append(here.parameters.clone())
                self.states[process.rank] = state
                if self.stop_after is not None and step >= self.stop_after:
                    process.programs.pop().close()
                    self.processes.remove(process)
                    return
            case _:
                process.blocked = True
                self._communicate(process, request, None)
                return
        process.ready = True
        process.answer = answer

    # -- compute -----------------------------------------------------------------------------------------------

    def _backward(self, here: Rank, rank: int, step: int) -> Gradient:
        here.backwards.append((step, here.parameters.clone()))
        layout = here.layout
        gradient = Gradient(torch.empty(layout.numel, dtype=torch.float64), layout, step, min(here.updates))
        share = self.gradient(rank, step, here.parameters.clone()) / len(self.ranks)
        begin = 0
        for slot in layout.slots:
            gradient.view(slot).copy_(share[begin : begin + slot.numel].view(slot.shape))
            begin += slot.numel
        for piece in layout.buckets:
            tail = gradient.tail(piece.index)
            tail[WEIGHT], tail[CONTROL], tail[USED:] = 1 / len(self.ranks), 0.0, 1.0
        here.out.add(id(gradient.flat))
        here.alive.append(gradient.flat)  # kept, so that no other buffer gets its id
        return gradient

    def _by_bucket(self, here: Rank, request: ops.Backward) -> Program:
        """Call `before_forward` for each bucket in forward order, compute, and call `on_bucket` in backward order."""
        num_buckets = len(here.layout.buckets)
        if request.before_forward is not None:
            for bucket in reversed(range(num_buckets)):
                yield from request.before_forward(bucket)
        gradient = yield ops.Backward(request.step)
        if request.on_bucket is None:
            return gradient
        tickets = []
        for bucket in range(num_buckets):
            work = request.on_bucket(gradient.bucket_view(bucket))
            if work is None:
                continue
            tickets.append((yield work if isinstance(work, ops.Start) else ops.Start(work)))
        return tuple(tickets)

    def _apply(self, here: Rank, request: ops.Apply, gradient: Gradient) -> None:
        assert not gradient.flat.isnan().any(), "applied a gradient that was already consumed, or that has not arrived"
        updated = here.copy_of_server() if request.server_copy else here
        owner = gradient if gradient.owner is None else gradient.owner
        staleness = max(updated.updates[piece.index] for piece, _ in gradient.slices()) - gradient.version
        for piece, _ in gradient.slices():
            weight = float(gradient.tail(piece.index)[WEIGHT])
            if gradient.tail(piece.index)[USED:].any():  # otherwise no parameter moves
                where = here.offsets(piece.index)
                mean = torch.cat([gradient.view(slot).reshape(-1) for slot in piece.slots]) / weight
                updated.velocity[where] = self.momentum * updated.velocity[where] + mean
                updated.parameters[where] -= self.lr * request.lr_scale * updated.velocity[where]
            updated.updates[piece.index] += 1
        gradient.flat.fill_(torch.nan)
        if owner.flat.isnan().all():
            here.out.discard(id(owner.flat))
        here.applied.append(
            Applied(
                gradient.step,
                gradient.version,
                staleness,
                gradient.bucket,
                updated.parameters.clone(),
                weight,
                request.local,
                request.of,
            )
        )

    def _pack(self, here: Rank, bucket: int | None) -> Gradient:
        layout = here.layout
        piece = None if bucket is None else layout.buckets[bucket]
        numel = layout.numel if piece is None else piece.stop - piece.start
        packed = Gradient(torch.ones(numel, dtype=torch.float64), layout, -1, max(here.updates), bucket)
        for part, _ in packed.slices():
            packed.tail(part.index)[CONTROL] = 0.0
            values = here.parameters[here.offsets(part.index)]
            begin = 0
            for slot in part.slots:
                packed.view(slot).copy_(values[begin : begin + slot.numel].view(slot.shape))
                begin += slot.numel
        return packed

    # -- communication -----------------------------------------------------------------------------------------

    def _start(self, process: Process, request: ops.Start, work: Request | Program) -> Ticket:
        if not request.shares_tags:
            process.num_started += 1
        ticket = Ticket(process.num_started, work)
        if isinstance(work, ops.Send | ops.Recv):
            self._communicate(Process(process.rank, iter(()), process.key, process.now, ticket), work, ticket)  # type: ignore[arg-type]
            return ticket
        assert process.ticket is None, f"a sub-program cannot start {type(work).__name__} in the background"
        program = perform(work) if isinstance(work, Request) else work
        key = process.key if request.shares_tags else ticket.key
        child = Process(process.rank, program, key, process.now, ticket, request.priority)
        lane = deque() if request.lane == ops.FREE else self.lanes[process.rank, request.lane]
        lane.append(child)
        if len(lane) == 1:
            self.processes.append(child)
        return ticket

    def _communicate(self, process: Process, request: Request | None, ticket: Ticket | None) -> None:
        rank, now = process.rank, process.now
        match request:
            case ops.Send(to, value, tag, stamp):
                flat = value.flat if isinstance(value, Gradient) else value.view(-1)
                self.sends.append((process.key, tag, rank, to, flat, stamp, ticket or process, now, _seal(flat)))
            case ops.Recv(source, like, tag, stamped):
                self.receives.append((process.key, tag, source, rank, like, stamped, ticket or process, now))
            case (
                ops.AllReduce(_, None)
                | ops.ReduceScatter(_, None)
                | ops.AllGather(_, None)
                | ops.Broadcast()
                | ops.Barrier()
            ):
                process.num_native += 1
                arrived = self.joins[type(request), process.key, process.num_native]
                arrived[rank] = (process, request, now, _seal(getattr(request, "value", None)))
            case _:
                raise TypeError(f"{request} is not a request")

    def _deliver(self) -> None:
        """Deliver each message whose receive is posted, and end each collective that all ranks have reached."""
        for sent in list(self.sends):
            key, tag, source, to, flat, stamp, sender, now, seal = sent
            for wanted in self.receives:
                if wanted[0] == key and wanted[1] == tag and wanted[3] == to and wanted[2] in (source, ops.ANY):
                    self.sends.remove(sent)
                    self.receives.remove(wanted)
                    self._check_seal(source, flat, seal)
                    assert wanted[4].numel() == flat.numel(), "the receiver expects a message of another size"
                    assert wanted[5] == (stamp is not None), (
                        "the receiver expects a message with a stamp, or one without"
                    )
                    at = max(now, wanted[7]) + self.costs.message
                    self._arrive(wanted[6], Message(source, flat.clone(), stamp or 0), at)
                    self._arrive(sender, None, at)
                    break
        for key, arrived in list(self.joins.items()):
            if len(arrived) == len(self.ranks):
                del self.joins[key]
                at = max(now for _, _, now, _ in arrived.values()) + self.costs.collective
                for rank, (_, request, _, seal) in arrived.items():
                    self._check_seal(rank, getattr(request, "value", None), seal)
                try:
                    _combine([arrived[rank][1] for rank in range(len(self.ranks))])
                except Exception as error:  # noqa: BLE001 - raised where each rank waits
                    for process, *_ in arrived.values():
                        self._refuse(process, error, at)
                else:
                    for process, request, *_ in arrived.values():
                        self._arrive(process, getattr(request, "value", None), at)

    def _check_seal(self, rank: int, value: Any, seal: int) -> None:
        step = len(self.ranks[rank].ends)
        assert _seal(value) == seal, f"rank {rank} in step {step} wrote a value while it was sent or summed"

    def _arrive(self, receiver: Process | Ticket, answer: Any, at: float) -> None:
        if isinstance(receiver, Ticket):
            self._finish(receiver, answer, at)
        else:
            receiver.now = max(receiver.now, at)
            receiver.blocked = False
            receiver.ready = True
            receiver.answer = answer


def _seal(value: Any) -> int:
    """Return a checksum of a gradient or tensor; 0 for None."""
    if value is None:
        return 0
    flat = value.flat if isinstance(value, Gradient) else value.view(-1)
    return hash(flat.view(torch.uint8).numpy().tobytes())


def _combine(requests: list[Any]) -> None:
    """Compute a collective in place: `requests` are in rank order."""
    if isinstance(requests[0], ops.Barrier):
        return
    flats = [
        request.value.flat if isinstance(request.value, Gradient) else request.value.view(-1) for request in requests
    ]
    bounds = block_bounds(flats[0].numel(), len(flats))
    blocks = [slice(bounds[rank], bounds[rank + 1]) for rank in range(len(flats))]
    match requests[0]:
        case ops.Broadcast(_, root):
            whole = flats[root].clone()
        case ops.AllGather():
            whole = torch.cat([flat[block] for flat, block in zip(flats, blocks, strict=True)])
        case _:
            whole = torch.stack(flats).sum(0)
    for flat, block in zip(flats, blocks, strict=True):
        if isinstance(requests[0], ops.ReduceScatter):
            flat.fill_(torch.nan)
            flat[block] = whole[block]
        else:
            flat.copy_(whole)
