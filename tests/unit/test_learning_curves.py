"""Losses and errors against seconds: means over steps, one grid for all seeds, and times to a target."""

from __future__ import annotations

import math

import pytest

from tests.unit.made_runs import made_run
from workbench.papers.studies.learning_curves import (
    mean_errors,
    mean_losses,
    on_one_grid,
    seconds_to_loss,
    times_to_accuracy,
    times_to_loss,
    times_to_test_loss,
)

pytestmark = pytest.mark.notebooks
# After steps 1 and 3, which end at 2 and 4 s, or at 4 and 8 s
SOON = made_run([1.0, 2.0, 3.0, 4.0], evaluations={1: (2.0, 0.5), 3: (1.0, 0.75)})
LATE = made_run([2.0, 4.0, 6.0, 8.0], evaluations={1: (3.0, 0.25), 3: (2.0, 0.5)})


def test_time_to_a_loss_is_that_of_a_mean_over_steps() -> None:
    run = made_run([1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 0.0, 3.0, 0.0, 0.0])
    assert seconds_to_loss(run, 1.0, window=2) == 5.0
    assert seconds_to_loss(run, 1.5, window=2) == 2.0
    assert seconds_to_loss(run, -1.0, window=2) == math.inf


def test_mean_losses_are_over_the_last_steps_and_the_time_that_all_seeds_cover() -> None:
    runs = [made_run([1.0, 2.0, 3.0, 4.0], [8.0, 6.0, 4.0, 2.0]), made_run([2.0, 4.0, 6.0, 8.0], [4.0, 4.0, 2.0, 2.0])]
    # Means over two steps: 7, 5, 3 at 2, 3, 4 s, and 4, 3, 2 at 4, 6, 8 s; both cover 4 s only
    assert mean_losses(runs, window=2, number=2) == {4.0: [3.0, 4.0]}
    assert mean_losses(runs[:1], window=2, number=5) == {2.0: [7.0], 2.5: [6.0], 3.0: [5.0], 3.5: [4.0], 4.0: [3.0]}


def test_errors_and_test_losses_are_interpolated_between_evaluations_without_runs_that_diverged() -> None:
    assert on_one_grid([SOON, None], "test_loss", number=3) == {2.0: [2.0], 3.0: [1.5], 4.0: [1.0]}
    assert mean_errors([SOON, None], number=2) == {2.0: [pytest.approx(50.0)], 4.0: [pytest.approx(25.0)]}
    assert on_one_grid([SOON, LATE], "accuracy", number=2) == {4.0: [0.75, 0.25]}, (
        "from the later begin to the first end"
    )
    assert mean_errors([None]) == {}


def test_a_target_that_is_not_reached_counts_as_the_longest_run_and_is_counted() -> None:
    soon = made_run([float(end) for end in range(1, 11)], [0.0] * 10)
    never = made_run([2.0 * end for end in range(1, 11)], [3.0] * 10)
    times = times_to_loss({"one": [soon, soon], "other": [never, None]}, 1.0)
    assert times.cap_s == 20.0 and times.seconds["other"] == [20.0, 20.0]
    assert (times.num_reached("one"), times.num_reached("other")) == (2, 0)
    assert times.ratios("other", "one") == [4.0, 4.0]
    assert "0 of 2" in str(times.table("to a loss"))


def test_times_to_an_evaluation_are_those_at_which_it_first_meets_the_target() -> None:
    runs = {"soon": [SOON, SOON], "late": [LATE, None]}
    accuracy = times_to_accuracy(runs, 0.5)
    assert accuracy.seconds == {"soon": [2.0, 2.0], "late": [8.0, 8.0]} and accuracy.cap_s == 8.0
    assert times_to_accuracy(runs, 0.75).seconds["soon"] == [4.0, 4.0]
    loss = times_to_test_loss(runs, 3.0)
    assert loss.seconds == {"soon": [2.0, 2.0], "late": [4.0, 8.0]}
    assert loss.censored() == [False, True] and loss.censored("soon") == [False, False]
