"""Distributions of equal workers that are slow at random: a new factor in every step, with quantiles and mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from workbench.costs.stragglers.base import Array, Independent, Stragglers, check_numbers, check_rule
from workbench.errors import ConfigError
from workbench.rng import generator


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Independent):
    """Every worker is always slower by the same factor."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "factor", above=0)

    def quantile(self, level: ArrayLike) -> Array:
        return np.full(np.shape(level), float(self.factor))

    @property
    def mean(self) -> float:
        return self.factor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal(Independent):
    """exp(N(-sigma^2 / 2, sigma^2)), of mean 1, drawn in each step."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < float("inf"):
            raise ConfigError(f"Lognormal(sigma={self.sigma}): give a standard deviation of the logarithm, 0 or more")

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        normal = generator(seed, "lognormal", 0, step).standard_normal(num_workers)
        return np.exp(self.sigma * normal - self.sigma**2 / 2)

    def quantile(self, level: ArrayLike) -> Array:
        return np.exp(self.sigma * normal_quantile(level) - self.sigma**2 / 2)

    @property
    def mean(self) -> float:
        return 1.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedExponential(Independent):
    """`shift` plus an exponential factor of mean `scale`: a minimum time, and a memoryless delay."""

    shift: float = 1.0
    scale: float

    def __post_init__(self) -> None:
        check_numbers(self, "shift", "scale", least=0)
        check_rule(self, self.shift + self.scale > 0, "shift or scale must be above 0, or work takes no time")

    def quantile(self, level: ArrayLike) -> Array:
        return self.shift - self.scale * np.log1p(-np.asarray(level, dtype=np.float64))

    @property
    def mean(self) -> float:
        return self.shift + self.scale


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto(Independent):
    """At least `scale`; P(factor > x) = (scale / x)^shape.

    Heavy tail: infinite variance if shape <= 2, infinite mean if shape <= 1.
    """

    shape: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(self, "shape", "scale", above=0)

    def quantile(self, level: ArrayLike) -> Array:
        found: Array = self.scale * (1 - np.asarray(level, dtype=np.float64)) ** (-1 / self.shape)
        return found

    @property
    def mean(self) -> float:
        return self.scale * self.shape / (self.shape - 1) if self.shape > 1 else float("inf")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Independent):
    """Uniform from `low` to `high`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check_numbers(self, "low", "high", least=0)
        check_rule(self, self.low <= self.high and self.high > 0, "low at most high, and high above 0")

    def quantile(self, level: ArrayLike) -> Array:
        return self.low + (self.high - self.low) * np.asarray(level, dtype=np.float64)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bimodal(Independent):
    """`factor` with this probability, otherwise 1: an occasional step that takes several times as long."""

    probability: float
    factor: float

    def __post_init__(self) -> None:
        check_numbers(self, "probability", least=0)
        check_rule(self, self.probability <= 1, "probability is from 0 to 1")
        check_numbers(self, "factor", above=0)

    def quantile(self, level: ArrayLike) -> Array:
        low, high, num_low = sorted_modes(self.probability, self.factor)
        return np.where(np.asarray(level, dtype=np.float64) < num_low, low, high)

    @property
    def mean(self) -> float:
        return 1 + self.probability * (self.factor - 1)


def sorted_modes(probability: float, factor: float) -> tuple[float, float, float]:
    """Return (lower factor, higher factor, probability of the lower)."""
    return (1.0, factor, 1 - probability) if factor >= 1 else (factor, 1.0, probability)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Empirical(Independent):
    """Draw one of these factors, such as measured ones, with equal probability and with replacement."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(_factors_of(self, self.values))))

    def __str__(self) -> str:
        return f"Empirical(values={len(self.values)} of them, {self.values[0]:.3g} to {self.values[-1]:.3g})"

    @classmethod
    def from_seconds(cls, seconds: ArrayLike) -> Self:
        """Make the distribution of measured seconds divided by their median; any shape, NaN for missing values."""
        return cls(values=tuple(_over_median(seconds).ravel().tolist()))

    def quantile(self, level: ArrayLike) -> Array:
        number = np.asarray(level, dtype=np.float64) * len(self.values)
        return np.array(self.values)[np.minimum(number.astype(np.int64), len(self.values) - 1)]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalByRank(Stragglers):
    """`Empirical` for each rank: rank r draws from row r, to model different machines. Rows repeat for more ranks."""

    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        check_rule(self, len(self.rows) > 0, "rows of factors, one a rank")
        object.__setattr__(self, "rows", tuple(tuple(sorted(_factors_of(self, row))) for row in self.rows))

    def __str__(self) -> str:
        return f"EmpiricalByRank(rows of {len(self.rows)} ranks)"

    @classmethod
    def from_seconds(cls, seconds: ArrayLike) -> Self:
        """Make the distribution of measured seconds (ranks, steps) divided by their median; NaN for missing values."""
        factors = _over_median(seconds)
        if factors.ndim != 2:
            raise ConfigError(
                f"EmpiricalByRank needs seconds of shape (ranks, steps), not {factors.shape}; or use Empirical"
            )
        return cls(rows=tuple(tuple(row[np.isfinite(row)].tolist()) for row in factors))

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        level = generator(seed, "empiricalbyrank", 0, step).random(num_workers)
        values, first, length = _ragged(self.rows)
        row = np.arange(num_workers) % len(self.rows)
        return values[first[row] + (level * length[row]).astype(np.int64)]


@lru_cache(maxsize=8)
def _ragged(rows: tuple[tuple[float, ...], ...]) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """Return all rows joined, the begin of each, and its length."""
    length = np.array([len(row) for row in rows])
    return np.concatenate([np.array(row) for row in rows]), np.cumsum(length) - length, length


def _over_median(seconds: ArrayLike) -> Array:
    found = np.asarray(seconds, dtype=np.float64)
    measured = found[np.isfinite(found)]
    if not measured.size or np.median(measured) <= 0:
        raise ConfigError("no seconds were measured: give seconds of real steps, above 0")
    return found / np.median(measured) if found.ndim > 1 else measured / np.median(measured)


def _factors_of(distribution: Stragglers, values: Sequence[Any]) -> list[float]:
    found = [float(value) for value in values if np.isfinite(value)]
    if not found or min(found) < 0 or max(found) == 0:
        raise ConfigError(
            f"{type(distribution).__name__}: give measured factors, 0 or more, at least one a row and not all 0"
        )
    return found


def normal_quantile(level: ArrayLike) -> Array:
    """Return quantiles of the standard normal distribution, any shape."""
    found: Array = torch.special.ndtri(torch.from_numpy(np.asarray(level, dtype=np.float64))).numpy()
    return found
