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

LOOP_ENDED = -1  # `num_steps` when the caller takes no more steps


@final
@dataclass(slots=True)
class Context:
    """What a program knows about its run.

    Attributes:
        rank, num_workers: all that a program knows about the cluster. `num_workers` counts all ranks, servers too.
        first_step: the first step to take; more than 0 in a resumed run.
        num_steps: the step before which the program ends. None: the caller ends the loop (`Trainer`), with
            `LOOP_ENDED`.
        resumed: the state of the last `EndStep`, with its tickets completed; None at a fresh start. A program may
            replace it by a state that is also valid between two steps. When a rank has left, the runtime calls
            `State.unused` of the remaining ranks' states.
        layout: the layout of gradients, which a receiver must know. None in a test that needs none.
        seed: seed of the run, for random choices by (seed, stream, rank, step).
        memory: tensors by name that live as long as the run and are saved in its checkpoints, such as the residuals of
            error feedback and an algorithm's momentum. They outlive a program, and so a block of `SlowMo`. Names that
            begin with "own." are of values that differ between ranks; other ranks' departures and joins keep the rest
            equal. All sub-programs of one lane share one memory; see `on_lane`.
        link: the measured or simulated cost of the network; None if not required (`Algorithm.requires`).
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

    def on_lane(self, lane: int) -> Context:
        """Return the context of a sum on that lane, with a separate memory. Lane 0 has the run's memory itself.

        Two sums of one bucket may be in flight at once. They must not share a residual: the order in which they read
        it depends on timing.
        """
        return self if lane == 0 else replace(self, memory=LaneMemory(self.memory, lane))

    def steps(self) -> Iterator[int]:
        """The steps to take. Reads `num_steps` before each step, so that a caller can end the loop."""
        step = self.first_step
        while self.num_steps is None or step < self.num_steps:
            yield step
            step += 1

    @property
    def in_loop(self) -> bool:
        """Return True if the caller ends the loop, also when it has."""
        return self.num_steps in (None, LOOP_ENDED)

    def is_last(self, step: int) -> bool:
        """Return True if no step comes after this one."""
        return self.num_steps is not None and step + 1 >= self.num_steps


LANE_PREFIX = "lane-"  # of the names in a lane's memory: "lane-1/once.residual/bucket-0"


@final
class LaneMemory(MutableMapping[str, Tensor]):
    """One lane's part of a run's memory.

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
    """When all ranks hold equal replicas. A replica is the parameters and the optimizer's state."""

    EVERY_STEP = "every step"
    PARAMETERS = "parameters, every step"  # each rank's optimizer has seen other gradients, so its state is its own
    AT_END = "at the end"  # the parameters
    NEVER = "never"

    @property
    def equal_parameters(self) -> bool:
        """Return True if parameters are equal after every step."""
        return self in (Replicas.EVERY_STEP, Replicas.PARAMETERS)


class Update(StrEnum):
    """What the optimizer steps with: what a setting of the update, such as `clip_norm`, acts on."""

    MEAN = "the mean gradient"  # of the ranks in the sum
    OWN = "each rank's own gradient"  # or its estimate of the mean, which other ranks do not have
    SERVED = "the gradients of a server"  # in updates that no worker sees
    DIRECTION = "a direction"  # its length is no gradient's: a vote of signs, an adaptive sum


class Elasticity(StrEnum):
    """How a run continues when a rank's process ends."""

    NONE = "none"  # the run ends
    LOSES_WORKERS = "loses workers"  # without a rank that no other rank waits for (`can_lose`)
    SHRINKS = "shrinks"  # with fewer ranks, from any step's end, with `on_failure="shrink"`
    SHRINKS_ALWAYS = "shrinks always"  # the same with any `on_failure`, because no rank waits for all others

    @property
    def shrinks(self) -> bool:
        """Return True if the remaining ranks can continue: with one rank's replica, or the mean if replicas differ."""
        return self in (Elasticity.SHRINKS, Elasticity.SHRINKS_ALWAYS)

    @property
    def shrinks_unasked(self) -> bool:
        """Return True if the remaining ranks continue so with any `on_failure`."""
        return self == Elasticity.SHRINKS_ALWAYS


