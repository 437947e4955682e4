"""Trainings paired by seed: their order, their rates, the time of a step, and what a run that diverged counts with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.made_runs import made_run
from workbench import problems
from workbench.algorithms import NoCommunication, SerialSGD, SynchronousSGD
from workbench.errors import ConfigError
from workbench.papers.studies.paired_runs import (
    final_accuracies,
    final_accuracy,
    paired,
    rotated,
    sgd,
    simulated,
    step_s,
    with_interval,
)
from workbench.papers.studies.training import compute_cost

pytestmark = pytest.mark.notebooks


def test_a_step_ends_with_its_slowest_rank_and_the_first_steps_do_not_count() -> None:
    assert step_s(made_run([9.0, 10.0, 11.0, 13.0, 15.0, 17.0])) == 2.0
    with pytest.raises(ConfigError, match="4 or more"):
        step_s(made_run([1.0, 2.0, 3.0]))


def test_the_order_rotates_with_the_seed_and_each_algorithm_has_its_rate() -> None:
    calls: list[tuple[str, int, float | None]] = []

    class Handle:
        run = made_run([1.0, 2.0])

        def wait(self) -> Handle:
            return self

    class Cluster:
        def train(
            self, algorithm: Any, _problem: Any, *, seed: int = -1, lr: float | None = None, steps: int = 0
        ) -> Handle:
            calls.append((type(algorithm).__name__, seed, lr))
            return Handle()

    algorithms = {"a": SynchronousSGD(), "b": NoCommunication()}
    found = rotated(Cluster(), algorithms, None, [5, 6], rates={"b": [0.5]})  # type: ignore[arg-type]
    assert [len(found[name]) for name in algorithms] == [2, 2]
    assert calls.pop(0) == ("SynchronousSGD", -1, None), "the warm-up"
    assert [name for name, _, _ in calls] == ["SynchronousSGD", "NoCommunication", "NoCommunication", "SynchronousSGD"]
    assert {(name, lr) for name, _, lr in calls} == {("SynchronousSGD", None), ("NoCommunication", 0.5)}


def test_a_simulated_run_that_diverges_is_none_and_the_others_keep_their_seeds() -> None:
    how: dict[str, Any] = {"workers": 1, "compute": compute_cost(2.0), "batch_size": 32, "evaluate_every": 0}
    algorithms = {"high": SerialSGD(), "low": SerialSGD()}
    rates = {"high": [1e9], "low": [0.01]}
    found = simulated(algorithms, problems.get("digits-mlp"), [3, 4], rates=rates, steps=8, trace_steps=0, **how)
    assert found["high"] == [None, None]
    kept = [run for run in found["low"] if run is not None]
    assert [run.info["settings"]["seed"] for run in kept] == [3, 4]
    assert kept[0].steps()[-1]["seconds"] == pytest.approx(8 * 2.0), "each step computes for two seconds"


def test_rates_are_a_rate_or_a_rate_and_a_momentum() -> None:
    settings = sgd([0.5, 0.9])
    optimizer = settings["optimizer"]([torch.nn.Parameter(torch.zeros(1))])
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)
    with pytest.raises(ConfigError, match="a learning rate, or a learning rate and a momentum"):
        sgd([1.0, 2.0, 3.0])


def test_the_final_accuracy_is_in_per_cent_and_that_of_guessing_after_a_divergence() -> None:
    problem = problems.get("digits-softmax")
    found = final_accuracies({"one": SynchronousSGD()}, problem, [0], rates={"one": [0.1]}, workers=2, epochs=1)
    assert 50 < found["one"][0] < 100
    assert final_accuracy(made_run([1.0, 2.0], evaluations={0: (2.0, 0.9), 1: (1.0, 0.4)})) == pytest.approx(40.0)
    assert final_accuracy(None) == 10.0


def test_pairs_are_of_one_seed() -> None:
    assert paired([6.0, 8.0], [3.0, 2.0]) == [2.0, 4.0]
    assert paired([6.0, 8.0], [3.0, 2.0], lambda one, other: one - other) == [3.0, 6.0]
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_the_interval_is_students() -> None:
    assert with_interval([1.0, 2.0, 3.0]) == "2.0 [-0.5, 4.5]", "2 plus or minus 4.303 / sqrt(3)"
