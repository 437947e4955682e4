"""The contract between an algorithm and the runtime that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, final

from torch import Tensor

from workbench.gradients import Layout
from workbench.ops import AllGather, AllReduce, Backward, Program, ReduceScatter, Request, Start, State, Ticket


@final
@dataclass(slots=True)
class Context:
    """What a program is given when it begins.

    Attributes:
        rank, num_workers: plain numbers; arithmetic takes them, nothing else of the cluster is visible. `num_workers`
            counts all ranks, servers too.
        first_step: where to begin (more than 0 when resumed).
        num_steps: where to end; None while the caller continues (`Trainer`).
        resumed: the state of the last `EndStep`, its tickets completed; None at a fresh start.
        layout: how gradients are laid out: what a receiver must know. None in a test that needs none.
        seed: of the run, for random choices by (seed, stream, rank, step).
        memory: tensors by name that live as long as the run and are kept with its checkpoint: what error feedback
            leaves over, a low-rank factor to start from. Every sub-program of one lane sees the same one; see `on_lane`.
        link: what the network costs, as measured or simulated; None where that is not required (`Algorithm.requires`).
        stopping: the run was asked to stop: a server ends it for all at one version.
        may_shrink: whether the others continue as fewer when a rank's process ends; then a program may set `unused`.
        unused: a step that is finished -> gradients of this rank that are in none of the sums up to it. The next program of this
            rank is given them as `resumed` where a rank has left.
    """

    rank: int
    num_workers: int
    first_step: int = 0
    num_steps: int | None = None
    resumed: Any = None
    layout: Layout | None = None
    seed: int = 0
    memory: MutableMapping[str, Tensor] = field(default_factory=dict)
    link: Any = None
    stopping: bool = False
    may_shrink: bool = False
    unused: Callable[[int], tuple[Any, ...]] | None = None

    def on_lane(self, lane: int) -> Context:
        """The context of a sum on that lane, with a memory of its own; lane 0 has the plain one.

        Two sums of one bucket that are in flight at once must not share what they remember: which of them reads it first is chance.
        """
        return self if lane == 0 else replace(self, memory=LaneMemory(self.memory, lane))

    def steps(self) -> Iterator[int]:
        """The steps to take; reads `num_steps` each time, so that a caller can end the loop."""
        step = self.first_step
        while self.num_steps is None or step < self.num_steps:
            yield step
            step += 1

    def is_last(self, step: int) -> bool:
        """Whether no step comes after this one."""
        return self.num_steps is not None and step + 1 >= self.num_steps


LANE_PREFIX = "lane-"  # of the names in a lane's memory: "lane-1/once.residual/bucket-0"


@final
class LaneMemory(MutableMapping[str, Tensor]):
    """The part of a run's memory that is one lane's.

    >>> whole = {}
    >>> LaneMemory(whole, 1)["count"] = 3
    >>> whole, dict(LaneMemory(whole, 1)), dict(LaneMemory(whole, 2))
    ({'lane-1/count': 3}, {'count': 3}, {})
    """

    def __init__(self, whole: MutableMapping[str, Tensor], lane: int) -> None:
        self._whole = whole
        self._prefix = f"{LANE_PREFIX}{lane}/"

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[self._prefix + name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._whole[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self._whole[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        own = [name for name in list(self._whole) if name.startswith(self._prefix)]  # a copy: other lanes may add to it
        return (name.removeprefix(self._prefix) for name in own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Replicas(StrEnum):
    """When all ranks hold the same parameters."""

    EVERY_STEP = "every step"
    AT_END = "at the end"
    NEVER = "never"


class Elasticity(StrEnum):
    """How a run continues when a rank's process ends."""

    NONE = "none"  # not at all
    LOSES_WORKERS = "loses workers"  # without a rank for which nobody waits (`Algorithm.can_lose`)
    SHRINKS = "shrinks"  # as fewer ranks, from any step's end, where the run is asked to
    SHRINKS_ALWAYS = "shrinks always"  # the same unasked: nobody waits for all ranks, so that none of them need end the run

    @property
    def shrinks(self) -> bool:
        """Whether the others can continue with the replica of one of them, or with the mean where replicas differ between steps."""
        return self in (Elasticity.SHRINKS, Elasticity.SHRINKS_ALWAYS)

    @property
    def shrinks_unasked(self) -> bool:
        """Whether they do so without being asked."""
        return self == Elasticity.SHRINKS_ALWAYS


