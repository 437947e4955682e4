"""How much slower than usual a worker's compute is: by step, by machine, by time of day, or while it is down.

A law answers two questions. `factors`: by what each worker's seconds are multiplied in a step, a pure function of (seed, step).
`finish_s`: when work ends that begins at a moment, for laws that know the clock (`timed`). Laws combine: factors multiply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.rng import generator

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers(ABC):
    """Base of the laws."""

    @property
    def timed(self) -> bool:
        """Whether `finish_s` says more than that work takes its seconds."""
        return False

    @abstractmethod
    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        """(num_workers,) by what each worker's compute seconds of this step are multiplied. Worker r's do not depend on `num_workers`."""

    def finish_s(self, seed: int, rank: int, begin_s: float, seconds: float) -> float:
        """When work of so many seconds ends that this worker begins at `begin_s`."""
        return begin_s + seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal(Stragglers):
    """exp(N(-sigma^2 / 2, sigma^2)), of mean 1, anew each step."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < float("inf"):
            raise ConfigError(f"Lognormal(sigma={self.sigma}): a standard deviation of the logarithm, 0 or more")

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        normal = generator(seed, "lognormal", 0, step).standard_normal(num_workers)
        return np.exp(self.sigma * normal - self.sigma**2 / 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMachines(Stragglers):
    """Machines that are slower for good: rank -> factor."""

    factor_of: tuple[tuple[int, float], ...]

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        found = np.ones(num_workers)
        for rank, factor in self.factor_of:
            if rank < num_workers:
                found[rank] = factor
        return found
