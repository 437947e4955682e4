"""Every request of `workbench/ops.py` answered by its docstring, for all ranks in one process: an oracle beside the runtimes.

No library, no replica, no cost model: parameters are one vector, gradients a formula, the optimizer heavy-ball SGD. What the
runtimes do to be fast is done here to be strict: a send is a rendezvous, a consumed gradient turns into NaN, what is left of a
reduce-scatter but the own block too. Each program has a clock of its own, so `Now` and the order of events can be foretold; the
programs may also be run in an order drawn at random (`shuffle`), which no law may depend on.
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


def numbered(parameters: Tensor) -> Tensor:
    """1, 2, 3, ... for coordinates 0, 1, 2, ...: a gradient of so many times a number tells them apart, and is done in the head."""
    return torch.arange(1.0, len(parameters) + 1, dtype=parameters.dtype)


def common_factor(parameters: Tensor) -> float:
    """Of parameters that have moved from 0 by gradients of `numbered`: the number that coordinate k holds k + 1 times."""
    factors = parameters / numbered(parameters)
    assert torch.allclose(factors, factors[0].expand_as(factors), rtol=1e-12, atol=1e-14), (
        f"coordinates are not 1, 2, 3, ... times one number: {parameters.tolist()}"
    )
    return float(factors[0])


@final
@dataclass
class Costs:
    """Seconds of a request on the virtual clock; of `backward` also by (rank, step)."""

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
    parameters: Tensor  # behind it
    weight: float  # minibatches in it over the number of ranks
    local: bool = False
    of: tuple[tuple[int, int], ...] = ()


@final
@dataclass
class Rank:
    """What one rank holds."""

    parameters: Tensor  # (n,) in order of registration
    velocity: Tensor
    layout: Layout
    updates: list[int]
    backwards: list[tuple[int, Tensor]] = field(default_factory=list)  # (step, parameters it was taken at)
    applied: list[Applied] = field(default_factory=list)
    ends: list[ops.EndStep] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)  # parameters at each EndStep
    out: set[int] = field(default_factory=set)  # gradients not yet consumed, by id
    discarded: int = 0
    alive: list[Any] = field(default_factory=list)

    def offsets(self, bucket: int | None) -> Tensor:
        """Positions in `parameters` of a bucket's parameters, in the order in which its slots are listed."""
        starts, begin = {}, 0
        for slot in self.layout.slots:
            starts[slot.index], begin = begin, begin + slot.numel
        pieces = self.layout.buckets if bucket is None else [self.layout.buckets[bucket]]
        return torch.cat([torch.arange(starts[slot.index], starts[slot.index] + slot.numel) for piece in pieces for slot in piece.slots])


@final
class Thread:
    """A program with its clock."""

    def __init__(self, rank: int, program: Program, key: int, now: float, ticket: Ticket | None) -> None:
        self.rank, self.program, self.key, self.now, self.ticket = rank, program, key, now, ticket
        self.request: Request | None = None
        self.answer: Any = None
        self.ready = True  # to be given its answer
        self.blocked = False  # until a message or the other ranks have come
        self.num_native = 0


