"""Distributions of injected staleness, in whole numbers of updates, and their notation on the command line."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from workbench.arguments import is_number, is_whole
from workbench.errors import ConfigError
from workbench.naming import unknown


class Staleness(ABC):
    """A distribution over 0, 1, ..., `longest` updates."""

    __slots__ = ()

    @property
    @abstractmethod
    def longest(self) -> int:
        """The largest value that it draws."""

    @abstractmethod
    def draw(self, numbers: np.random.Generator) -> int:
        """Return one value."""


@final
@dataclass(frozen=True, slots=True)
class Constant(Staleness):
    """Always `updates`."""

    updates: int

    def __post_init__(self) -> None:
        _check_whole(self, updates=self.updates)

    @property
    def longest(self) -> int:
        return self.updates

    def draw(self, numbers: np.random.Generator) -> int:
        return self.updates


@final
@dataclass(frozen=True, slots=True)
class Uniform(Staleness):
    """`low`, ..., `high`, all equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_whole(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise ConfigError(f"{self}: low must be at most high")

    @property
    def longest(self) -> int:
        return self.high

    def draw(self, numbers: np.random.Generator) -> int:
        return int(numbers.integers(self.low, self.high, endpoint=True))


@final
@dataclass(frozen=True, slots=True)
class Geometric(Staleness):
    """P(s) = q (1-q)^s with q = 1 / (1 + mean): mostly fresh, sometimes very old.

    Larger values become `cut` (None: 8 times the mean).
    """

    mean: float
    cut: int | None = None

    def __post_init__(self) -> None:
        if not is_number(self.mean) or not 0 <= self.mean < math.inf:
            raise ConfigError(f"{self}: the mean must be a number of updates, 0 or more")
        if self.cut is not None:
            _check_whole(self, cut=self.cut)

    @property
    def longest(self) -> int:
        return math.ceil(8 * self.mean) if self.cut is None else self.cut

    def draw(self, numbers: np.random.Generator) -> int:
        return min(int(numbers.geometric(1 / (1 + self.mean))) - 1, self.longest)


@final
@dataclass(frozen=True, slots=True)
class Empirical(Staleness):
    """`values` with probabilities in proportion to `weights` (None: equal), such as the measured staleness of a run."""

    values: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError(f"{self}: give at least one value")
        _check_whole(self, **{f"values[{position}]": value for position, value in enumerate(self.values)})
        if self.weights is not None and (
            len(self.weights) != len(self.values) or min(self.weights) < 0 or not 0 < sum(self.weights) < math.inf
        ):
            raise ConfigError(f"{self}: give one weight for each value, none negative and not all 0")

    @property
    def longest(self) -> int:
        return max(self.values)

    def draw(self, numbers: np.random.Generator) -> int:
        weights = self.weights or (1.0,) * len(self.values)
        return int(numbers.choice(self.values, p=np.array(weights) / sum(weights)))


def _check_whole(owner: Staleness, **numbers: int) -> None:
    for name, value in numbers.items():
        if not is_whole(value) or value < 0:
            raise ConfigError(f"{owner}: {name} must be a whole number of updates, 0 or more")


def _empirical(text: str) -> Empirical:
    values, _, weights = text.partition("@")
    return Empirical(tuple(map(int, values.split(","))), tuple(map(float, weights.split(","))) if weights else None)


_KINDS: dict[str, tuple[str, Callable[[list[str]], Staleness]]] = {
    "constant": ("constant:4", lambda words: Constant(*map(int, words))),
    "uniform": ("uniform:0:8", lambda words: Uniform(*map(int, words))),
    "geometric": ("geometric:20", lambda words: Geometric(float(words[0]), *map(int, words[1:]))),
    "empirical": ("empirical:0,1,5@3,2,1", lambda words: _empirical(*words)),
}


def parse_staleness(text: str) -> Staleness:
    """Return a distribution from its notation on the command line.

    >>> [parse_staleness(text) for text in ("constant:4", "uniform:0:8")]
    [Constant(updates=4), Uniform(low=0, high=8)]
    >>> [parse_staleness(text) for text in ("geometric:20", "geometric:20:50", "empirical:0,1,5@3,2,1")]
    [Geometric(mean=20.0, cut=None), Geometric(mean=20.0, cut=50), Empirical(values=(0, 1, 5), weights=(3.0, 2.0, 1.0))]

    Raises:
        ConfigError: no such distribution, or numbers that it does not take.
    """
    kind, *words = text.strip().lower().split(":")
    if kind not in _KINDS:
        raise unknown("distribution of staleness", kind, _KINDS)
    example, make = _KINDS[kind]
    try:
        return make(words)
    except ConfigError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"staleness {text!r}: write it like {example}") from error