class Restart(StrEnum):
    """How a program that is closed at a step's end is begun again."""

    ANYWHERE = "anywhere"  # within a run too, with other settings or other ranks: it leaves nothing behind that runs on
    FROM_CHECKPOINT = "from a checkpoint"  # its run must be stopped first
    FROM_PARAMETERS = "from the parameters"  # the same, and chance decides what is in flight: neither kept nor replayed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a runtime prepares before a run.

    Attributes:
        num_lanes: on which sums are started.
        link: `ctx.link` must be measured.
    """

    num_lanes: int = 1
    link: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a table says of an algorithm: p ranks, n bytes of one gradient.

    Attributes:
        paper: keys of `papers/`, with the section or equation.
        staleness: in updates.
        bytes_per_step: that a rank sends, on average, with the defaults.
        memory: beyond the parameters and the optimizer's state.
        roles: which ranks compute and which serve.
    """

    paper: str
    staleness: str
    bytes_per_step: str
    memory: str
    roles: str = "p workers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(ABC):
    """A data-parallel training algorithm: settings as data, behaviour as one generator.

    Subclasses are frozen keyword-only dataclasses; what happens during a run lives in local variables of `worker`.
    """

    card: ClassVar[Card]

    @abstractmethod
    def worker(self, ctx: Context) -> Program:
        """The program of one rank."""

    @property
    def state_type(self) -> type[State] | None:
        """The class of its `EndStep.state`; None where that is a plain tuple."""
        return None

    @property
    def bucket_bytes(self) -> float | None:
        """How the gradient is cut (`gradients.build_layout`); None: not at all."""
        return None

    @property
    def applies_buckets(self) -> bool:
        """Whether `Apply` is given single buckets: then nothing may need the whole gradient (global clipping)."""
        return False

    @property
    def num_buckets(self) -> int | None:
        """Into how many buckets of about equal size the gradient is cut instead, as far as it has so many parameters."""
        return None

    @property
    def max_staleness(self) -> int | None:
        """Updates between the parameters a gradient was taken at and those it is applied to, at most; None: no bound."""
        return 0

    @property
    def replicas(self) -> Replicas:
        """When all ranks hold the same parameters."""
        return Replicas.EVERY_STEP

    @property
    def has_servers(self) -> bool:
        """Whether the parameters that are updated live on servers: `Apply(server_copy=True)`."""
        return False

    @property
    def asynchronous(self) -> bool:
        """Whether ranks are at steps of their own: they end a run rather than being stopped in it, and rank 0 evaluates for all."""
        return self.has_servers

    @property
    def symmetric(self) -> bool:
        """Whether all ranks ask for the same, whatever their rank, the time and the values, and of gradients for sums alone.

        Then a simulation can run one program for all (`runtimes.simulator.lockstep.lockstep`).
        """
        return False

    @property
    def restart(self) -> Restart:
        """How its program is begun again at a step's end."""
        return Restart.ANYWHERE

    @property
    def elasticity(self) -> Elasticity:
        """How a run continues when a rank's process ends."""
        in_step = self.symmetric and self.replicas == Replicas.EVERY_STEP
        return Elasticity.SHRINKS if in_step else Elasticity.NONE

    @property
    def requires(self) -> Requirements:
        """What a runtime prepares before the run."""
        return Requirements()

    def num_computing(self, num_ranks: int) -> int:
        """How many ranks, from rank 0 on, compute gradients."""
        return num_ranks

    def steps_per_update(self, num_gradients: int, num_workers: int) -> float:
        """How many steps of the run one update of a server completes, with so many workers' gradients (late ones count).

        The schedule of evaluations is counted in these. A step is a minibatch of each worker.
        """
        return num_gradients / num_workers

    def can_lose(self, rank: int, num_ranks: int) -> bool:
        """Return True if the others continue as they are when that rank's process ends. Rank 0 keeps the record: it is always needed."""
        return self.elasticity == Elasticity.LOSES_WORKERS and 0 < rank < self.num_computing(num_ranks)

    def check(self, num_ranks: int) -> None:  # noqa: B027 - most run on any number
        """Raise `ConfigError` unless the algorithm can run on so many ranks."""

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Bytes that a rank sends in each step; None where that depends on the step or on chance."""
        return None

    def settings(self) -> dict[str, Any]:
        """Field names and values, as recorded with a run."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def fields_of(state: State | tuple[Any, ...]) -> dict[str, Any]:
    """A state's fields by name; a plain tuple is one field without a name."""
    return {item.name: getattr(state, item.name) for item in fields(state)} if isinstance(state, State) else {"": state}


