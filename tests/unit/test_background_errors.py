"""An error of background work is raised at `Wait`, on every runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.laws import tiny
from workbench import ops
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.ops import FREE, Program
from workbench.program import Algorithm, Card, Context
from workbench.replica.backward import Micro
from workbench.replica.replica import Replica
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.simulator.simulation import Simulation
from workbench.runtimes.transport.base import SoloTransport
from workbench.settings import Settings
from workbench.trace.recorder import NullRecorder

Begin = Callable[[list[str]], Program]


class Broken(Exception):
    """Of a test's background work."""


def breaks() -> Program:
    yield ops.Barrier()
    raise Broken


def waits(log: list[str], *, lane: int = 0, any_of: bool = False) -> Program:
    """Start what breaks, end a step meanwhile, and wait for it."""
    ticket = yield ops.Start(breaks(), lane=lane)
    gradient = yield ops.Backward(0)
    yield ops.Discard(gradient)
    yield ops.EndStep(0)
    log.append("step ended")
    yield ops.WaitAny((ticket,)) if any_of else ops.Wait(ticket)
    log.append("continued")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs(Algorithm):
    """A test's program, on each rank."""

    begin: Callable[[Context], Program]
    card: ClassVar[Card] = Card(paper="none", staleness="0", bytes_per_step="0", memory="none")

    def worker(self, ctx: Context) -> Program:
        yield from self.begin(ctx)


def simulate(begin: Callable[[Context], Program], num_workers: int = 1) -> None:
    network, compute = Network(latency_s=0.1, bandwidth_bytes_per_s=1e6), Compute(forward_s=0.3, backward_s=0.7)
    how = Settings(steps=1, batch_size=2)
    Simulation(Runs(begin=begin), tiny.problem(test=None), how, num_workers, network=network, compute=compute).run()


def interpret(begin: Callable[[Any], Program]) -> None:
    model = nn.Linear(2, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    micro = Micro(lambda: model(torch.ones(3, 2)).mean(), 0.5, 3)
    interpreter = Interpreter(SoloTransport(), replica, NullRecorder(), lambda _: [micro], timeout_s=10.0)
    try:
        program = begin(None)
        while interpreter.advance(program) is not None:
            pass
    finally:
        interpreter.close()
        replica.close()


@pytest.mark.parametrize("run", [simulate, interpret])
@pytest.mark.parametrize("lane", [0, FREE])
@pytest.mark.parametrize("any_of", [False, True])
def test_it_is_raised_where_it_is_waited_for(run: Callable[[Callable[[Any], Program]], None], lane: int, any_of: bool) -> None:
    log: list[str] = []
    with pytest.raises(Broken):
        run(lambda _: waits(log, lane=lane, any_of=any_of))
    assert log == ["step ended"]


def test_a_simulation_names_an_error_that_no_program_waits_for() -> None:
    """Not that the other rank waits for ever."""

    def begin(ctx: Context) -> Program:
        if ctx.rank == 0:
            yield ops.Start(breaks_alone())
        else:
            yield ops.Recv(0, like=torch.zeros(1))

    with pytest.raises(Broken):
        simulate(begin, 2)


def breaks_alone() -> Program:
    yield ops.Now()
    raise Broken


def test_the_next_work_of_its_lane_begins() -> None:
    found: list[Any] = []

    def begin(ctx: Context) -> Program:
        first = yield ops.Start(breaks())
        second = yield ops.Start(returns())
        found.append((yield ops.Wait(second)))
        yield ops.Wait(first)

    with pytest.raises(Broken):
        simulate(begin)
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
        ticket = yield ops.Start(ops.Recv(0, like=torch.zeros(4)))
        gradient = yield ops.Backward(0)
        yield ops.Discard(gradient)
        log.append("computed")
        yield ops.Wait(ticket)

    with pytest.raises(ConfigError, match="expected 4 elements"):
        simulate(begin, 2)
    assert log == ["computed"]
