"""The steps and seconds to a target, against trainings that are evaluated after every step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench import costs
from workbench.analysis.summary import Crossing, crossing, time_to
from workbench.what_if.trainings import Trained

SEEDS = (0, 1, 2)
LENGTH, RATE = 64, 0.03
TARGETS = (1.8, 1.5, 1.2, 0.9)
compute = costs.Compute(forward_s=1e-3, backward_s=2e-3)


def trained(seed: int, evaluate_every: int) -> wb.Run:
    return wb.simulate(
        wb.SynchronousSGD(),
        wb.problems.digits_mlp(),
        workers=2,
        steps=LENGTH,
        lr=RATE,
        seed=seed,
        compute=compute,
        evaluate_every=evaluate_every,
        trace_steps=0,
    )


@pytest.fixture(scope="module")
def pairs() -> list[tuple[wb.Run, wb.Run]]:
    """A run that is evaluated after every step, and the same one with an evaluation after every eight."""
    return [(trained(seed, 1), trained(seed, 8)) for seed in SEEDS]


def test_the_true_crossing_is_in_the_bracket_and_near_the_interpolated_one(pairs: list[tuple[wb.Run, wb.Run]]) -> None:
    errors, of_the_evaluation = [], []
    for every_step, every_eight in pairs:
        for target in TARGETS:
            rows = every_step.evaluations()
            true = next(row for row in rows if row["test_loss"] <= target)
            met = time_to(every_eight, "test_loss", target)
            assert met is not None
            assert met["step_low"] <= true["step"] <= met["step_high"]
            assert time_to(every_step, "test_loss", target) == {
                **true,
                "step_low": true["step"],
                "step_high": true["step"],
            }
            errors.append(abs(met["step"] - true["step"]))
            of_the_evaluation.append(met["step_high"] - true["step"])
            at_that_step = next(row for row in rows if row["step"] == met["step"])
            for name in ("seconds", "samples", "bytes_sent"):
                assert met[name] == pytest.approx(at_that_step[name], rel=0.02), name
    assert np.mean(errors) < 0.5 * np.mean(of_the_evaluation)
    assert max(errors) <= 2


def test_seeds_that_meet_the_target_at_one_evaluation_have_a_spread(pairs: list[tuple[wb.Run, wb.Run]]) -> None:
    found = [[row for _, run in pairs if (row := time_to(run, "test_loss", target))] for target in (0.9, 1.0, 1.2, 1.4)]
    assert all(len({row["step_high"] for row in met}) == 1 for met in found)
    assert all(len({row["step"] for row in met}) > 1 for met in found)


def test_the_interval_of_a_study_contains_the_true_time() -> None:
    """The time of a step is known here, so that only the steps are uncertain."""
    problem = wb.problems.digits_mlp()
    measured = wb.simulate(wb.SynchronousSGD(), problem, workers=2, steps=12, network="wan-100m", compute=compute)
    how: dict[str, Any] = {"calibrated": measured, "networks": "1mbit", "workers": 2, "quiet": True, "seeds": SEEDS}
    how["lr"] = RATE
    for target in (1.5, 0.9):
        found = wb.study(problem, algorithms=[wb.SynchronousSGD()], target=("loss", target), **how)
        (cell,) = found.cells
        (of_one,) = found.trainings
        # One worker with the samples of all: the study's training with an evaluation after each step.
        true = []
        for seed in SEEDS:
            run = wb.simulate(
                of_one.recipe.algorithm,
                problem,
                workers=1,
                batch_size=of_one.recipe.batch_size,
                steps=of_one.num_steps,
                seed=seed,
                lr=RATE,
                compute=compute,
                evaluate_every=1,
            )
            true.append(next(row["step"] + 1 for row in run.evaluations() if row["test_loss"] <= target))
        fewest, most = of_one.mean_bracket
        assert fewest <= np.mean(true) <= most and most > fewest
        assert cell.steps == pytest.approx(np.mean(true), abs=2)
        assert cell.interval_s is not None
        assert cell.interval_s[0] <= np.mean(true) * cell.time.step_s <= cell.interval_s[1]


@pytest.mark.parametrize(
    ("steps", "values", "target", "expected"),
    [
        ([1, 2, 3], [3.0, 2.0, 1.0], 1.5, Crossing(steps=3, low=3, high=3, place=2)),
        ([10, 20], [2.0, 1.0], 1.0, Crossing(steps=20, low=11, high=20, place=1)),
        ([10, 20], [2.0, 1.0], 2.0, Crossing(steps=10, low=1, high=10, place=0)),  # nothing is known before
        ([10, 20], [math.nan, 1.0], 1.5, Crossing(steps=20, low=11, high=20, place=1)),
        ([0, 10], [2.0, 1.0], 3.0, Crossing(steps=0, low=0, high=0, place=0)),  # at the start
        ([10, 20, 20], [3.0, 2.0, 1.0], 1.5, Crossing(steps=20, low=20, high=20, place=2)),  # evaluated twice
        ([10, 20], [2.0, 1.0], 0.5, None),
    ],
)
def test_cases(steps: list[int], values: list[float], target: float, expected: Crossing | None) -> None:
    assert crossing(steps, values, target) == expected
    assert crossing(steps, [-value for value in values], -target, higher=True) == expected


def test_a_mean_of_brackets_is_of_the_seeds_that_met_the_target() -> None:
    recipe: Any = None
    some = Trained(recipe=recipe, lr=None, runs=(), steps=(5.0, None), num_steps=9, brackets=((4.0, 8.0), None))
    assert some.mean_bracket == (4.0, 8.0)
    assert Trained(recipe=recipe, lr=None, runs=(), steps=(5.0, 7.0), num_steps=9).mean_bracket == (6.0, 6.0)