def leaves(state: State | tuple[Any, ...]) -> Iterator[Any]:
    """The tickets, gradients, tensors and numbers of a state.

    >>> list(leaves((1, 2)))
    [1, 2]
    """
    for value in fields_of(state).values():
        yield from value if isinstance(value, tuple) else (value,)


def map_leaves(state: State | tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The same state with each of its `leaves` changed."""
    changed = {name: tuple(map(change, value)) if isinstance(value, tuple) else change(value) for name, value in fields_of(state).items()}
    return replace(state, **changed) if isinstance(state, State) else changed[""]


def complete(state: State | tuple[Any, ...]) -> Any:
    """The state with each ticket replaced by a completed one that holds its value: what `ctx.resumed` is given."""
    return map_leaves(state, lambda item: Ticket.completed(item.value) if isinstance(item, Ticket) else item)


def defaults_of(algorithm: Algorithm) -> list[str]:
    """Names of the settings at their default, without the algorithm's own first one, which a reader wants to see anyway."""
    own = next((name for name in type(algorithm).__annotations__ if name != "card"), None)
    return [item.name for item in fields(algorithm) if item.name != own and getattr(algorithm, item.name) == item.default]


Sum = AllReduce | ReduceScatter | AllGather


def take_sum(ctx: Context, request: Sum) -> Request | Program:
    """What takes a sum: the request itself where it names no collective, else what the collective gives for it."""
    work: Request | Program = request
    while isinstance(work, Sum) and (collective := work.collective) is not None:
        match work:
            case AllReduce(value):
                work = collective.all_reduce(ctx, value)
            case ReduceScatter(value):
                work = collective.reduce_scatter(ctx, value)
            case AllGather(value):
                work = collective.all_gather(ctx, value)
    return work


def lower(ctx: Context, program: Program, take: Callable[[Context, Sum], Request | Program] = take_sum) -> Program:
    """The same program in simpler requests: each sum that names a collective is taken as `take` says.

    A runtime that is given only lowered programs needs to know no collectives. What the program starts is lowered too.
    """
    answer: Any = None
    with closing(program):
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            if type(request) in _LOWERED:
                answer = yield from perform(_lowered(ctx, request, take))
            else:
                answer = yield request


_LOWERED = frozenset({AllReduce, ReduceScatter, AllGather, Start, Backward})


def _lowered(ctx: Context, work: Request | Program, take: Callable[[Context, Sum], Request | Program]) -> Request | Program:
    """One request or sub-program, lowered."""
    match work:
        case AllReduce() | ReduceScatter() | AllGather():
            if work.collective is None:
                return work
            here = ctx.on_lane(work.lane) if isinstance(work, AllReduce) else ctx
            taken = take(here, work)
            return taken if isinstance(taken, Request) else lower(here, taken, take)
        case Start(inner):
            lowered = _lowered(ctx, inner, take)
            return work if lowered is inner else replace(work, work=lowered)
        case Backward(_, on_bucket, before_forward):
            if on_bucket is None and before_forward is None:
                return work
            return replace(
                work,
                on_bucket=None if on_bucket is None else lambda bucket: _lowered(ctx, on_bucket(bucket), take),
                before_forward=None if before_forward is None else lambda bucket: lower(ctx, before_forward(bucket), take),
            )
        case Request():
            return work
        case _:
            return lower(ctx, work, take)


def perform(work: Request | Program) -> Program:
    """Do a request or a sub-program in the foreground: `value = yield from perform(work)`."""
    if isinstance(work, Request):
        return (yield work)
    return (yield from work)
