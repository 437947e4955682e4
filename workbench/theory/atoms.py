"""Arrival distributions of single values: constant, bimodal, empirical. Their order statistics are finite sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from scipy.special import betainc

from workbench.theory.arrivals import Arrival, check_parameters
from workbench.theory.order_statistics import Array, check_order


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantTime(Arrival):
    """A constant time."""

    seconds: float

    def __post_init__(self) -> None:
        check_parameters(self, self.seconds >= 0, "seconds must be 0 or more")

    def cdf(self, seconds: Array) -> Array:
        return (np.asarray(seconds) >= self.seconds).astype(float)

    def quantile(self, u: Array) -> Array:
        return np.full_like(u, self.seconds, dtype=float)

    @property
    def mean_s(self) -> float:
        return self.seconds

    def expected_order_statistic(self, which: int, of: int) -> float:
        check_order(which, of)
        return self.seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BimodalTime(Arrival):
    """`usual_s`, or `slow_s` with a probability. The order statistic is exact."""

    usual_s: float
    slow_s: float
    probability: float

    def __post_init__(self) -> None:
        check_parameters(
            self,
            0 <= self.usual_s <= self.slow_s and 0 <= self.probability <= 1,
            "0 <= usual_s <= slow_s, probability from 0 to 1",
        )

    def cdf(self, seconds: Array) -> Array:
        seconds = np.asarray(seconds, float)
        return np.where(seconds >= self.slow_s, 1.0, np.where(seconds >= self.usual_s, 1 - self.probability, 0.0))

    def quantile(self, u: Array) -> Array:
        return np.where(np.asarray(u) <= 1 - self.probability, self.usual_s, self.slow_s)

    @property
    def mean_s(self) -> float:
        return self.usual_s + self.probability * (self.slow_s - self.usual_s)

    def expected_order_statistic(self, which: int, of: int) -> float:
        check_order(which, of)
        return _of_atoms(np.array([self.usual_s, self.slow_s]), np.array([0.0, 1 - self.probability, 1.0]), which, of)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalTime(Arrival):
    """Each of some measured values, equally likely: a step function.

    The order statistic is exact, by the Beta distribution of ranks.
    """

    values_s: tuple[float, ...]

    def __post_init__(self) -> None:
        check_parameters(
            self,
            len(self.values_s) > 0 and all(value >= 0 for value in self.values_s),
            "values_s: one or more seconds of 0 or more",
        )
        object.__setattr__(self, "values_s", tuple(sorted(map(float, self.values_s))))

    def cdf(self, seconds: Array) -> Array:
        return np.asarray(np.searchsorted(np.array(self.values_s), seconds, side="right") / len(self.values_s), float)

    def quantile(self, u: Array) -> Array:
        count = len(self.values_s)
        which = np.clip(np.ceil(np.asarray(u) * count).astype(int) - 1, 0, count - 1)
        return np.asarray(np.array(self.values_s)[which], float)

    @property
    def mean_s(self) -> float:
        return math.fsum(self.values_s) / len(self.values_s)

    def expected_order_statistic(self, which: int, of: int) -> float:
        check_order(which, of)
        count = len(self.values_s)
        return _of_atoms(np.array(self.values_s), np.arange(count + 1) / count, which, of)


def _of_atoms(values: Array, edges: Array, which: int, of: int) -> float:
    """Return sum_i x_i (I(F_i) - I(F_(i-1))), with I the distribution function of Beta(k, m-k+1)."""
    return float(values @ np.diff(betainc(which, of - which + 1, edges)))