class Restart(StrEnum):
    """How a program that is closed at a step's end can start again."""

    ANYWHERE = "anywhere"  # also within a run, with other settings or ranks: it leaves no background work
    FROM_CHECKPOINT = "from a checkpoint"  # its run must be stopped first
    FROM_PARAMETERS = "from the parameters"  # the same, and work in flight is not saved: it depends on timing


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """How the gradient is cut into buckets (`gradients.build_layout`). The default is one bucket.

    Attributes:
        max_bytes: most bytes of a bucket. 0: each parameter is a bucket. None: no limit.
        count: number of buckets of about equal size, instead of `max_bytes`; one for each parameter if there are fewer.
        applied_singly: `Apply` takes single buckets. Then no setting may need the whole gradient, as `clip_norm` does.
    """

    max_bytes: float | None = None
    count: int | None = None
    applied_singly: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a runtime prepares before a run.

    Attributes:
        buckets: how the gradient is cut.
        state: the class of `EndStep.state`; None: steps have no state.
        servers: servers update the parameters, by `Apply(server_copy=True)`.
        num_lanes: number of lanes on which sums are started.
        link: `ctx.link` must be measured.
    """

    buckets: Buckets = Buckets()
    state: type[State] | None = None
    servers: bool = False
    num_lanes: int = 1
    link: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which ranks compute gradients, and which serve parameters. A rank can do both.

    >>> Roles(computing=range(3), serving=range(3, 4)).num_computing
    3
    """

    computing: range
    serving: range = range(0)

    @property
    def num_computing(self) -> int:
        """The number of ranks that compute gradients."""
        return len(self.computing)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An algorithm's row of the table in the docs, for p ranks and n bytes of one gradient.

    Attributes:
        paper: keys of `papers/`, with the section or equation.
        staleness: staleness in updates.
        bytes_per_step: bytes that a rank sends in a step, on average, with the default settings.
        memory: memory in addition to the parameters and the optimizer's state.
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

    Subclasses are frozen keyword-only dataclasses. The state of a run is in local variables of `worker`.
    """

    card: ClassVar[Card]

    @abstractmethod
    def worker(self, ctx: Context) -> Program:
        """The program of one rank."""

    @property
    def requires(self) -> Requirements:
        """What a runtime prepares before the run."""
        return Requirements()

    def roles(self, num_ranks: int) -> Roles:
        """Which ranks compute gradients, and which serve. The computing ranks start at 0."""
        return Roles(computing=range(num_ranks))

    @property
    def replicas(self) -> Replicas:
        """When all ranks hold equal replicas."""
        return Replicas.EVERY_STEP

    @property
    def update(self) -> Update:
        """What the optimizer steps with."""
        return Update.SERVED if self.requires.servers else Update.MEAN

    @property
    def max_staleness(self) -> int | None:
        """The most updates between the parameters of a gradient and those that it is applied to; None: no bound."""
        return 0

    @property
    def complete_after_step(self) -> bool:
        """Return True if the parameters after each step of a caller's loop are those that its end would leave."""
        return self.replicas.equal_parameters and self.max_staleness == 0 and not self.requires.servers

    @property
    def asynchronous(self) -> bool:
        """Return True if each rank counts its own steps.

        Then a rank stops by ending its program, and rank 0 evaluates for all ranks.
        """
        return self.requires.servers

    @property
    def depends_on_timing(self) -> bool:
        """Return True if the numbers depend on how long steps and messages take, not only on the data and the seed.

        Otherwise any timing gives the same numbers, and a resumed run is bit-identical. (Servers that sum in order of
        arrival may differ by rounding.)
        """
        return self.requires.servers or self.restart == Restart.FROM_PARAMETERS

    @property
    def symmetric(self) -> bool:
        """Return True if all ranks make the same requests, with any timing and values, and use only sums of gradients.

        Then a simulation can run one program for all ranks (`runtimes.simulator.lockstep.lockstep`).
        """
        return False

    @property
    def restart(self) -> Restart:
        """How its program can start again at a step's end."""
        return Restart.ANYWHERE

    @property
    def elasticity(self) -> Elasticity:
        """How a run continues when a rank's process ends."""
        in_step = self.symmetric and self.replicas == Replicas.EVERY_STEP
        return Elasticity.SHRINKS if in_step else Elasticity.NONE

    def check(self, num_ranks: int) -> None:  # noqa: B027 - most run on any number
        """Raise `ConfigError` unless the algorithm can run on that many ranks."""

    def pull(self, ctx: Context) -> Program:
        """Replace a worker's parameters by the present ones of the task that owns them, between two of its steps.

        An owner is a server, or a task next to the worker. Without one, the worker has its parameters itself.
        """
        yield from ()

    def conclude(self, ctx: Context) -> Program:
        """Do what a program does after its last step, while the program that has taken the steps pauses.

        All ranks have ended the same step. By default a second program begins, and ends without a step.

        Args:
            ctx: its `first_step` is its `num_steps`, and `resumed` a copy of the state of the last `EndStep`.
        """
        yield from self.worker(ctx)

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Bytes that a rank sends in each step; None if that depends on the step or on chance."""
        return None

    @property
    def period(self) -> int:
        """Number of steps from one communication to the next; 1 also if it is not known."""
        return 1

    def messages_per_step(self, num_ranks: int, num_buckets: float) -> float | None:
        """Messages that a rank sends itself in a step with communication, on average over ranks, roughly.

        The library's own sums are none. None: it is not known, and predictions count them in a short simulation.
        """
        return None

    @property
    def codec(self) -> Any:
        """The codec of its collective; None without one."""
        return None


def can_lose(algorithm: Algorithm, rank: int, num_ranks: int) -> bool:
    """Return True if the other ranks continue unchanged when that rank's process ends.

    It must be a worker that serves nothing. Rank 0 is always needed, because it keeps the record.
    """
    roles = algorithm.roles(num_ranks)
    spare = rank > 0 and rank in roles.computing and rank not in roles.serving
    return spare and algorithm.elasticity == Elasticity.LOSES_WORKERS


def clipping_refusal(algorithm: Algorithm) -> str | None:
    """Return why no rank can clip the gradient of an update, and the fix; None if it can."""
    name = type(algorithm).__name__
    match algorithm.update:
        case Update.SERVED:
            return (
                f"only a server of {name} has the mean gradient of an update: set the algorithm's own clip_norm if it "
                "has one"
            )
        case Update.DIRECTION:
            return (
                f"{name} steps with a direction, whose length is no gradient's, so clipping would shorten every step: "
                "leave it out, or clip each rank's own gradient with on_bad_gradient='clip' and max_grad_norm"
            )
        case _:
            return None


def shares_buffers(algorithm: Algorithm) -> bool:
    """Return True if all ranks begin each step with rank 0's buffers, as torch DDP does with `broadcast_buffers=True`.

    Replicas are equal after each step, and no rank begins a step before all have ended the one before. With other
    algorithms each rank has its own buffers.
    """
    in_step = algorithm.replicas.equal_parameters and not algorithm.asynchronous
    return in_step and algorithm.max_staleness == 0


def settings_of(algorithm: Algorithm) -> dict[str, Any]:
    """Names and values of an algorithm's settings."""
    return {item.name: getattr(algorithm, item.name) for item in fields(algorithm)}


