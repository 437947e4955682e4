"""Asynchrony as momentum: the derived recursion, against workers that take turns at random."""

import numpy as np
import pytest

from workbench.errors import ConfigError
from workbench.theory.implicit_momentum import fitted_momentum, implicit_momentum, quadratic_paths


def staleness_of_random_turns(num_workers: int, repetitions: int, updates: int) -> np.ndarray:
    """(repetitions, updates): each update is that of a worker drawn at random."""
    draws = np.random.default_rng(0).integers(0, num_workers, (repetitions, updates))
    read = np.zeros((repetitions, num_workers), int)
    found = np.empty_like(draws)
    for t in range(updates):
        worker = draws[:, t, None]
        found[:, t] = t - np.take_along_axis(read, worker, 1)[:, 0]
        np.put_along_axis(read, worker, t + 1, 1)
    return found


@pytest.mark.parametrize("num_workers", [2, 5])
def test_random_turns_are_momentum(num_workers: int) -> None:
    paths = quadratic_paths(staleness_of_random_turns(num_workers, 4000, 40), 0.2)
    momentum, step = fitted_momentum(paths)
    assert momentum == pytest.approx(implicit_momentum(num_workers), rel=0.03)
    assert step == pytest.approx(0.2 / num_workers, rel=0.05)


def test_fresh_gradients_have_none() -> None:
    paths = quadratic_paths(np.zeros((1, 5), int), 0.5)
    np.testing.assert_allclose(paths[0], 0.5 ** np.arange(6))
    assert quadratic_paths([[0, 1, 1]], 0.5)[0].tolist() == [1, 0.5, 0, -0.25]


def test_the_recursion_itself_is_found() -> None:
    path = [1.0, 0.9]
    for _ in range(10):
        path.append(path[-1] + 0.6 * (path[-1] - path[-2]) - 0.1 * path[-1])
    assert fitted_momentum(path) == pytest.approx((0.6, 0.1))


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        implicit_momentum(0)
    with pytest.raises(ConfigError, match="three or more"):
        fitted_momentum([1.0, 0.5, 0.2])
