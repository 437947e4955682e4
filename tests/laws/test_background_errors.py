"""An error of background work is raised at `Wait`, on every runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, make_job, run_job, run_on_ranks
from workbench import ops
from workbench.errors import ConfigError, PeerFailed
from workbench.ops import FREE, Program, Start
from workbench.program import Algorithm, Card, Context, perform
from workbench.replica.backward import MicroBatch
from workbench.replica.replica import Replica
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.rank.main import Job
from workbench.runtimes.reference import ReferenceRuntime
from workbench.runtimes.simulator.simulate import run_simulation
from workbench.runtimes.simulator.simulation import Simulation
from workbench.runtimes.transport.base import Handle, SoloTransport
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import Settings
from workbench.trace.recorder import NullRecorder

Begin = Callable[[Context], Program]
how = partial(Settings, steps=2, batch_size=2, timeout_s=30)


class Broken(Exception):
    """An error of a test's background work."""


_log: list[str] = []  # what the programs of this process have done


def breaks() -> Program:
    yield ops.Barrier()
    raise Broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Algorithm):
    """Starts work that fails, ends a step, and then waits for the work."""

    lane: int = 0
    any_of: bool = False
    handles: bool = False
    card: ClassVar[Card] = Card(paper="none", staleness="0", bytes_per_step="0", memory="none")

    @property
    def symmetric(self) -> bool:
        return not self.any_of

    def worker(self, ctx: Context) -> Program:
        _log.clear()
        ticket = yield Start(breaks(), lane=self.lane)
        gradient = yield ops.Backward(0)
        yield ops.Discard(gradient)
        yield ops.EndStep(0)
        _log.append("step ended")
        try:
            yield ops.WaitAny((ticket,)) if self.any_of else ops.Wait(ticket)
        except Broken:
            _log.append("raised in the program")
            if not self.handles:
                raise
        gradient = yield ops.Backward(1)
        yield ops.Discard(gradient)
        yield ops.EndStep(1)
        _log.append("continued")


def simulated(algorithm: Algorithm) -> None:
    Simulation(algorithm, tiny.problem(test=None), how(), 1, network=NETWORK, compute=COMPUTE).run()


def one_program_for_all(algorithm: Algorithm) -> None:
    run_simulation(
        algorithm,
        tiny.problem(test=None),
        how(),
        2,
        network=NETWORK,
        compute=COMPUTE,
        timing_only=True,
        detail="formula",
    )


def reference(algorithm: Algorithm) -> None:
    ReferenceRuntime(algorithm, 1, lambda rank, step, parameters: parameters).run(2)


def alone(algorithm: Algorithm, progress: str) -> None:
    interpret(algorithm.worker, progress)


def with_trainer(algorithm: Algorithm) -> None:
    model = nn.Linear(2, 1)
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm) as trainer:
        for _ in range(2):
            trainer.step(lambda: model(torch.ones(3, 2)).mean())


ALONE: dict[str, Callable[[Algorithm], None]] = {
    "simulated": simulated,
    "one program for all": one_program_for_all,
    "reference": reference,
    **{f"alone, {progress}": partial(alone, progress=progress) for progress in ("auto", "thread", "tests", "blocking")},
    "Trainer": with_trainer,
}


@pytest.mark.parametrize("runtime", ALONE)
@pytest.mark.parametrize("lane", [0, FREE], ids=["lane", "free"])
@pytest.mark.parametrize("any_of", [False, True], ids=["Wait", "WaitAny"])
def test_it_is_raised_where_it_is_waited_for(runtime: str, lane: int, any_of: bool) -> None:
    if any_of and runtime == "one program for all":
        return  # which ticket is done first depends on time: no symmetric algorithm asks
    with pytest.raises(Broken) as raised:
        ALONE[runtime](Waits(lane=lane, any_of=any_of))
    assert _log == ["step ended", "raised in the program"]
    assert any(entry.name == "worker" for entry in raised.traceback), "it shows the line of the algorithm"


