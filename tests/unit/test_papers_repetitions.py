"""Runs that differ in their seed: what a run that diverged, or that misses a target, counts with; settings chosen on other seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench import problems
from workbench.algorithms import SerialSGD
from workbench.papers.studies.equal_time import EqualTime
from workbench.papers.studies.repetitions import Repetitions, targets_table
from workbench.papers.studies.training import compute_cost
from workbench.papers.studies.tuning import GUESSING, Grid
from workbench.trace.run import Run

pytestmark = pytest.mark.notebooks


def run_of(*accuracies: float) -> Run:
    """A run that was evaluated after every second step."""
    rows: list[dict[str, Any]] = []
    for place, accuracy in enumerate(accuracies):
        for step in (2 * place, 2 * place + 1):
            row = {"step": step, "seconds": float(step), "loss": 1.0, "samples": 1, "num_samples": 1, "bytes_sent": 0}
            rows.append(row)
        judged = {"loss_sum": 1.0, "count": 1, "correct": accuracy * 1000, "judged": 1000}
        rows.append({**rows[-1], "evaluation": judged})
    return Run(info={"num_workers": 1, "status": "finished"}, metrics={0: rows})


RUNS = Repetitions(runs=[run_of(0.2, 0.9, 0.8), run_of(0.3, 0.3, 0.4), None], steps=6)


def test_a_run_that_diverged_counts_as_guessing_and_misses_every_target() -> None:
    assert RUNS.num_diverged == 1
    assert RUNS.last() == pytest.approx([80.0, 40.0, 10.0])
    assert RUNS.last_errors() == pytest.approx([20.0, 60.0, 90.0])
    assert RUNS.best() == pytest.approx([90.0, 40.0, 10.0])
    assert RUNS.best_steps() == [4, 6, 6]
    assert RUNS.steps_to(0.9) == [4, 6, 6] and RUNS.missed(0.9) == [False, True, True]
    assert RUNS.errors_by_step() == {
        1: pytest.approx([80.0, 70.0]),
        3: pytest.approx([10.0, 70.0]),
        5: pytest.approx([20.0, 60.0]),
    }


def test_updates_to_a_target_are_those_of_one_shard_until_the_evaluation() -> None:
    run = run_of(0.2, 0.9)  # evaluated at 1 and at 3 s
    seconds = (0.5, 0.9, 1.5, 2.0, 3.0, 3.5)
    changes = [
        {"update": number, "bucket": bucket, "seconds": at, "staleness": [number], "sources": [0], "dropped": []}
        for number, at in enumerate(seconds)
        for bucket in (0, 1)
    ]
    found = Repetitions(
        runs=[Run(info=run.info, metrics=run.metrics, recorded_events={0: changes}), run, None], steps=4
    )
    assert found.updates_to(0.9, limit=50) == [5, 0, 50]
    assert found.updates_to(0.95, limit=50) == [50, 50, 50]
    assert found.staleness() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_the_table_counts_runs_that_reach_the_last_target() -> None:
    (row,) = targets_table({"all": RUNS}, [0.3, 0.9], "caption", "setting")
    assert (row["to0"], row["to1"]) == (pytest.approx((3 + 2 + 6) / 3), pytest.approx((4 + 6 + 6) / 3))
    assert (row["reached"], row["diverged"]) == ("1 of 3", 1)


def test_a_rate_that_diverges_is_none() -> None:
    how: dict[str, Any] = {"workers": 1, "compute": compute_cost(1.0), "batch_size": 32, "evaluate_every": 0}
    found = Repetitions.train(SerialSGD(), problems.get("digits-mlp"), [0, 1], steps=8, lr=1e9, **how)
    assert found.runs == [None, None]


def test_settings_are_chosen_on_the_other_seeds() -> None:
    losses = np.array([[[0.0, 2.0, 2.0], [5.0, 5.0, 5.0]], [[1.0, 1.0, 1.0], [1.5, 1.5, 0.0]]])
    grid = Grid(rates=[0.1, 0.2], momenta=[0.0, 0.9], losses=losses)
    assert grid.own_rates() == [0.1, 0.2, 0.2] and grid.own_momenta() == [0.0, 0.0, 0.9]
    assert grid.judged() == [1.5, 1.5, 2.0], "no seed is judged with what is best for itself"
    other = Grid(rates=[0.1, 0.2], momenta=[0.0, 0.9], losses=losses[::-1])
    assert grid.judged(other) == [5.0, 5.0, 2.0], "the settings of the other, the losses of its own"
    assert grid.by_momentum() == {0.0: [1.0, 1.0, 1.0], 0.9: [1.5, 1.5, 0.0]}


def test_a_grid_counts_a_divergence_as_guessing() -> None:
    how: dict[str, Any] = {"workers": 1, "compute": compute_cost(1.0), "batch_size": 32, "steps": 20, "gradients": 1}
    grid = Grid.train(SerialSGD(), problems.get("digits-mlp"), [0], rates=[0.3, 1e9], momenta=[0.0], **how)
    assert grid.losses.shape == (2, 1, 1) and grid.losses[1, 0, 0] == GUESSING > grid.losses[0, 0, 0]


def test_all_algorithms_of_a_study_end_at_the_same_time() -> None:
    problem = problems.get("digits-pixelcnn", width=4, blocks=1, kernel=3)
    study = EqualTime(problem=problem, horizon=6.0, spread=0.3, backups=1, evaluations=3)
    for name, workers in (("one worker", 1), ("Sync-Opt", 3), ("Async-Opt", 2)):
        (run,) = study.train(name, workers, [0], lr=1e-3, batch_size=1)  # type: ignore[arg-type]
        assert run.times[0] == 0.0 and run.times[-1] == 6.0 and list(run.times) == sorted(run.times)
        assert run.losses[0] == study.untrained and list(run.losses) == sorted(run.losses, reverse=True)
    (diverged,) = study.train("one worker", 1, [0], lr=1e9, batch_size=1)
    assert diverged.final == study.untrained
