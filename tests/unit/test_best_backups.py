"""The record of the best (N, b) follows from what it says was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.best_backups import LAWS, RECORD, TOTAL, arrival_of, fit_row
from workbench import theory
from workbench.costs import Empirical, Independent

SAID: dict[str, Any] = json.loads(RECORD.read_text())
MEASURED: dict[str, Independent] = {
    name: Empirical(values=tuple(map(float, values.split()))) for name, values in SAID["arrivals"].items()
}
POINTS = {
    "paper": [tuple(point) for point in SAID["updates"]["paper"]],
    "digits": [(row["workers"], row["updates"]) for row in SAID["updates"]["digits"]],
}


def test_it_is_of_every_law() -> None:
    assert [row["law"] for row in SAID["rows"]] == [*MEASURED, *LAWS]
    assert len(MEASURED) == 2


@pytest.mark.parametrize("goal", POINTS)
def test_the_model_of_updates_is_fitted_to_its_points(goal: str) -> None:
    assert fit_row(theory.fit_iterations(POINTS[goal])) == pytest.approx(SAID["updates"]["fits"][goal])


def test_the_counts_are_means_of_their_seeds() -> None:
    for row in SAID["updates"]["digits"]:
        assert row["updates"] == pytest.approx(sum(row["of_seeds"]) / len(row["of_seeds"]))


@pytest.mark.parametrize("row", SAID["rows"], ids=lambda row: row["law"])
def test_the_best_follows_from_law_and_updates(row: dict[str, Any]) -> None:
    arrival = arrival_of({**MEASURED, **LAWS}[row["law"]])
    for goal, points in POINTS.items():
        choice = theory.best_backups(TOTAL, theory.fit_iterations(points), arrival)
        said = row[goal]["cancelled"]
        assert (choice.num_gradients[choice.backups], choice.backups) == (said["N"], said["b"])
        assert choice.gain == pytest.approx(said["times_as_fast_as_none"], abs=1e-4)
        assert row[goal]["carried"]["N"] + row[goal]["carried"]["b"] == TOTAL


@pytest.mark.parametrize("row", SAID["rows"], ids=lambda row: row["law"])
def test_what_was_simulated_is_what_carried_stragglers_take(row: dict[str, Any]) -> None:
    """Within five standard errors of so few steps, the first of which begins afresh (hence 2 % more)."""
    for steps in row["steps"]:
        assert abs(steps["simulated"] - steps["carried"]) < 5 * steps["standard_error"] + 0.02 * steps["carried"], steps
