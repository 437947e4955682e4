"""The largest stable step of delayed SGD on a quadratic, with and without momentum.

w[t+1] = w[t] + mu (w[t] - w[t-1]) - eta lambda w[t-tau]: one mode of curvature lambda, a gradient tau updates late,
and torch's heavy-ball momentum mu. Its characteristic polynomial is z^(tau+1) - (1 + mu) z^tau + mu z^(tau-1) + eta
lambda.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from workbench.errors import ConfigError


def stability_limit(delay: int, momentum: float = 0.0) -> float:
    """Return the eta lambda below which parameters shrink.

    | tau | mu = 0 | mu |
    |---|---|---|
    | 0 | 2 | 2 (1 + mu) |
    | 1 | 1 | 1 - mu |
    | tau | 2 sin(pi / (2 (2 tau + 1))) | abs(z - 1) abs(z - mu) at the first z = e^(i theta) that is a root |

    Roots first leave the unit circle where arg((z - 1) (z - mu) z^(tau-1)) = pi, and the argument grows with theta.
    Derived here.

    Args:
        delay: tau, in updates; Pipe-SGD's is K - 1.
        momentum: mu, 0 or more and below 1.

    >>> [round(stability_limit(delay), 3) for delay in range(5)]
    [2.0, 1.0, 0.618, 0.445, 0.347]
    >>> [round(stability_limit(delay, 0.9), 4) for delay in range(5)]
    [3.8, 0.1, 0.0512, 0.0348, 0.0265]

    Raises:
        ConfigError: the delay or the momentum is out of range.
    """
    if not isinstance(delay, int) or delay < 0:
        raise ConfigError(f"delay={delay}: give a whole number of updates, 0 or more")
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum={momentum}: give a number from 0 to below 1")
    if delay == 0:
        return 2 * (1 + momentum)
    if delay == 1:
        return 1 - momentum
    if momentum == 0:
        return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))

    def excess(theta: float) -> float:
        return theta / 2 + math.atan2(math.sin(theta), math.cos(theta) - momentum) + (delay - 1) * theta - math.pi / 2

    theta = brentq(excess, 0.0, math.pi, xtol=1e-14)
    return 2 * math.sin(theta / 2) * abs(complex(math.cos(theta) - momentum, math.sin(theta)))


def spectral_radius(step: float, delay: int, momentum: float = 0.0) -> float:
    """Return the factor by which parameters grow in an update, in the long run, at eta lambda = `step`.

    It is the largest root's modulus.

    >>> spectral_radius(0.5, 0)
    0.5
    """
    coefficients = np.zeros(max(delay + 2, 3))  # from z^(tau+1) on; with tau = 0, times z
    coefficients[:3] = 1, -(1 + momentum), momentum
    coefficients[delay + 1] += step
    return float(np.abs(np.roots(coefficients)).max())
