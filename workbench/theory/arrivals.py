"""Arrival times of a worker's gradient: distributions of its seconds, each with the mean of the N-th of N + b.

Workers are independent and every step is drawn again, as `costs` simulates them. A distribution's expected order
statistic has a closed form, or is computed by quadrature; `order_statistics` has both. All derived here.
Distributions of single values: `atoms`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
from scipy.special import ndtr, ndtri

from workbench.errors import ConfigError
from workbench.theory.order_statistics import (
    Array,
    Quantile,
    check_order,
    expected_order_statistic,
    exponential_order_statistic,
    pareto_order_statistic,
    uniform_order_statistic,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival(ABC):
    """A distribution of one worker's seconds."""

    @abstractmethod
    def cdf(self, seconds: Array) -> Array:
        """Return the probability of at most `seconds`, shape (n,)."""

    @abstractmethod
    def quantile(self, u: Array) -> Array:
        """Return the smallest seconds whose `cdf` is at least u, for u in (0, 1), shape (n,)."""

    @property
    @abstractmethod
    def mean_s(self) -> float:
        """Mean of one worker; infinite if it does not exist."""

    def expected_order_statistic(self, which: int, of: int) -> float:
        """Return the mean seconds until `which` of `of` workers are done.

        Raises:
            ConfigError: `which` is not from 1 to `of`.
        """
        return expected_order_statistic(self.quantile, which, of)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedExponentialTime(Arrival):
    """shift + Exp(1 / scale)."""

    shift_s: float
    scale_s: float

    def __post_init__(self) -> None:
        check_parameters(self, self.shift_s >= 0 and self.scale_s >= 0, "shift_s and scale_s must be 0 or more")

    def cdf(self, seconds: Array) -> Array:
        late = np.asarray(seconds, float) - self.shift_s
        with np.errstate(divide="ignore", invalid="ignore"):
            found = -np.expm1(-np.maximum(late, 0) / self.scale_s) if self.scale_s else (late >= 0).astype(float)
        return np.asarray(found, float)

    def quantile(self, u: Array) -> Array:
        return np.asarray(self.shift_s - self.scale_s * np.log1p(-u), float)

    @property
    def mean_s(self) -> float:
        return self.shift_s + self.scale_s

    def expected_order_statistic(self, which: int, of: int) -> float:
        return exponential_order_statistic(self.shift_s, self.scale_s, which, of)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalTime(Arrival):
    """median exp(sigma N(0, 1))."""

    median_s: float
    sigma: float

    def __post_init__(self) -> None:
        check_parameters(self, self.median_s > 0 and self.sigma >= 0, "median_s must be more than 0, sigma 0 or more")

    @classmethod
    def of_mean(cls, mean_s: float, sigma: float) -> LognormalTime:
        """Make the distribution with this mean, as `costs.Lognormal` has it: median = mean exp(-sigma^2 / 2)."""
        return cls(median_s=mean_s * math.exp(-(sigma**2) / 2), sigma=sigma)

    def cdf(self, seconds: Array) -> Array:
        with np.errstate(divide="ignore"):
            late = np.log(np.maximum(seconds, 0) / self.median_s)
        return np.asarray(ndtr(late / self.sigma) if self.sigma else (late >= 0).astype(float), float)

    def quantile(self, u: Array) -> Array:
        return np.asarray(self.median_s * np.exp(self.sigma * ndtri(u)), float)

    @property
    def mean_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoTime(Arrival):
    """P(more than x seconds) = (minimum / x)^shape from `minimum_s` on."""

    minimum_s: float
    shape: float

    def __post_init__(self) -> None:
        check_parameters(self, self.minimum_s > 0 and self.shape > 0, "minimum_s and shape must be more than 0")

    def cdf(self, seconds: Array) -> Array:
        return np.asarray(1 - (self.minimum_s / np.maximum(seconds, self.minimum_s)) ** self.shape, float)

    def quantile(self, u: Array) -> Array:
        return np.asarray(self.minimum_s * np.exp(-np.log1p(-u) / self.shape), float)

    @property
    def mean_s(self) -> float:
        return self.expected_order_statistic(1, 1)

    def expected_order_statistic(self, which: int, of: int) -> float:
        return pareto_order_statistic(self.minimum_s, self.shape, which, of)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTime(Arrival):
    """Equally likely between `low_s` and `high_s`."""

    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        check_parameters(self, 0 <= self.low_s <= self.high_s, "0 <= low_s <= high_s")

    def cdf(self, seconds: Array) -> Array:
        width = self.high_s - self.low_s
        seconds = np.asarray(seconds, float)
        return np.clip((seconds - self.low_s) / width, 0, 1) if width else (seconds >= self.low_s).astype(float)

    def quantile(self, u: Array) -> Array:
        return np.asarray(self.low_s + (self.high_s - self.low_s) * u, float)

    @property
    def mean_s(self) -> float:
        return (self.low_s + self.high_s) / 2

    def expected_order_statistic(self, which: int, of: int) -> float:
        return uniform_order_statistic(self.low_s, self.high_s, which, of)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NormalTime(Arrival):
    """N(mean, deviation^2), including negative seconds: a model of small deviations. See `order_statistics.blom`."""

    mean_s: float
    deviation_s: float

    def __post_init__(self) -> None:
        check_parameters(self, self.deviation_s >= 0, "deviation_s must be 0 or more")

    def cdf(self, seconds: Array) -> Array:
        late = np.asarray(seconds, float) - self.mean_s
        return np.asarray(ndtr(late / self.deviation_s) if self.deviation_s else (late >= 0).astype(float), float)

    def quantile(self, u: Array) -> Array:
        return np.asarray(self.mean_s + self.deviation_s * ndtri(u), float)

    def expected_order_statistic(self, which: int, of: int) -> float:
        return self.mean_s + self.deviation_s * standard_normal_order_statistic(which, of)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTime(Arrival):
    """Any distribution with a known quantile function: `shift_s` + `scale_s` times `quantile_of(u)`.

    A distribution of `costs.stragglers` gives a step's slowness: `QuantileTime(quantile_of=lognormal.quantile,
    scale_s=compute_s)`.
    """

    quantile_of: Quantile
    scale_s: float = 1.0
    shift_s: float = 0.0

    def __post_init__(self) -> None:
        check_parameters(self, self.scale_s >= 0, "scale_s must be 0 or more")

    def cdf(self, seconds: Array) -> Array:
        """Invert the quantile function by bisection."""
        seconds = np.asarray(seconds, float)
        low, high = np.zeros(seconds.shape), np.ones(seconds.shape)
        for _ in range(52):
            middle = (low + high) / 2
            reached = self.quantile(middle) <= seconds
            low, high = np.where(reached, middle, low), np.where(reached, high, middle)
        return (low + high) / 2

    def quantile(self, u: Array) -> Array:
        return np.asarray(
            self.shift_s + self.scale_s * np.asarray(self.quantile_of(np.asarray(u, float)), float), float
        )

    @property
    def mean_s(self) -> float:
        return self.expected_order_statistic(1, 1)

    def expected_order_statistic(self, which: int, of: int) -> float:
        return self.shift_s + self.scale_s * expected_order_statistic(self.quantile_of, which, of)


@lru_cache(maxsize=4096)
def standard_normal_order_statistic(which: int, of: int) -> float:
    """Return the expected k-th smallest of m standard normal numbers, by quadrature of the larger half.

    >>> round(standard_normal_order_statistic(2, 2) * math.sqrt(math.pi), 9)
    1.0
    """
    check_order(which, of)
    mirrored = of + 1 - which
    if which <= mirrored:  # symmetric; the upper half has the larger numbers, and the median is 0
        return -standard_normal_order_statistic(mirrored, of) if which < mirrored else 0.0
    return expected_order_statistic(ndtri, which, of)


def check_parameters(arrival: Any, good: bool, what: str) -> None:
    """Raise `ConfigError` unless the parameters are `good`; `what` says what they must be."""
    if not good:
        raise ConfigError(f"{arrival}: {what}")
