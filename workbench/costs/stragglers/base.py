"""What every law has in common: a factor by step, or an end of work by the clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import ConfigError
from workbench.rng import generator

Array = NDArray[np.float64]
Finish = Callable[[float, float], float]  # (begin_s, seconds) -> when that work ends


def plainly(begin_s: float, seconds: float) -> float:
    """When work ends that nothing slows."""
    return begin_s + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers(ABC):
    """Base of the laws. What a law draws is a function of (seed, step) or (seed, rank) alone, whatever was asked before."""

    @property
    def timed(self) -> bool:
        """Whether `finish_s` says more than that work takes its seconds."""
        return False

    @abstractmethod
    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        """(num_workers,) by what each worker's compute seconds of this step are multiplied. Worker r's do not depend on `num_workers`."""

    def finish_s(self, seed: int, rank: int, begin_s: float, seconds: float, work: Finish = plainly) -> float:
        """When work of so many seconds ends that this worker begins at `begin_s`; `work` is when it would without this law."""
        return work(begin_s, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Independent(Stragglers):
    """Base of the laws by which every worker draws anew in every step, all from one distribution."""

    @abstractmethod
    def quantile(self, level: ArrayLike) -> Array:
        """The factor that is exceeded with probability 1 - level; any shape, levels from 0 to below 1."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Of the factor; may be infinite."""

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        return self.quantile(generator(seed, type(self).__name__.lower(), 0, step).random(num_workers))


def check(law: Stragglers, right: bool, rule: str) -> None:
    """Raise `ConfigError` with the rule unless the law's numbers keep it."""
    if not right:
        raise ConfigError(f"{law}: {rule}")


def check_numbers(law: Stragglers, *names: str, above: float | None = None, least: float | None = None) -> None:
    """Raise `ConfigError` unless these attributes are finite numbers, above or at least a limit."""
    for name in names:
        value = getattr(law, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or (above is not None and value <= above) or (least is not None and value < least):
            rule = f" above {above:g}" if above is not None else f", {least:g} or more" if least is not None else ""
            raise ConfigError(f"{type(law).__name__}({name}={value!r}): a finite number{rule}")