@final
class Driver:
    """`algorithm` on `num_ranks` ranks; after `run`, `ranks` holds what happened.

    Args:
        sizes: of the parameters; the first one is used first in forward and is ready last in backward.
        gradient: the formula.
        start: the parameters to begin with; a tensor has one number for each coordinate.
        stop_after: every rank is closed at its first `EndStep` from this step on; `states` then resume another driver.
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
        layout = build_layout(module.named_parameters(), algorithm.bucket_bytes, algorithm.num_buckets)
        self.algorithm, self.gradient, self.lr, self.momentum, self.seed = algorithm, gradient, lr, momentum, seed
        self.costs = costs or Costs()
        self.random = None if shuffle is None else random.Random(shuffle)
        numel = layout.parameter_numel
        self.ranks = [
            Rank(
                torch.zeros(numel, dtype=torch.float64) + start, torch.zeros(numel, dtype=torch.float64), layout, [0] * len(layout.buckets)
            )
            for _ in range(num_ranks)
        ]
        self.threads: list[Thread] = []
        self.lanes: dict[tuple[int, int], deque[Thread]] = defaultdict(deque)
        self.num_started = [0] * num_ranks
        self.sends: list[tuple[Any, ...]] = []  # (key, tag, from, to, value, stamp, ticket or thread, now)
        self.receives: list[tuple[Any, ...]] = []
        self.joins: dict[Any, dict[int, tuple[Any, Any, float]]] = defaultdict(dict)
        self.stop_after: int | None = None
        self.states: list[State | tuple[Any, ...]] = [()] * num_ranks

    # -- running -----------------------------------------------------------------------------------------------

    def run(
        self, num_steps: int, *, first_step: int = 0, resumed: list[State | tuple[Any, ...]] | None = None, stop_after: int | None = None
    ) -> Driver:
        """To the end of every program, or until all were closed; raises AssertionError if nobody can move."""
        self.stop_after = stop_after
        for rank, state in enumerate(self.ranks):
            ctx = Context(rank, len(self.ranks), first_step=first_step, num_steps=num_steps, layout=state.layout, seed=self.seed)
            ctx.resumed = None if resumed is None else complete(resumed[rank])
            self.threads.append(Thread(rank, lower(ctx, self.algorithm.worker(ctx)), 0, 0.0, None))
        while self.threads:
            for thread in list(self.threads):
                if not thread.ready and not thread.blocked:
                    self._try(thread)
            self._deliver()
            able = [thread for thread in self.threads if thread.ready]
            if able:
                self._resume(min(able, key=lambda thread: thread.now) if self.random is None else self.random.choice(able))
            elif self.threads and any(thread.ticket is None for thread in self.threads):
                raise AssertionError("nobody can move: " + "; ".join(f"rank {thread.rank}: {thread.request}" for thread in self.threads))
            elif self.threads:
                assert self.stop_after is not None, "background work outlived its program"
                break  # it belongs to programs that were closed
        return self

    def _resume(self, thread: Thread) -> None:
        thread.ready, answer, thread.answer = False, thread.answer, None
        try:
            thread.request = thread.program.send(answer)
        except StopIteration as stop:
            self.threads.remove(thread)
            if thread.ticket is not None:
                self._finish(thread.ticket, stop.value, thread.now)

    def _finish(self, ticket: Ticket, value: Any, now: float) -> None:
        ticket.done, ticket.value, ticket.runtime = True, value, now
        for lane in self.lanes.values():
            if lane and lane[0].ticket is ticket:
                lane.popleft()
                if lane:
                    lane[0].now = max(lane[0].now, now)
                    self.threads.append(lane[0])

    def _try(self, thread: Thread) -> None:
        """Answer the thread's request, if that can be done now: it goes on when its clock's turn comes."""
        request, here, costs = thread.request, self.ranks[thread.rank], self.costs
        answer: Any = None
        match request:
            case ops.Backward() if request.on_bucket is None and request.before_forward is None:
                thread.now += costs.backward(thread.rank, request.step)
                answer = self._backward(here, thread.rank, request.step)
            case ops.Backward():
                thread.program = _chained(self._by_bucket(here, request), thread.program)
            case ops.Start(work):
                answer = self._start(thread, request, work)
            case ops.Wait(ticket):
                if not ticket.done:
                    return
                thread.now, answer = max(thread.now, ticket.runtime or 0.0), ticket.value
            case ops.WaitAny(tickets):
                found = [position for position, ticket in enumerate(tickets) if ticket.done]
                if not found:
                    return
                thread.now, answer = max(thread.now, tickets[found[0]].runtime or 0.0), (found[0], tickets[found[0]].value)
            case ops.Apply(gradient):
                thread.now += costs.apply
                self._apply(here, request, gradient)
            case ops.Discard(gradient):
                assert not gradient.flat.isnan().any(), "discarded what was consumed"
                here.out.discard(id(gradient.flat))
                here.discarded += 1
                gradient.flat.fill_(torch.nan)
            case ops.ReadParameters():
                answer = here.parameters.clone()
            case ops.WriteParameters(value):
                here.parameters.copy_(value)
            case ops.PackParameters(bucket):
                answer = replace(self._pack(here, bucket), step=request.step)
            case ops.UnpackParameters(value):
                for piece, _ in value.slices():
                    weight = value.tail(piece.index)[WEIGHT]
                    here.parameters[here.offsets(piece.index)] = torch.cat([value.view(slot).reshape(-1) for slot in piece.slots]) / weight
            case ops.Local(_, _, action):
                answer = action()
            case ops.Now():
                answer = thread.now
            case ops.EndStep(step, state):
                here.ends.append(request)
                here.seen.append(here.parameters.clone())
                self.states[thread.rank] = state
                if self.stop_after is not None and step >= self.stop_after:
                    thread.program.close()
                    self.threads.remove(thread)
                    return
            case _:
                thread.blocked = True
                self._communicate(thread, request, None)
                return
        thread.ready, thread.answer = True, answer

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
        here.alive.append(gradient.flat)  # so that an id stays one buffer's
        return gradient

    def _by_bucket(self, here: Rank, request: ops.Backward) -> Program:
        """The buckets' parameters in forward order, the gradient, its buckets in backward order."""
        num_buckets = len(here.layout.buckets)
        if request.before_forward is not None:
            for bucket in reversed(range(num_buckets)):
                yield from request.before_forward(bucket)
        gradient = yield ops.Backward(request.step)
        if request.on_bucket is None:
            return gradient
        tickets = []
        for bucket in range(num_buckets):
            work = request.on_bucket(gradient.part(bucket))
            tickets.append((yield work if isinstance(work, ops.Start) else ops.Start(work)))
        return tuple(tickets)

    def _apply(self, here: Rank, request: ops.Apply, gradient: Gradient) -> None:
        assert not gradient.flat.isnan().any(), "applied what was consumed, or is not there yet"
        owner = gradient if gradient.owner is None else gradient.owner
        staleness = max(here.updates[piece.index] for piece, _ in gradient.slices()) - gradient.version
        for piece, _ in gradient.slices():
            weight = float(gradient.tail(piece.index)[WEIGHT])
            where = here.offsets(piece.index)
            mean = torch.cat([gradient.view(slot).reshape(-1) for slot in piece.slots]) / weight
            here.velocity[where] = self.momentum * here.velocity[where] + mean
            here.parameters[where] -= self.lr * request.lr_scale * here.velocity[where]
            here.updates[piece.index] += 1
        gradient.flat.fill_(torch.nan)
        if owner.flat.isnan().all():
            here.out.discard(id(owner.flat))
        here.applied.append(
            Applied(
                gradient.step,
                gradient.version,
                staleness,
                gradient.bucket,
                here.parameters.clone(),
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

    def _start(self, thread: Thread, request: ops.Start, work: Request | Program) -> Ticket:
        if isinstance(work, ops.Send | ops.Recv):  # has no number: ranks may start different ones
            ticket = Ticket(-1, work)
            self._communicate(Thread(thread.rank, iter(()), thread.key, thread.now, ticket), work, ticket)  # type: ignore[arg-type]
            return ticket
        self.num_started[thread.rank] += 1
        ticket = Ticket(self.num_started[thread.rank], work)
        program = perform(work) if isinstance(work, Request) else work
        child = Thread(thread.rank, program, thread.key if request.shares_tags else ticket.key, thread.now, ticket)
        lane = request.lane if request.lane != ops.FREE else -ticket.key - 1
        self.lanes[thread.rank, lane].append(child)
        if len(self.lanes[thread.rank, lane]) == 1:
            self.threads.append(child)
        return ticket

    def _communicate(self, thread: Thread, request: Request | None, ticket: Ticket | None) -> None:
        rank, now = thread.rank, thread.now
        match request:
            case ops.Send(to, value, tag, stamp):
                flat = value.flat if isinstance(value, Gradient) else value.view(-1)
                self.sends.append((thread.key, tag, rank, to, flat, stamp, ticket or thread, now))
            case ops.Recv(source, like, tag, stamped):
                self.receives.append((thread.key, tag, source, rank, like, stamped, ticket or thread, now))
            case ops.AllReduce(_, None) | ops.ReduceScatter(_, None) | ops.AllGather(_, None) | ops.Broadcast() | ops.Barrier():
                thread.num_native += 1
                arrived = self.joins[type(request), thread.key, thread.num_native]
                arrived[rank] = (thread, request, now)
            case _:
                raise TypeError(f"{request} is not a request")

    def _deliver(self) -> None:
        """Messages that are both sent and wanted, and collectives that all ranks have come to."""
        for sent in list(self.sends):
            key, tag, source, to, flat, stamp, sender, now = sent
            for wanted in self.receives:
                if wanted[0] == key and wanted[1] == tag and wanted[3] == to and wanted[2] in (source, ops.ANY):
                    self.sends.remove(sent)
                    self.receives.remove(wanted)
                    assert wanted[4].numel() == flat.numel() and wanted[5] == (stamp is not None), "not what was expected"
                    at = max(now, wanted[7]) + self.costs.message
                    self._arrive(wanted[6], Message(source, flat.clone(), stamp or 0), at)
                    self._arrive(sender, None, at)
                    break
        for key, arrived in list(self.joins.items()):
            if len(arrived) == len(self.ranks):
                del self.joins[key]
                at = max(now for _, _, now in arrived.values()) + self.costs.collective
                _combine([arrived[rank][1] for rank in range(len(self.ranks))])
                for thread, request, _ in arrived.values():
                    self._arrive(thread, getattr(request, "value", None), at)

    def _arrive(self, who: Thread | Ticket, answer: Any, at: float) -> None:
        if isinstance(who, Ticket):
            self._finish(who, answer, at)
        else:
            who.now, who.blocked, who.ready, who.answer = max(who.now, at), False, True, answer


def _chained(first: Program, then: Program) -> Program:
    """`first` to its end; what it returns is the answer that `then`, which has begun, is waiting for."""
    answer = yield from first
    while True:
        try:
            request = then.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield request


def _combine(requests: list[Any]) -> None:
    """In place, in rank order."""
    if isinstance(requests[0], ops.Barrier):
        return
    flats = [request.value.flat if isinstance(request.value, Gradient) else request.value.view(-1) for request in requests]
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
