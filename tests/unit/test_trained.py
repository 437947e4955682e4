"""The trained model of a run: written at its end, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.laws import tiny
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.replica.trained import state_of
from workbench.trace.run import Run
from workbench.trace.weights import WEIGHTS, write_weights

HOW: dict[str, Any] = {"workers": 3, "steps": 6, "batch_size": 3, "evaluate_every": 0}
ALGORITHMS = [wb.SynchronousSGD(), wb.PipeSGD(width=2), wb.AsyncSGD(), wb.LocalSGD(every=2), wb.DiLoCo(every=2)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_the_model_is_the_one_that_was_evaluated_last(algorithm: Algorithm) -> None:
    problem = tiny.problem()
    run = wb.simulate(algorithm, problem, **HOW)
    model = run.model(problem)
    assert not model.training
    test = problem.test_source()
    assert test is not None
    ((batch, number),) = test.batches(1000)
    with torch.no_grad():
        loss = float(problem.batch_loss(model, batch))
    assert number == len(batch[0])
    assert run.evaluations()[-1]["test_loss"] == pytest.approx(loss, rel=1e-12)


def test_the_average_is_the_one_that_was_evaluated() -> None:
    problem = tiny.problem(tiny.batchnorm_mlp, num_samples=18)
    run = wb.simulate(wb.SynchronousSGD(), problem, ema_decay=0.5, **HOW)
    ((batch, _),) = problem.test_source().batches(1000)  # type: ignore[union-attr]
    with torch.no_grad():
        losses = [float(problem.batch_loss(run.model(problem, average=one), batch)) for one in (True, False)]
    assert run.evaluations()[-1]["test_loss"] == pytest.approx(losses[0], rel=1e-12)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_a_stored_run_has_its_model(tmp_path: Path) -> None:
    problem = wb.problems.get("digits-softmax")
    run = wb.simulate(wb.SynchronousSGD(), problem, **HOW)
    read = Run.load(run.save(tmp_path / "run"))
    for one in (read.model(), run.model()):
        assert isinstance(one, nn.Module)
    assert all(torch.equal(value, run.model().state_dict()[name]) for name, value in read.model().state_dict().items())


def test_tied_weights_stay_tied_and_old_runs_are_read(tmp_path: Path) -> None:
    model = tiny.TiedMLP()
    write_weights(tmp_path, {WEIGHTS: state_of(model)})
    problem = tiny.problem(tiny.TiedMLP)
    run = Run(info={"status": "finished"}, metrics={}, folder=tmp_path)
    read = run.model(problem)
    assert torch.equal(read.first.weight, model.first.weight) and read.first.weight is read.second.weight
    (tmp_path / WEIGHTS).unlink()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert torch.equal(run.model(problem).head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run: run.model(average=True), r"kept no moving average: train with ema_decay="),
        (lambda run: run.model(wb.problems.get("digits-mlp")), "give the problem that was trained, with its options"),
        (
            lambda run: Run(info={"problem": {"name": "user"}}, metrics={}, weights=run.weights).model(),
            r"run.model\(problem\)",
        ),
        (
            lambda run: Run(info={"status": "running"}, metrics={}, folder=Path("nowhere")).model(),
            "written when it ends",
        ),
    ],
)
def test_what_has_no_model_says_why(ask: Any, message: str) -> None:
    run = wb.simulate(wb.SynchronousSGD(), wb.problems.get("digits-softmax"), **HOW)
    with pytest.raises(ConfigError, match=message):
        ask(run)


def test_a_simulation_of_times_has_no_weights() -> None:
    run = wb.simulate(wb.SynchronousSGD(), tiny.problem(), timing_only=True, **HOW)
    with pytest.raises(ConfigError, match="only its timing was simulated"):
        run.model(tiny.problem())
