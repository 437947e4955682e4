"""Expected order statistics: when the k-th of m independent workers is done, for any distribution of their times.

Any quantile function is integrated by quadrature; some distributions have closed forms. All formulas are derived here
(textbook results). Tests compare them with each other and with random draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, betaln, expit, ndtri, xlog1py, xlogy

from workbench.errors import ConfigError

Array = NDArray[np.float64]
Quantile = Callable[[Array], Array]

TOLERANCE = 1e-9  # relative tolerance of the quadrature
DEEPEST = 50  # most halvings of an interval: a jump of the quantile function is located to 2^-50 of it
# limits of the integral, as logits; beyond HIGH, 1 - u < 2^-40, the tail is a power
LOW, HIGH = -42.0, 40 * math.log(2)
# Gauss-Lobatto rule of 4 points with its Kronrod extensions to 7 and 13. Interval ends are nodes, so no jump hides
# after the last node.
NODES = np.array([-0.942882415695480, -math.sqrt(2 / 3), -0.641853342345781, -math.sqrt(1 / 5), -0.236383199662150])
NODES = np.concatenate([[-1.0], NODES, [0.0], -NODES[::-1], [1.0]])
FINE = np.array(
    [0.0158271919734802, 0.0942738402188500, 0.155071987336585, 0.188821573960182, 0.199773405226859, 0.224926465333340]
)
FINE = np.concatenate([FINE, [0.242611071901408], FINE[::-1]])
COARSE = np.array([77, 0, 432, 0, 625, 0, 672, 0, 625, 0, 432, 0, 77]) / 1470


def check_order(which: int, of: int) -> None:
    """Raise `ConfigError` unless `which` is from 1 to `of`."""
    if not (isinstance(which, int) and isinstance(of, int) and 1 <= which <= of):
        raise ConfigError(
            f"the {which}th of {of} workers: give whole numbers, 1 <= which <= of (the first is 1, the slowest is of)"
        )


def expected_order_statistic(quantile: Quantile, which: int, of: int) -> float:
    """Return E of the k-th smallest of m independent draws.

    It is the integral of Q(u) u^(k-1) (1-u)^(m-k) m! / ((k-1)! (m-k)!) over (0, 1), by adaptive Lobatto quadrature in
    the logit of u, where the ends are far away and the density is smooth. Jumps of Q (distributions with atoms) are
    located by halving. Beyond u = 1 - 2^-40, Q is taken as a power of 1 - u. The relative error is 1e-7 for the
    distributions of `arrivals`, including Pareto with shape 1.1.

    Args:
        quantile: Q, from u (n,) in (0, 1) to times (n,); non-decreasing.
        which: k, 1 for the first.
        of: m.

    Returns:
        Times in the unit of Q; infinity if the mean does not exist.

    >>> round(expected_order_statistic(lambda u: 2 + 3 * u, which=4, of=5), 9)  # uniform between 2 and 5: 2 + 3 * 4/6
    4.0

    Raises:
        ConfigError: `which` is not from 1 to `of`.
    """
    check_order(which, of)
    above = of - which + 1
    scale = betaln(which, above)

    def integrand(logit: Array) -> Array:
        u = expit(logit)
        density: Array = np.exp(xlogy(which, u) + xlog1py(above, -u) - scale)
        return np.asarray(quantile(u), float) * density

    middle, spread = math.log(which / above), math.sqrt(1 / which + 1 / above)
    steps = spread * np.concatenate([np.arange(0, 6, 0.5), 6 * 1.3 ** np.arange(20)])
    cuts = np.unique(np.clip(np.concatenate([middle - steps, middle + steps, [LOW, HIGH]]), LOW, HIGH))
    return _integrate(integrand, cuts) + _tail(quantile, above, scale)


def _integrate(function: Callable[[Array], Array], cuts: Array) -> float:
    """Integrate over [cuts[0], cuts[-1]], halving intervals until the two rules agree."""
    left, right, total = cuts[:-1], cuts[1:], 0.0
    for _ in range(DEEPEST):
        half = (right - left) / 2
        values = function((left + half)[:, None] + half[:, None] * NODES)
        fine, coarse = half * (values @ FINE), half * (values @ COARSE)
        size = abs(total) + np.abs(fine).sum()
        rough = np.abs(fine - coarse) > TOLERANCE * size / (8 * len(cuts))
        total += float(fine[~rough].sum())
        if not rough.any():
            return total
        middle = (left + half)[rough]
        left, right = np.concatenate([left[rough], middle]), np.concatenate([middle, right[rough]])
    return total + float(fine[rough].sum())


def _tail(quantile: Quantile, above: int, scale: float) -> float:
    """Integrate over u > 1 - 2^-40, where Q(1 - v) is a power of v; u^(k-1) is 1 there, for m far below 2^40."""
    near, nearer = np.asarray(quantile(np.array([1 - 2.0**-40, 1 - 2.0**-46])), float)
    power = math.log2(nearer / near) / 6 if near > 0 and nearer > 0 else 0.0
    if power >= above:
        return math.inf
    return float(near) * math.exp(above * math.log(2.0**-40) - scale) / (above - power)


def exponential_order_statistic(shift_s: float, scale_s: float, which: int, of: int) -> float:
    """Return shift + scale (H_m - H_(m-k)), the k-th of m times shift + Exp(1 / scale); H are the harmonic numbers.

    >>> [round(exponential_order_statistic(0.0, 1.0, which, 100), 2) for which in (100, 96)]
    [5.19, 3.1]
    """
    check_order(which, of)
    return shift_s + scale_s * math.fsum(1 / number for number in range(of - which + 1, of + 1))


def pareto_order_statistic(minimum_s: float, shape: float, which: int, of: int) -> float:
    """Return minimum Gamma(m+1) Gamma(m-k+1-1/a) / (Gamma(m-k+1) Gamma(m+1-1/a)): k-th of m Pareto times, shape a.

    >>> [round(pareto_order_statistic(1.0, 2.5, which, 100), 2) for which in (100, 96)]
    [9.41, 3.52]
    """
    check_order(which, of)
    above = of - which + 1
    if above <= 1 / shape:
        return math.inf
    return minimum_s * math.exp(
        math.lgamma(of + 1) - math.lgamma(above) + math.lgamma(above - 1 / shape) - math.lgamma(of + 1 - 1 / shape)
    )


def uniform_order_statistic(low_s: float, high_s: float, which: int, of: int) -> float:
    """Return low + (high - low) k / (m + 1).

    >>> uniform_order_statistic(1.0, 2.0, 3, 3)
    1.75
    """
    check_order(which, of)
    return low_s + (high_s - low_s) * which / (of + 1)


def blom(mean_s: float, deviation_s: float, which: int, of: int) -> float:
    """Return Blom's approximation for a normal distribution: mean + deviation Phi^-1((k - 3/8) / (m + 1/4)).

    As recalled. The error is at most 0.03 deviations.

    >>> [round(blom(0.0, 1.0, which, 100), 2) for which in (100, 96)]
    [2.5, 1.68]
    """
    check_order(which, of)
    return float(mean_s + deviation_s * ndtri((which - 0.375) / (of + 0.25)))


def quantile_of_order_statistic(quantile: Quantile, which: int, of: int, probability: float = 0.5) -> float:
    """Return the time by which the k-th of m is done with this probability: Q at a quantile of Beta(k, m-k+1).

    >>> round(quantile_of_order_statistic(lambda u: u, 1, 1, 0.25), 12)
    0.25
    """
    check_order(which, of)
    return float(np.asarray(quantile(np.array([betaincinv(which, of - which + 1, probability)])))[0])
