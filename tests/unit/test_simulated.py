"""The simulator: its message in a deadlock, equal results of equal runs, and cached schedules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

import workbench as wb
from tests.laws import tiny
from tests.laws.variants import name_of, representatives, runs_on
from workbench.codecs import Truncate16
from workbench.collectives import Collective, HalvingDoubling, Hierarchical, Linear, Ring, Tree
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.costs import Compute, Lognormal, Network
from workbench.errors import ConfigError, Diverged, Stalled
from workbench.gradients import Gradient
from workbench.ops import (
    AllReduce,
    Apply,
    Backward,
    EndStep,
    Message,
    PeerLeft,
    Program,
    Recv,
    Request,
    Send,
    Start,
    Value,
    Wait,
)
from workbench.program import Algorithm, Card, Context, Requirements, perform
from workbench.runtimes.simulator.comm_schedule import (
    SEND,
    WAIT,
    CommSchedule,
    InstructionTable,
    ScheduleCache,
    record_schedule,
)
from workbench.runtimes.simulator.simulate import run_simulation
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

NETWORK = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-8)
COMPUTE = Compute(forward_s=0.01, backward_s=0.02, stragglers=(Lognormal(sigma=0.5),))
CARD = Card(paper="none", staleness="0", bytes_per_step="0", memory="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Algorithm):
    """Every rank but the last first makes a request that no rank answers."""

    first: Callable[[Context, Value], Any]
    card: ClassVar[Card] = CARD

    def worker(self, ctx: Context) -> Program:
        gradient = yield Backward(0)
        if ctx.rank + 1 < ctx.num_workers:
            yield from perform(self.first(ctx, gradient))
        yield Apply(gradient)
        yield EndStep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsInForward(Algorithm):
    """A forward that waits for a message that no rank sends."""

    card: ClassVar[Card] = CARD

    def worker(self, ctx: Context) -> Program:
        yield Backward(0, before_forward=lambda bucket: perform(Recv(1 - ctx.rank, like=torch.empty(1, device="meta"))))


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRing(Collective):
    """Sends to the right, and waits for a message that the left one does not send."""

    @property
    def fixed_schedule(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        assert isinstance(value, Gradient)
        ticket = yield Start(Recv((ctx.rank - 1) % ctx.num_workers, like=value.flat, tag=7))
        yield Wait(ticket)
        return value

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsForServers(CollectiveAlgorithm):
    """Its parameters live on servers, and its workers sum by a collective."""

    collective: Collective = Ring()
    card: ClassVar[Card] = CARD

    @property
    def requires(self) -> Requirements:
        return Requirements(servers=True)

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            gradient = yield Backward(step)
            total = yield AllReduce(gradient, self.collective)
            yield Apply(total)
            yield EndStep(step)


def simulate(algorithm: Algorithm, workers: int = 3, **how: Any) -> Any:
    settings = Settings(
        steps=how.pop("steps", 3), batch_size=2, seed=how.pop("seed", 0), trace_steps=how.pop("trace_steps", None)
    )
    how = {"timing_only": True, "network": NETWORK, "compute": COMPUTE, **how}
    return run_simulation(algorithm, how.pop("problem", tiny.problem()), settings, workers, **how)


@pytest.mark.parametrize("timing_only", [False, True])
def test_who_cannot_move_is_named_with_what_it_waits_for(timing_only: bool) -> None:
    with pytest.raises(Stalled, match=r"rank 0: Recv\(source=2.*rank 1: Recv\(source=0"):
        simulate(Waits(first=lambda ctx, value: Recv((ctx.rank - 1) % 3, like=value.flat)), timing_only=timing_only)
    with pytest.raises(Stalled, match=r"rank 0: Send\(to=1"):
        simulate(Waits(first=lambda ctx, value: Send(ctx.rank + 1, value)), timing_only=timing_only)


def test_of_very_many_who_wait_the_others_are_counted() -> None:
    with pytest.raises(Stalled, match=r"rank 63: Recv.*; and 35 more$"):
        simulate(Waits(first=lambda ctx, value: Recv((ctx.rank - 1) % 100, like=value.flat)), 100)


def test_what_a_forward_waits_for_is_named_too() -> None:
    with pytest.raises(Stalled, match=r"rank 0: Backward.*rank 0: Recv\(source=1"):
        simulate(WaitsInForward(), 2)


def test_so_is_what_a_collective_of_a_fixed_schedule_waits_for() -> None:
    with pytest.raises(
        Stalled, match=r"rank 0: Recv from rank 2 \(tag 7, \d+ bytes\); rank 1: Recv from rank 0 \(tag 7"
    ):
        simulate(Waits(first=lambda ctx, value: AllReduce(value, HalfRing())))


def test_workers_of_servers_may_sum_by_a_collective() -> None:
    assert len(simulate(SumsForServers()).metrics[0]) == 3


@pytest.mark.parametrize("algorithm", representatives(), ids=name_of)
def test_nobody_changes_a_request(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_once(self: object, name: str, value: object) -> None:
        assert not hasattr(self, name), f"{name} of {self} is changed"
        object.__setattr__(self, name, value)

    for kind in (*Request.__subclasses__(), Message, PeerLeft):
        monkeypatch.setattr(kind, "__setattr__", set_once)
    simulate(algorithm, timing_only=False, detail="messages")


def test_a_simulation_is_a_pure_function_of_its_inputs() -> None:
    for algorithm in (wb.PipeSGD(width=2, collective=Ring()), wb.AsyncSGD(), wb.SynchronousSGD()):
        first, second, other = (simulate(algorithm, 4, seed=seed) for seed in (0, 0, 1))
        assert first.spans.table.tolist() == second.spans.table.tolist() and first.metrics == second.metrics
        assert first.info["result"]["seconds"] != other.info["result"]["seconds"]


def test_messages_that_wait_for_a_link_are_looked_at_once_a_moment() -> None:
    """Every message that found its link busy had set off looks of its own for as long as any waited: 63,812 events here."""
    slow, settings = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e4), Settings(steps=2, batch_size=2)
    algorithm = wb.LayerwiseSGD(bucket_bytes=0, order="priority", collective=Ring())
    simulation = Simulation(algorithm, tiny.problem(), settings, 6, network=slow, compute=COMPUTE, timing_only=True)
    simulation.run()
    assert simulation.clock.num_events < 4 * simulation.fabric.num_messages


def test_how_closely_to_look_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="auto, messages, formula"):
        simulate(wb.SynchronousSGD(), detail="closely")
    for workers in (0, True, 2.0):
        for algorithm in (wb.SynchronousSGD(), wb.AsyncSGD()):
            with pytest.raises(ConfigError, match="at least 1"):
                simulate(algorithm, workers=workers)


def test_who_diverges_is_named() -> None:
    """One program stands for all, and still says whose loss it was."""
    x, y = tiny.data(24)
    x[14] = float("inf")
    for detail in ("auto", "messages"):
        with pytest.raises(Diverged, match=r"the loss of rank [012] is (nan|inf) at step \d") as found:
            simulate(
                wb.SynchronousSGD(),
                problem=tiny.problem(train=(x, y), test=None),
                detail=detail,
                timing_only=False,
                steps=8,
            )
        if detail == "auto":
            named = str(found.value)
    assert str(found.value) == named


@pytest.mark.parametrize(
    "collective", [Ring(), Ring(chunks=3), Tree(), Linear(), HalvingDoubling(), Hierarchical(group=2)], ids=repr
)
def test_a_cached_schedule_is_what_is_asked(collective: Any) -> None:
    """The schedule of each rank sends what the collective says it sends, and ranks have instructions in common."""
    p, numel = 6, 60
    table = InstructionTable()
    packed: set[int] = set()
    for rank in range(p):
        cache, ctx = ScheduleCache(rank, p, table, NETWORK.local_s), Context(rank, p)
        value = torch.empty(numel, device="meta")
        taken: Any = cache.take(ctx, AllReduce(value, collective))
        schedule = taken.collective
        assert isinstance(taken, AllReduce) and taken.value is value and isinstance(schedule, CommSchedule)
        assert sum(size for op, _, _, _, size in schedule if op == SEND) == collective.bytes_sent(rank, p, numel, 4)
        again: Any = cache.take(ctx, AllReduce(torch.empty(numel, device="meta"), collective))
        assert again.collective is schedule
        packed.add(id(schedule.numbers.obj))
    if collective == Ring():
        assert len(packed) == 1, "equal blocks: one schedule for all ranks"


@pytest.mark.parametrize("collective", [Ring(codec=Truncate16()), Tree()], ids=repr)
def test_a_run_that_is_not_traced_takes_as_long(collective: Any) -> None:
    """Only requests that take no time are left out of a schedule then."""
    slow = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-4, encode_s_per_byte=2e-4)
    runs = [simulate(wb.PipeSGD(collective=collective), 4, network=slow, trace_steps=traced) for traced in (None, 0)]
    assert runs[0].metrics == runs[1].metrics and len(runs[0].spans.table) > len(runs[1].spans.table) == 0
    assert runs[0].info["result"] == runs[1].info["result"]


def test_what_depends_on_time_or_chance_has_no_fixed_schedule() -> None:
    from workbench.ops import ANY, Now, WaitAny

    def program(*requests: Any) -> Program:
        for request in requests:  # noqa: UP028 - a tuple takes no answers
            yield request

    like = torch.empty(4, device="meta")
    for request in (Now(), Recv(ANY, like=like), WaitAny(()), Send(1, like, stamp=3), Start(program())):
        assert record_schedule(program(Recv(1, like=like), request)) is None
    schedule = record_schedule(program(Recv(1, like=like)))
    assert schedule is not None and [op for op, *_ in schedule][-1] == WAIT


def test_a_simulation_is_gone_when_its_run_is_there() -> None:
    """It is a cycle, and a hundred predictions make a hundred."""
    before = [item for item in gc.get_objects() if type(item) is Simulation]  # of other tests
    run = wb.simulate(wb.AsyncSGD(), tiny.problem(), workers=2, steps=2, timing_only=True)
    assert run.steps()
    after = [item for item in gc.get_objects() if type(item) is Simulation]
    assert all(any(item is old for old in before) for item in after)


def test_a_run_gives_its_models_back() -> None:
    """A notebook that simulates a hundred settings needs the memory of one."""
    models: dict[str, list[weakref.ref[torch.nn.Module]]] = {}

    def model(name: str) -> torch.nn.Module:
        made = tiny.mlp()
        models[name].append(weakref.ref(made))
        return made

    for algorithm in representatives():
        models[name_of(algorithm)] = []
        workers = 1 if not runs_on(algorithm, 3) else 3
        problem = tiny.problem(partial(model, name_of(algorithm)))
        wb.simulate(algorithm, problem, workers=workers, steps=3, evaluate_every=1)
    gc.collect()  # once for all algorithms: it takes half a second after other tests
    assert len(models) == len(representatives()) and all(models.values())
    assert [name for name, made in models.items() if any(ref() is not None for ref in made)] == []
