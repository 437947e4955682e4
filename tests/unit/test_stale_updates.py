"""Updates to a test loss for each staleness: the best of its own rates, and what is named in the table."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from workbench import problems
from workbench.algorithms import Constant, StaleSGD
from workbench.papers.studies.stale_updates import StaleUpdates, updates_by_staleness
from workbench.papers.studies.training import compute_cost, train

pytestmark = pytest.mark.notebooks
PROBLEM = problems.get("digits-softmax")


def test_each_staleness_has_the_best_of_its_own_rates() -> None:
    both = updates_by_staleness(PROBLEM, [0, 4], [0, 1], lr=0.5, updates=60, target=1.0)
    assert set(both.best) == {0, 4} and len(both.best[0]) == 2
    assert both.rate[4] in [factor * 0.1 for factor in (0.5, 1.0, 2.0)]
    assert max(both.best[0]) < min(both.best[4]) < 60, "a delay of four updates costs updates"
    for factor in (0.5, 1.0, 2.0):
        one = updates_by_staleness(PROBLEM, [4], [0, 1], lr=0.5, updates=60, target=1.0, factors=[factor])
        assert sum(both.best[4]) <= sum(one.best[4])


def test_updates_are_those_of_the_first_evaluation_of_a_training_with_this_staleness() -> None:
    found = updates_by_staleness(PROBLEM, [3], [5], lr=0.4, updates=40, target=1.5, factors=[1.0], evaluations=40)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    how = {"compute": compute_cost(1.0), "steps": 40, "seed": 5, "evaluate_every": 1, "optimizer": optimizer}
    run = train(StaleSGD(staleness=Constant(3)), PROBLEM, workers=1, **how)  # type: ignore[arg-type]
    first = int(np.flatnonzero(run.curve("steps", "test_loss")[1] <= 1.5)[0])
    assert found.best == {3: [first + 1]} and 0 < first < 39
    assert found.rate == {3: 0.1} and found.capped == ()


def test_a_rate_in_the_middle_is_at_no_edge() -> None:
    how = {"lr": 0.5, "updates": 60, "target": 1.0}
    assert updates_by_staleness(PROBLEM, [0], [0], factors=[0.1, 1.0, 1e4], **how).at_edge == ()  # type: ignore[arg-type]
    assert updates_by_staleness(PROBLEM, [0], [0], factors=[0.1, 0.2, 1.0], **how).at_edge == (0,)  # type: ignore[arg-type]


def test_a_loss_that_is_not_reached_counts_with_all_updates_and_is_named() -> None:
    never = updates_by_staleness(PROBLEM, [0], [0], lr=0.5, updates=10, target=-1.0)
    assert never.capped == (0,) and never.best == {0: [10.0]}


def test_the_table_names_an_edge_and_a_cap() -> None:
    found = StaleUpdates(
        best={0: [10.0, 10.0], 2: [30.0, 30.0]}, rate={0: 0.5, 2: 0.1}, at_edge=(2,), capped=(0, 2)
    ).table("updates")
    assert [row["note"] for row in found] == ["not reached by all", "rate at an edge, not reached by all"]
    assert [row["rate"] for row in found] == [0.5, 0.1]
