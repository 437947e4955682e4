"""The base of all straggler distributions: a factor for each step, or an end of work that depends on the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.arguments import is_number
from workbench.errors import ConfigError
from workbench.rng import generator

Array = NDArray[np.float64]
Finish = Callable[[float, float], float]  # (begin_s, seconds) -> when that work ends


def full_speed_finish_s(begin_s: float, seconds: float) -> float:
    """Return when work ends without stragglers."""
    return begin_s + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers(ABC):
    """Base of the distributions. A draw depends on (seed, step) or (seed, rank) only, not on earlier calls."""

    @property
    def timed(self) -> bool:
        """Return True if `finish_s` depends on when work begins."""
        return False

    @abstractmethod
    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        """Return the factor of each worker's compute seconds in this step, shape (num_workers,).

        Worker r's factor does not depend on `num_workers`.
        """

    def finish_s(
        self, seed: int, rank: int, begin_s: float, seconds: float, work: Finish = full_speed_finish_s
    ) -> float:
        """Return when this worker ends work that begins at `begin_s` and takes `seconds`.

        `work` gives the end without this distribution.
        """
        return work(begin_s, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Independent(Stragglers):
    """Base of distributions from which every worker draws independently in every step."""

    @abstractmethod
    def quantile(self, level: ArrayLike) -> Array:
        """Return the factor that is exceeded with probability 1 - level; any shape, levels from 0 to below 1."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Mean of the factor; may be infinite."""

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        return self.quantile(generator(seed, type(self).__name__.lower(), 0, step).random(num_workers))


def check_rule(distribution: Stragglers, right: bool, rule: str) -> None:
    """Raise `ConfigError` with the rule unless the numbers are right."""
    if not right:
        raise ConfigError(f"{distribution}: {rule}")


def check_numbers(
    distribution: Stragglers, *names: str, above: float | None = None, least: float | None = None
) -> None:
    """Raise `ConfigError` unless these attributes are finite numbers, above a limit or at least a limit."""
    for name in names:
        value = getattr(distribution, name)
        number = is_number(value) and isfinite(value)
        if not number or (above is not None and value <= above) or (least is not None and value < least):
            rule = f" above {above:g}" if above is not None else f", {least:g} or more" if least is not None else ""
            raise ConfigError(f"{type(distribution).__name__}({name}={value!r}): give a finite number{rule}")
