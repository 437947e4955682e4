"""Every algorithm finds the minimum of a noisy quadratic, within a bound that follows from its noise.

Each coordinate has its own minimum and start, further apart than the bound, so parameters that change places are seen.

F(w) = mean_x |w - x|^2 / 2 over samples x: a minibatch's gradient is w - (its mean), so for each coordinate's distance
e from the mean of all samples, with learning rate h and a gradient that is s updates late,

    e[t+1] = e[t] - h e[t-s] + h n[t],   |n[t]| <= R, the largest distance of any sample from their mean.

For h <= s^s / (s+1)^(s+1), and any staleness up to s at each update, the solution from one disturbance without noise
stays positive. It falls at least as fast as (1 - h)^t, and its sum over time is 1/h. So |e[T]| <= R + (1 - h)^(T - s)
|e[0]|. Delay compensation replaces a part strength g^2 <= 1 of e[t-s] by e[t]: a staleness between 0 and s.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.laws.gossip import SCRAMBLING, Gossip, RightGossip
from tests.laws.train import COMPUTE, NETWORK
from tests.laws.variants import all_variants, name_of, runs_on
from workbench.algorithms import SoftsyncSGD
from workbench.algorithms.outer_optimizer import OuterAlgorithm
from workbench.laws.sentences import assert_holds
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

RATE, STEPS = 0.04, 120
MINIMUM = torch.tensor([-3.0, 1.0, 4.0, -1.0], dtype=torch.float64)
BEGIN = torch.tensor([-2.0, 0.2, 3.1, -0.4], dtype=torch.float64)
FURTHEST = float((BEGIN - MINIMUM).abs().max())  # 1
STALENESS = 8  # 8^8 / 9^9 = 0.043


class Point(nn.Module):
    """w in three parts, so that it can be cut into buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(part.clone()) for part in BEGIN.split([1, 2, 1])])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.parts)) - x


def quadratic(error: Tensor, _: Tensor) -> Tensor:
    return error.square().sum(1).mean() / 2


SAMPLES = MINIMUM + 0.03 * torch.randn(48, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
RADIUS = float((SAMPLES - SAMPLES.mean(0)).abs().max())
PROBLEM = Problem(
    model=Point, loss=quadratic, train=(SAMPLES, torch.zeros(48)), test=None, name="noisy quadratic", correct=None
)


def first_two() -> list[Algorithm]:
    """Of each algorithm its first settings, and one more: with a codec for the synchronous one."""
    kinds: dict[type, list[Algorithm]] = {}
    for variant in all_variants():
        kinds.setdefault(type(variant), []).append(variant)
    return [
        item
        for found in kinds.values()
        for item in {name_of(found[0]): found[0], name_of(found[-1]): found[-1]}.values()
    ]


def gain(algorithm: Algorithm) -> float:
    """How much more noise than R an algorithm lets through."""
    if isinstance(algorithm, OuterAlgorithm):
        return 1 / (1 - algorithm.outer_momentum)  # the sum of what momentum makes of one disturbance
    if getattr(getattr(algorithm, "collective", None), "lossy", False):
        return 2.0  # error feedback, or rounding whose size is that of the gradient, at most once more
    return 1.0


def slowness(algorithm: Algorithm) -> float:
    """By how much an update is less than a synchronous one."""
    if isinstance(algorithm, SoftsyncSGD):
        return 2.0 * algorithm.splits  # gradients are divided by their staleness, bounded by 2n
    return 1.0


def check_comes_near(algorithm: Algorithm) -> None:
    """Of rank 0 on 3 ranks, if the algorithm runs on 3."""
    steps = STEPS if slowness(algorithm) == 1.0 else 2 * STEPS
    how = Settings(steps=steps, batch_size=4, optimizer=partial(torch.optim.SGD, lr=RATE))
    num_ranks = 3 if runs_on(algorithm, 3) else 1
    simulation = Simulation(algorithm, PROBLEM, how, num_ranks, network=NETWORK, compute=COMPUTE)
    run = simulation.run()
    late = [value for update in run.updates() for value in update["staleness"]]
    late += [row["staleness"] or 0 for rows in run.metrics.values() for row in rows]
    assert max(late) <= STALENESS, "the bound below is for these"
    end = simulation.workers[0].trained.read_parameters()
    transient = (1 - RATE) ** ((steps - STALENESS) / slowness(algorithm)) * (FURTHEST + RADIUS)
    bound = gain(algorithm) * RADIUS + transient
    assert bound < 0.9 * FURTHEST, "the bound says something"
    law = f"{name_of(algorithm)}: training comes as near to the minimum as the noise lets it"
    for coordinate, (found, target) in enumerate(zip(end.tolist(), SAMPLES.mean(0).tolist(), strict=True)):
        where = f"after step {steps - 1}, on rank 0 of {num_ranks}, in coordinate {coordinate}"
        numbers = f"{found:.4g}, and the minimum is {target:.4g} (+- {bound:.2g})"
        assert_holds(law, abs(found - target) <= bound, f"{where}: {numbers}")


@pytest.mark.parametrize("algorithm", [*first_two(), RightGossip()], ids=name_of)
def test_comes_as_near_to_the_minimum_as_its_noise_lets_it(algorithm: Algorithm) -> None:
    check_comes_near(algorithm)


def test_coordinates_are_further_apart_than_the_bound() -> None:
    """So that a parameter in another's place is not near its minimum."""
    apart = (MINIMUM[:, None] - MINIMUM[None]).abs() + 9 * torch.eye(4)
    assert float(apart.min()) > 2 * FURTHEST - 1e-9
    assert len({round(float(value), 6) for value in (BEGIN - MINIMUM).abs()}) == len(BEGIN), "each its own way to go"


@pytest.mark.parametrize("kind", SCRAMBLING, ids=lambda kind: kind.__name__)
def test_a_gossip_that_scrambles_coordinates_does_not(kind: type[Gossip]) -> None:
    with pytest.raises(AssertionError, match=rf"{kind.__name__}: training comes .* rank 0 of 3, in coordinate \d"):
        check_comes_near(kind())