@pytest.mark.parametrize("runtime", sorted(set(ALONE) - {"Trainer"}))
@pytest.mark.parametrize("any_of", [False, True], ids=["Wait", "WaitAny"])
def test_a_program_may_handle_it_and_go_on(runtime: str, any_of: bool) -> None:
    if any_of and runtime == "one program for all":
        return
    ALONE[runtime](Waits(any_of=any_of, handles=True))
    assert _log == ["step ended", "raised in the program", "continued"]


@pytest.mark.parametrize("runtime", ["torch", pytest.param("mpi", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("lane", [0, FREE], ids=["lane", "free"])
def test_it_is_raised_where_it_is_waited_for_on_ranks(runtime: str, lane: int) -> None:
    job = make_job(runtime, 2, Waits(lane=lane), tiny.problem(test=None), how())
    found = run_on_ranks(on_a_rank, job, 2)
    own = [log for name, log in found if name == "Broken"]
    assert own and own == [["step ended", "raised in the program"]] * len(own)
    # A rank that learns of the other's error may leave before its own step ends.
    assert all(name in ("Broken", "PeerFailed") and "continued" not in log for name, log in found)


def on_a_rank(job: Job, num_ranks: int) -> tuple[str, list[str]] | None:
    """On a rank: the error, its own or the other's, and what was done before it."""
    try:
        summary = run_job(job, num_ranks)
    except (Broken, PeerFailed) as error:
        return type(error).__name__, list(_log)
    return ("none", list(_log)) if summary else None


# -- the library's own sums ------------------------------------------------------------------------------------


class BreaksInItsSum(SoloTransport):
    """A library whose sums fail."""

    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        raise Broken

    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        return Fails()


class Fails(Handle):
    """A sum that fails while it is in progress."""

    def __init__(self) -> None:
        self.started_s = 0.0

    def poll(self) -> bool:
        return True

    def wait(self, deadline: Deadline) -> None:
        raise Broken


def sums(_: Context) -> Program:
    _log.clear()
    ticket = yield Start(ops.AllReduce(torch.zeros(3)))
    yield ops.EndStep(0)
    _log.append("step ended")
    yield ops.Wait(ticket)
    _log.append("continued")


@pytest.mark.parametrize("progress", ["auto", "thread", "tests", "blocking", "library"])
def test_an_error_of_the_librarys_sum_is_raised_there_too(progress: str) -> None:
    with pytest.raises(Broken):
        interpret(sums, progress, BreaksInItsSum())
    assert _log == ["step ended"]


def interpret(begin: Begin, progress: str, transport: SoloTransport | None = None) -> None:
    model = nn.Linear(2, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    micro = MicroBatch(lambda: model(torch.ones(3, 2)).mean(), 0.5, 3)
    interpreter = Interpreter(
        transport or SoloTransport(), replica, NullRecorder(), lambda _: [micro], timeout_s=10.0, progress=progress
    )
    try:
        program = begin(Context(0, 1))
        while interpreter.advance(program) is not None:
            pass
    finally:
        interpreter.close()
        replica.close()


# -- what else a program may do --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs(Algorithm):
    """A test's program, on each rank."""

    begin: Begin
    alike: bool = False
    card: ClassVar[Card] = Card(paper="none", staleness="0", bytes_per_step="0", memory="none")

    @property
    def symmetric(self) -> bool:
        return self.alike

    def worker(self, ctx: Context) -> Program:
        yield from self.begin(ctx)


def simulate(begin: Begin, num_workers: int = 1) -> None:
    Simulation(Runs(begin=begin), tiny.problem(test=None), how(), num_workers, network=NETWORK, compute=COMPUTE).run()


def refer(begin: Begin, num_workers: int = 1) -> None:
    ReferenceRuntime(Runs(begin=begin), num_workers, lambda rank, step, parameters: parameters).run(2)


def run_one_program(begin: Begin) -> None:
    one_program_for_all(Runs(begin=begin, alike=True))


both = pytest.mark.parametrize("run", [simulate, refer])


def alone_on_a_rank(begin: Begin) -> None:
    interpret(begin, "auto")


@pytest.mark.parametrize("run", [simulate, refer, alone_on_a_rank])
@pytest.mark.parametrize("inside", [False, True], ids=["the program", "a sub-program"])
def test_an_error_of_a_request_is_raised_where_it_was_asked_for(run: Callable[..., None], inside: bool) -> None:
    """In a sub-program too, which may handle it; nobody else then sees it."""
    found: list[str] = []

    def asks() -> Program:
        try:
            yield ops.Local("sum", 0, fails)
        except Broken:
            found.append("raised")
        yield ops.Now()
        return 7

    def begin(_: Context) -> Program:
        if inside:
            ticket = yield Start(asks())
            found.append(str((yield ops.Wait(ticket))))
        else:
            found.append(str((yield from asks())))

    run(begin)
    assert found == ["raised", "7"]


def fails() -> None:
    raise Broken


@both
def test_an_error_that_no_program_waits_for_is_named(run: Callable[..., None]) -> None:
    """The other rank does not wait forever."""

    def begin(ctx: Context) -> Program:
        if ctx.rank == 0:
            yield Start(breaks_alone())
        else:
            yield ops.Recv(0, like=torch.zeros(1))

    with pytest.raises(Broken):
        run(begin, 2)


def breaks_alone() -> Program:
    yield ops.Now()
    raise Broken


@pytest.mark.parametrize("run", [simulate, refer, run_one_program])
def test_the_next_work_of_its_lane_begins(run: Callable[..., None]) -> None:
    found: list[Any] = []

    def begin(ctx: Context) -> Program:
        first = yield Start(breaks())
        second = yield Start(returns())
        yield ops.Barrier()
        found.append((yield ops.Wait(second)))
        yield ops.Wait(first)

    with pytest.raises(Broken):
        run(begin)
    assert found == [7]


def returns() -> Program:
    yield ops.Barrier()
    return 7


def test_a_message_of_another_size_is_an_error_of_its_receive() -> None:
    log: list[str] = []

    def begin(ctx: Context) -> Program:
        if ctx.rank == 0:
            yield ops.Send(1, torch.zeros(3))
            return
        ticket = yield Start(ops.Recv(0, like=torch.zeros(4)))
        gradient = yield ops.Backward(0)
        yield ops.Discard(gradient)
        log.append("computed")
        yield ops.Wait(ticket)

    with pytest.raises(ConfigError, match="expected 4 elements"):
        simulate(begin, 2)
    assert log == ["computed"]


@both
@pytest.mark.parametrize("inside", [False, True], ids=["the sum", "a sub-program"])
def test_a_sum_of_different_sizes_is_an_error_of_its_work(run: Callable[..., None], inside: bool) -> None:
    log: list[str] = []

    def begin(ctx: Context) -> Program:
        total = ops.AllReduce(torch.zeros(3 + ctx.rank))
        ticket = yield Start(perform(total) if inside else total)
        for _ in range(2):
            gradient = yield ops.Backward(0)
            yield ops.Discard(gradient)
        log.append("computed")
        yield ops.Wait(ticket)
        log.append("continued")

    with pytest.raises((ConfigError, RuntimeError), match=r"size|elements"):
        run(begin, 2)
    assert set(log) == {"computed"}


COLLECTIVES: list[Callable[[Tensor], ops.Request]] = [ops.AllReduce, ops.ReduceScatter, ops.AllGather, ops.Broadcast]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize(
    "values", [(torch.zeros(4), torch.zeros(5)), (torch.zeros(4), torch.zeros(4).long())], ids=["size", "dtype"]
)
def test_values_of_a_collective_have_one_size_and_one_type(
    kind: Callable[[Tensor], ops.Request], values: tuple[Tensor, Tensor]
) -> None:
    def begin(ctx: Context) -> Program:
        yield kind(values[ctx.rank])

    with pytest.raises(ConfigError, match=r"rank 0 has 4 elements of torch\.float32, rank 1 has"):
        simulate(begin, 2)
