"""Asynchrony as momentum: with memoryless compute times, p workers act on average like one with momentum 1 - 1/p."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import ConfigError


def implicit_momentum(num_workers: int) -> float:
    """Return 1 - 1/p, for asynchronous SGD in which each worker is equally likely to make the next update.

    Worker k holds parameters v_k. On average an update moves w by -eta times the gradient at the mean of all v_k, s.
    Then v_k of that worker becomes w, so s <- (1 - 1/p) s + (1/p) w. With a linear gradient, in expectation:
    w[t+1] - w[t] = (1 - 1/p) (w[t] - w[t-1]) - (eta / p) g(w[t]). Derived here; the idea is Mitliagkas et al. (2016),
    as recalled.

    >>> implicit_momentum(1), implicit_momentum(8)
    (0.0, 0.875)

    Raises:
        ConfigError: there are no workers.
    """
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigError(f"num_workers={num_workers}: give a whole number, 1 or more")
    return 1 - 1 / num_workers


def quadratic_paths(staleness: ArrayLike, step: float) -> NDArray[np.float64]:
    """Return the parameter of SGD on w^2 / 2 after each update, from w = 1, with recorded staleness.

    Args:
        staleness: (R, T) of T updates in R repetitions; parameters before the first update are 1.
        step: eta.

    Returns:
        (R, T + 1)
    """
    late = np.atleast_2d(np.asarray(staleness, np.int64))
    paths = np.ones((late.shape[0], late.shape[1] + 1))
    everyone = np.arange(len(late))
    for t in range(late.shape[1]):
        paths[:, t + 1] = paths[:, t] - step * paths[everyone, np.maximum(t - late[:, t], 0)]
    return paths


def fitted_momentum(paths: ArrayLike) -> tuple[float, float]:
    """Fit (a, b) of w[t+1] - w[t] = a (w[t] - w[t-1]) - b w[t], by least squares over the mean of paths (R, T + 1).

    Raises:
        ConfigError: there are fewer than three updates.
    """
    mean = np.atleast_2d(np.asarray(paths, float)).mean(0)
    if len(mean) < 4:
        raise ConfigError(f"a path of {len(mean) - 1} updates: give three or more to fit a momentum")
    moves = np.diff(mean)
    found, *_ = np.linalg.lstsq(np.stack([moves[:-1], -mean[1:-1]], axis=1), moves[1:], rcond=None)
    return float(found[0]), float(found[1])


__all__ = ["fitted_momentum", "implicit_momentum", "quadratic_paths"]