def record_of(algorithm: Algorithm) -> dict[str, Any]:
    """Names and values of an algorithm's settings, fit for JSON."""
    return {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in settings_of(algorithm).items()
    }


def fields_of(state: State | None) -> dict[str, Any]:
    """A state's fields by name; an empty dictionary for None."""
    return {} if state is None else {item.name: getattr(state, item.name) for item in fields(state)}


def leaves(state: State | None) -> Iterator[Any]:
    """The tickets, gradients, tensors and numbers of a state."""
    for value in fields_of(state).values():
        yield from value if isinstance(value, tuple) else (value,)


def map_leaves(state: State | None, change: Callable[[Any], Any]) -> State | None:
    """A copy of the state with `change` applied to each of its `leaves`."""
    changed = {
        name: tuple(map(change, value)) if isinstance(value, tuple) else change(value)
        for name, value in fields_of(state).items()
    }
    return None if state is None else replace(state, **changed)


def complete(state: State | None) -> State | None:
    """A copy of the state for `ctx.resumed`: each ticket is replaced by a completed one with its value."""
    return map_leaves(state, lambda item: Ticket.completed(item.value) if isinstance(item, Ticket) else item)


def defaults_of(algorithm: Algorithm) -> list[str]:
    """Names of the settings with their default value.

    The algorithm's own first setting is left out, because labels always show it.
    """
    own = next((name for name in type(algorithm).__annotations__ if name != "card"), None)
    return [
        item.name for item in fields(algorithm) if item.name != own and getattr(algorithm, item.name) == item.default
    ]


Sum = AllReduce | ReduceScatter | AllGather


def take_sum(ctx: Context, request: Sum) -> Request | Program:
    """Return what computes a sum: the request itself if it names no collective, else the collective's sub-program."""
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
    """The same program in simpler requests: each sum that names a collective is replaced by what `take` returns.

    A runtime of lowered programs need not know collectives. The programs that this one starts are lowered too.
    """
    return replace_requests(
        program, lambda request: _lowered(ctx, request, take) if type(request) in _LOWERED else request
    )


def replace_requests(program: Program, new: Callable[[Request], Request | Program]) -> Program:
    """The same program, with each request replaced by another one, or by a sub-program that answers it."""
    with closing(program):
        try:
            request = next(program)
            while True:
                try:
                    replaced = new(request)
                    answer = (yield replaced) if isinstance(replaced, Request) else (yield from replaced)
                except Exception as error:  # noqa: BLE001 - the program may handle it
                    request = program.throw(error)
                else:
                    request = program.send(answer)
        except StopIteration as stop:
            return stop.value


_LOWERED = frozenset({AllReduce, ReduceScatter, AllGather, Start, Backward})


def _lowered(
    ctx: Context, work: Request | Program, take: Callable[[Context, Sum], Request | Program]
) -> Request | Program:
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
                on_bucket=None if on_bucket is None else lambda bucket: _lowered_bucket(ctx, on_bucket(bucket), take),
                before_forward=None
                if before_forward is None
                else lambda bucket: lower(ctx, before_forward(bucket), take),
            )
        case Request():
            return work
        case _:
            return lower(ctx, work, take)


def _lowered_bucket(
    ctx: Context, work: Request | Program | None, take: Callable[[Context, Sum], Request | Program]
) -> Request | Program | None:
    return None if work is None else _lowered(ctx, work, take)


def perform(work: Request | Program) -> Program:
    """Do a request or a sub-program in the foreground: `value = yield from perform(work)`."""
    if isinstance(work, Request):
        return (yield work)
    return (yield from work)
