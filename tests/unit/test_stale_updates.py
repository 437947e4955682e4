"""Updates to a test loss for each staleness: the best of its own rates, and what is named in the table."""

from __future__ import annotations

import pytest

from workbench import problems
from workbench.papers.studies.stale_updates import StaleUpdates, updates_by_staleness

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


def test_a_loss_that_is_not_reached_counts_with_all_updates_and_is_named() -> None:
    never = updates_by_staleness(PROBLEM, [0], [0], lr=0.5, updates=10, target=-1.0)
    assert never.capped == (0,) and never.best == {0: [10.0]}


def test_the_table_names_an_edge_and_a_cap() -> None:
    found = StaleUpdates(
        best={0: [10.0, 10.0], 2: [30.0, 30.0]}, rate={0: 0.5, 2: 0.1}, at_edge=(2,), capped=(0, 2)
    ).table("updates")
    assert [row["note"] for row in found] == ["not reached by all", "rate at an edge, not reached by all"]
    assert [row["rate"] for row in found] == [0.5, 0.1]
