"""The regret of a convex training: its projection, its best fixed parameters, its bound."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.papers.studies.regret import RegressionInBall, projected_sgd


def test_parameters_outside_the_ball_are_scaled_and_those_inside_are_not() -> None:
    weights = [torch.nn.Parameter(torch.tensor([3.0])), torch.nn.Parameter(torch.tensor([4.0]))]
    solver = projected_sgd(weights, radius=2.0, lr=1.0)
    for weight in weights:
        weight.grad = torch.zeros(1)
    solver.step()
    assert [weight.item() for weight in weights] == pytest.approx([1.2, 1.6])
    solver.step()
    assert [weight.item() for weight in weights] == pytest.approx([1.2, 1.6])


def test_the_best_fixed_parameters_beat_zero_and_lie_on_a_larger_ball_at_a_smaller_loss() -> None:
    small, large = (RegressionInBall(radius).best_loss(20, seed=0) for radius in (1.0, 4.0))
    assert large < small < math.log(10), "zero has the loss of guessing"


def test_the_bound_grows_with_the_roots_of_delay_and_steps_and_regret_stays_below_it() -> None:
    task = RegressionInBall(4.0)
    assert task.bound(4, 100) == pytest.approx(3 * task.bound(0, 100)) == pytest.approx(3 * task.bound(0, 25) * 2)
    assert task.bound(0, 1) == pytest.approx(8 * task.largest_gradient())
    regrets = task.regrets([0, 4], 40, [0])
    assert all(0 < regret < task.bound(delay, 40) for delay, (regret,) in regrets.items())
    assert regrets[4][0] > regrets[0][0], "late gradients cost"
