"""Every method finds the minimum of a noisy quadratic, to within a bound that follows from its noise.

F(w) = mean_x |w - x|^2 / 2 over samples x: a minibatch's gradient is w - (its mean), so for each coordinate's distance e from
the mean of all samples, with learning rate h and a gradient that is s updates late,

    e[t+1] = e[t] - h e[t-s] + h n[t],   |n[t]| <= R, the largest distance of any sample from their mean.

For h <= s^s / (s+1)^(s+1), whatever s is at each update up to that, the solution without noise from any one disturbance stays
positive and falls, at least as fast as (1 - h)^t; its sum over time is 1/h. So |e[T]| <= R + (1 - h)^(T - s) |e[0]|.
Delay compensation replaces a part strength g^2 <= 1 of e[t-s] by e[t]: a staleness between 0 and s.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.laws.train import COMPUTE, NETWORK
from tests.laws.variants import all_variants, name_of, runs_on
from workbench.algorithms import DiLoCo, SoftsyncSGD
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulated import Simulation
from workbench.settings import Settings

RATE, STEPS, BEGIN = 0.04, 200, 1.0
STALENESS = 8  # 8^8 / 9^9 = 0.043


class Point(nn.Module):
    """w in three parts, so that it can be cut into buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((size,), BEGIN)) for size in (1, 2, 1)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.parts)) - x


def quadratic(error: Tensor, _: Tensor) -> Tensor:
    return error.square().sum(1).mean() / 2


SAMPLES = 0.03 * torch.randn(48, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
RADIUS = float((SAMPLES - SAMPLES.mean(0)).abs().max())
PROBLEM = Problem(model=Point, loss=quadratic, train=(SAMPLES, torch.zeros(48)), test=None, name="noisy quadratic", correct=None)


def first_two() -> list[Algorithm]:
    """Of each method its first settings, and one more: with a codec for the synchronous one."""
    kinds: dict[type, list[Algorithm]] = {}
    for variant in all_variants():
        kinds.setdefault(type(variant), []).append(variant)
    return [item for found in kinds.values() for item in {name_of(found[0]): found[0], name_of(found[-1]): found[-1]}.values()]


def gain(algorithm: Algorithm) -> float:
    """How much more noise than R a method lets through."""
    if isinstance(algorithm, DiLoCo):
        return 1 / (1 - algorithm.outer_momentum)  # the sum of what momentum makes of one disturbance
    if getattr(getattr(algorithm, "collective", None), "lossy", False):
        return 2.0  # error feedback, or rounding whose size is that of the gradient, at most once more
    return 1.0


def slowness(algorithm: Algorithm) -> float:
    """By how much an update is less than a synchronous one."""
    if isinstance(algorithm, SoftsyncSGD):
        return 2.0 * algorithm.splits  # gradients are divided by their staleness, bounded by 2n
    return 1.0


@pytest.mark.parametrize("algorithm", first_two(), ids=name_of)
def test_comes_as_near_to_the_minimum_as_its_noise_lets_it(algorithm: Algorithm) -> None:
    how = Settings(steps=STEPS, batch_size=4, optimizer=partial(torch.optim.SGD, lr=RATE))
    num_ranks = 3 if runs_on(algorithm, 3) else 1
    simulation = Simulation(algorithm, PROBLEM, how, num_ranks, network=NETWORK, compute=COMPUTE)
    run = simulation.run()
    late = [value for update in run.updates() for value in update["staleness"]]
    late += [row["staleness"] or 0 for rows in run.metrics.values() for row in rows]
    assert max(late) <= STALENESS, "the bound below is for these"
    end = simulation.workers[0].trained.read_parameters()
    error = float((end - SAMPLES.mean(0)).abs().max())
    transient = (1 - RATE) ** ((STEPS - STALENESS) / slowness(algorithm)) * (BEGIN + RADIUS)
    assert error <= gain(algorithm) * RADIUS + transient
    assert gain(algorithm) * RADIUS + transient < BEGIN - RADIUS, "the bound says something"
