"""Injected staleness: the parameters at which a gradient is computed, and how often each staleness is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.algorithms import (
    Constant,
    Empirical,
    Geometric,
    Staleness,
    StaleSGD,
    SynchronousSGD,
    Uniform,
    get,
    parse_staleness,
)
from workbench.errors import ConfigError
from workbench.rng import generator
from workbench.runtimes.reference import ReferenceRuntime


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    return parameters - rank * step


def oracle(staleness: list[int], num_steps: int, lr: float) -> list[float]:
    """One number, by the formula: ranks 0, 1, 2 pull to 0, t, 2t."""
    weights = [1.0]
    for step in range(num_steps):
        weights.append(weights[-1] - lr * (weights[step - min(staleness[step], step)] - step))
    return weights


KINDS: list[Staleness] = [Constant(0), Constant(3), Uniform(1, 4), Geometric(2.0), Empirical((0, 5), (3.0, 1.0))]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_gradient_is_as_stale_as_drawn(kind: Staleness) -> None:
    algorithm = StaleSGD(staleness=kind)
    driver = ReferenceRuntime(algorithm, 3, pull, lr=0.2, seed=7).run(30)
    drawn = [algorithm.drawn(7, step) for step in range(30)]
    assert [update.staleness for update in driver.ranks[2].applied] == [
        min(late, step) for step, late in enumerate(drawn)
    ]
    expected = oracle(drawn, 30, 0.2)
    for rank in driver.ranks:
        assert np.allclose([float(one[0]) for one in rank.seen], expected[1:], rtol=1e-13)
        assert [step for step, _ in rank.backwards] == list(range(30)), "every minibatch once"


def test_fresh_gradients_are_synchronous() -> None:
    ours, theirs = (
        ReferenceRuntime(StaleSGD(staleness=Constant(0)), 3, pull, lr=0.2).run(9),
        ReferenceRuntime(SynchronousSGD(), 3, pull, lr=0.2).run(9),
    )
    assert all(torch.equal(one, other) for one, other in zip(ours.ranks[1].seen, theirs.ranks[1].seen, strict=True))


def test_every_step_draws_anew_and_all_ranks_the_same() -> None:
    """From the seed and the step alone: each of 0, ..., 3 is drawn in 40 steps, and no two seeds draw the same."""
    algorithm = StaleSGD(staleness=Uniform(0, 3))
    drawn = [[algorithm.drawn(seed, step) for step in range(40)] for seed in (0, 1)]
    assert [set(numbers) for numbers in drawn] == [{0, 1, 2, 3}] * 2
    assert drawn[0] != drawn[1]


def test_a_ramp_rises_to_what_is_drawn() -> None:
    algorithm = StaleSGD(staleness=Constant(4), ramp_steps=8)
    driver = ReferenceRuntime(algorithm, 2, pull).run(11)
    assert [update.staleness for update in driver.ranks[0].applied] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("stop", range(7))
def test_resumed_at_any_step(stop: int) -> None:
    algorithm = StaleSGD(staleness=Uniform(0, 4))
    unbroken = ReferenceRuntime(algorithm, 3, pull, lr=0.2).run(7)
    first = ReferenceRuntime(algorithm, 3, pull, lr=0.2).run(7, stop_after=stop)
    assert all(len(rank.memory) == min(stop + 1, 5) for rank in first.ranks)
    second = ReferenceRuntime(algorithm, 3, pull, lr=0.2)
    second.continue_from(first)
    second.run(7, first_step=stop + 1, resumed=first.states)
    assert torch.equal(second.ranks[0].parameters, unbroken.ranks[0].parameters)


@pytest.mark.parametrize(
    ("kind", "mean", "variance"),
    [
        (Constant(4), 4, 0),
        (Uniform(2, 8), 5, 4),  # ((8 - 2 + 1)^2 - 1) / 12
        (Geometric(3.0, 1000), 3, 12),  # m (1 + m)
        (Empirical((0, 1, 5), (3.0, 2.0, 1.0)), 7 / 6, 27 / 6 - 49 / 36),
        (Empirical((1, 3)), 2, 1),
    ],
    ids=str,
)
def test_moments_of_what_is_drawn(kind: Staleness, mean: float, variance: float) -> None:
    """10 000 draws: five standard errors of the mean; 15 % of the variance."""
    drawn = np.array([kind.draw(generator(1, "staleness", step=step)) for step in range(10_000)])
    assert abs(drawn.mean() - mean) <= 5 * (variance / 10_000) ** 0.5
    assert drawn.var() == pytest.approx(variance, rel=0.15)
    assert drawn.min() >= 0 and drawn.max() <= kind.longest


def test_what_is_longer_is_cut() -> None:
    assert Geometric(20.0).longest == 160
    assert max(Geometric(5.0, 3).draw(generator(0, "staleness", step=step)) for step in range(50)) == 3


def test_named_on_the_command_line() -> None:
    algorithm = get("stale-sgd", staleness="geometric:20", ramp_steps=3)
    assert isinstance(algorithm, StaleSGD) and algorithm.staleness == Geometric(20.0)


@pytest.mark.parametrize(
    "text",
    [
        "constantly:4",
        "constant",
        "constant:x",
        "constant:-1",
        "uniform:3",
        "uniform:4:1",
        "geometric:-2",
        "empirical:1,2@1",
        "empirical:",
    ],
)
def test_wrong_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_staleness(text)


@pytest.mark.parametrize("wrong", [{"staleness": 4}, {"ramp_steps": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StaleSGD(**wrong)
