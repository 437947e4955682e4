"""An exponential moving average of the parameters, evaluated in their place: against one taken by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.laws import tiny
from tests.laws.reference import serial
from tests.laws.test_features import initial
from tests.laws.train import by_turns, on_all_runtimes, train
from tests.laws.variants import in_step, name_of, variants
from workbench.algorithms import (
    DPSGD,
    SPARTA,
    ApplyOrder,
    AsyncSGD,
    BackupSGD,
    DeAR,
    DiLoCo,
    FedAvg,
    LayerwiseSGD,
    LocalSGD,
    NoLoCo,
    PipeSGD,
    SlowMo,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.settings import Settings

DECAY, STEPS = 0.7, 6
HOW = Settings(steps=STEPS, batch_size=4, optimizer=tiny.momentum, ema_decay=DECAY, evaluate_every=0, timeout_s=30)


def by_hand(problem: Problem, num_workers: int, updates: int = STEPS) -> float:
    """Test loss at the average of the parameters of one process with the whole batch."""
    return loss_of_average(problem, serial(problem, HOW, num_workers)[:updates])


def loss_of_average(problem: Problem, updates: list[Tensor]) -> float:
    """Test loss at a[t] = decay a[t-1] + (1 - decay) w[t], a[0] = w[0]."""
    model = initial(problem)
    average = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    for parameters in updates:
        average = DECAY * average + (1 - DECAY) * parameters
    return loss_at(problem, average)


def loss_at(problem: Problem, parameters: Tensor) -> float:
    """Test loss at these parameters."""
    model = initial(problem)
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    x, y = problem.test_data().tensors  # type: ignore[union-attr]
    with torch.no_grad():
        return float(cross_entropy(model(x), y))


def evaluated(runtime: str, num_ranks: int, algorithm: Algorithm) -> float:
    found = train(runtime, num_ranks, algorithm, tiny.problem(), HOW).run.evaluations()[-1]["test_loss"]
    assert isinstance(found, float)
    return found


@on_all_runtimes
@pytest.mark.parametrize(
    "algorithm",
    [
        SynchronousSGD(),
        PipeSGD(width=1),
        LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.ANY),
        DeAR(bucket_bytes=200.0),
        BackupSGD(backups=0),
        LocalSGD(every=3, after=STEPS),
    ],
    ids=name_of,
)
def test_an_average_of_the_synchronous_updates(algorithm: Algorithm, runtime: str) -> None:
    assert evaluated(runtime, 3, algorithm) == pytest.approx(by_hand(tiny.problem(), 3), rel=1e-9)


@on_all_runtimes
@pytest.mark.parametrize("algorithm", [LocalSGD(every=3), DPSGD()], ids=name_of)
def test_replicas_that_differ_are_evaluated_at_the_mean_of_their_averages(algorithm: Algorithm, runtime: str) -> None:
    """It is the average of their mean parameters: communication keeps their mean, and an average is linear."""
    found = train(runtime, 3, algorithm, tiny.problem(), HOW)
    means = [torch.stack(replicas).mean(0) for replicas in zip(*found.parameters, strict=True)][:STEPS]
    last = found.run.evaluations()[-1]
    assert last["test_loss"] == pytest.approx(loss_of_average(tiny.problem(), means), rel=1e-9)
    assert last["consensus_distance"] > 1e-3, "the averages differ, though the parameters are equal at the end"


WHOLE = [item for item in in_step(variants()) if not item.max_staleness and not isinstance(item, DeAR)]
WRITTEN = [DiLoCo(every=2), SlowMo(every=2), NoLoCo(every=2), StreamingDiLoCo(every=2), FedAvg(every=2), SPARTA()]


def check_average_of_ends(algorithm: Algorithm, runtime: str) -> None:
    """The test loss at the average, over ranks and steps, of the parameters as they are at each step's end."""
    found = train(runtime, 3, algorithm, tiny.problem(), HOW)
    means = [torch.stack(replicas).mean(0) for replicas in zip(*found.parameters, strict=True)][:STEPS]
    last = found.run.evaluations()[-1]
    assert last["test_loss"] == pytest.approx(loss_of_average(tiny.problem(), means), rel=1e-9), name_of(algorithm)


def test_an_average_has_what_algorithms_write_after_an_update() -> None:
    """The mean of ranks, an outer step, a slow step. `DeAR` ends a step before its update."""
    for algorithm in WHOLE:
        if not algorithm.depends_on_timing:
            check_average_of_ends(algorithm, "simulated")


@by_turns(WRITTEN, turn=0)
def test_an_average_has_it_on_real_ranks(algorithm: Algorithm, runtime: str) -> None:
    check_average_of_ends(algorithm, runtime)


@on_all_runtimes
def test_an_update_in_flight_at_the_end_is_in_the_average(runtime: str) -> None:
    """It has no step of its own."""
    problem = tiny.problem()
    updates = serial(problem, HOW, 3, delay=1)[1:]
    assert evaluated(runtime, 3, PipeSGD(width=2)) == pytest.approx(loss_of_average(problem, updates), rel=1e-9)


@on_all_runtimes
def test_a_server_keeps_one_too(runtime: str) -> None:
    assert evaluated(runtime, 1, AsyncSGD()) == pytest.approx(by_hand(tiny.problem(), 1), rel=1e-9)


def test_it_is_not_the_parameters_themselves() -> None:
    """The laws above can fail: with one update less the loss differs."""
    problem = tiny.problem()
    assert by_hand(problem, 3) != pytest.approx(by_hand(problem, 3, STEPS - 1), rel=1e-4)


def test_it_goes_on_when_resumed() -> None:
    for algorithm in (SynchronousSGD(), BackupSGD(backups=0)):
        first = train("simulated", 3, algorithm, tiny.problem(), HOW, stop_after=2)
        second = train("simulated", 3, algorithm, tiny.problem(), HOW, resume=first.checkpoint)
        assert second.run.evaluations()[-1]["test_loss"] == pytest.approx(by_hand(tiny.problem(), 3), rel=1e-9)


def test_a_resumed_run_begins_a_new_average_at_the_checkpoint() -> None:
    """The run before kept none: the initial parameters are not a part of it."""
    problem = tiny.problem()
    updates = serial(problem, HOW, 3)
    average = updates[2]
    for parameters in updates[3:STEPS]:
        average = DECAY * average + (1 - DECAY) * parameters
    for algorithm in (SynchronousSGD(), BackupSGD(backups=0)):
        first = train("simulated", 3, algorithm, problem, replace(HOW, ema_decay=None), stop_after=2)
        second = train("simulated", 3, algorithm, problem, HOW, resume=first.checkpoint)
        found = second.run.evaluations()[-1]["test_loss"]
        assert found == pytest.approx(loss_at(problem, average), rel=1e-9)
