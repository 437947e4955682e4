"""Buffers and extra state of a model: the same on real and simulated ranks, in no evaluation changed, kept by a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from tests.laws import tiny
from tests.laws.train import REAL, train
from tests.laws.variants import name_of
from workbench.algorithms import DeAR, LocalSGD, NoCommunication, ParameterServerSGD, PipeSGD, SynchronousSGD
from workbench.program import Algorithm
from workbench.settings import Settings


class Statistics(nn.Module):
    """Its training forward uses what it has counted: float statistics, a codebook of integers, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(tiny.NUM_FEATURES, tiny.NUM_CLASSES).double()
        self.register_buffer("mean", torch.zeros(tiny.NUM_FEATURES, dtype=torch.float64))
        self.register_buffer("code", torch.zeros(tiny.NUM_FEATURES, dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer((x - self.mean) * (1 + 0.1 * self.code))
        with torch.no_grad():  # in evaluations, too
            self.mean = self.mean.lerp(x.mean(0), 0.3)  # another tensor, and not the same one with other values
            self.code.copy_((x.sum(0) > 0).long() + self.code % 5)
        return result


class Counting(nn.Module):
    """A factor that is no buffer, and that the training forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Statistics()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x) * self.factor
        if self.training:
            self.factor += 0.1 * float(x.mean())
        return result

    def get_extra_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "as a tensor": torch.tensor([self.factor])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


ALGORITHMS = [SynchronousSGD(), DeAR(bucket_bytes=0), PipeSGD(width=2), LocalSGD(every=2), NoCommunication()]


HOW: dict[str, Any] = {"steps": 6, "batch_size": 4, "lr": 0.05}
SETTINGS = Settings(evaluate_every=0, **HOW)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_buffers_feed_the_forward_alike_on_all_runtimes(algorithm: Algorithm) -> None:
    problem = tiny.problem(Statistics)
    simulated, real = (train(runtime, 2, algorithm, problem, SETTINGS) for runtime in ("simulated", "torch"))
    together = wb.simulate(algorithm, problem, workers=2, evaluate_every=0, **HOW)
    for rank in range(2):
        for one, other in zip(simulated.parameters[rank], real.parameters[rank], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
        losses = [[row["loss"] for row in run.metrics[rank] if "evaluation" not in row] for run in (real.run, together)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("runtime", ["simulated", REAL[0]])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, ParameterServerSGD()], ids=name_of)
def test_an_evaluation_changes_nothing(algorithm: Algorithm, runtime: str) -> None:
    workers = 1 if algorithm.requires.servers else 2  # one worker: the order of updates does not depend on timing
    rows = []
    for every in (0, 2):
        how = Settings(evaluate_every=every, **HOW)
        trained = train(runtime, workers, algorithm, tiny.problem(Counting), how)
        rows.append([[row["loss"] for row in trained.rows(rank)] for rank in range(workers)])
    assert rows[0] == rows[1]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, ParameterServerSGD()], ids=name_of)
@pytest.mark.parametrize("runtime", ["simulated", REAL[0]])
def test_the_model_of_a_run_is_the_one_that_was_evaluated(algorithm: Algorithm, runtime: str) -> None:
    problem = tiny.problem(Counting)
    run = train(runtime, 2, algorithm, problem, SETTINGS).run
    ((batch, _),) = problem.test_source().batches(1000)  # type: ignore[union-attr]
    with torch.no_grad():
        loss = float(problem.batch_loss(run.model(problem), batch))
    assert run.evaluations()[-1]["test_loss"] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("runtime", ["simulated", REAL[0]])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_a_resumed_run_has_all_state(algorithm: Algorithm, runtime: str) -> None:
    problem = tiny.problem(Counting)
    whole = train(runtime, 2, algorithm, problem, SETTINGS)
    stopped = train(runtime, 2, algorithm, problem, SETTINGS, stop_after=2)
    resumed = train(runtime, 2, algorithm, problem, SETTINGS, resume=stopped.checkpoint)
    for rank in range(2):
        assert torch.equal(whole.parameters[rank][-1], resumed.parameters[rank][-1])


def test_state_of_each_rank_is_no_obstacle_for_another_number_of_ranks() -> None:
    """The parameters of its ranks are equal; buffers, also integers, and extra state are then rank 0's."""
    problem, algorithm = tiny.problem(Counting), LocalSGD(every=2)
    stopped = train("torch", 2, algorithm, problem, SETTINGS, stop_after=3)
    resumed = train("torch", 3, algorithm, problem, SETTINGS, resume=stopped.checkpoint)
    assert len(resumed.rows(2)) == 2
