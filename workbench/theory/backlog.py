"""Backup workers whose stragglers are not cancelled: what is late in one step is late for the next.

An order statistic takes every worker to begin every step afresh. Here who is late ends what it is at, has it dropped, and begins the
present step's gradient only then, so that steps are longer: with 2 backups of 8 workers and lognormal times by 3 % at sigma = 0.1
and by 40 % at sigma = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from workbench.errors import ConfigError
from workbench.rng import generator
from workbench.theory.arrivals import Arrival
from workbench.theory.order_statistics import Array, check_order

SAME_MOMENT = 1e-9  # relative


def carried_steps(times: Array, num_gradients: int) -> Array:
    """Seconds of each step, as a recurrence: step t ends with the N-th gradient of those that were begun in it.

    A worker begins when the step does, or when it is done with a gradient of an earlier step: r_i seconds later. It arrives
    at r_i + x_i. T = the N-th smallest of these; then r_i <- 0 for those who arrived, r_i - T for those still at an old gradient,
    r_i + x_i - T for those at this one. Moments apart by less than 1e-9 of a step are one moment: where times have few values, many
    coincide, and rounding must not decide who is at which gradient.

    Args:
        times: (steps, N + b) seconds of a gradient of each worker begun in each step.
        num_gradients: N.

    Derived here. Paper: chen2016revisiting, Alg. 3-4 (the method).

    >>> carried_steps(np.array([[1.0, 5.0], [2.0, 1.0], [9.0, 1.0]]), 1)  # the second worker is ready after 5, and is then the quicker
    array([1., 2., 3.])

    Raises:
        ConfigError: N is not of N + b.
    """
    times = np.asarray(times, float)
    check_order(num_gradients, times.shape[1])
    begin, seconds = np.zeros(times.shape[1]), np.zeros(len(times))
    for step, draw in enumerate(times):
        arrival = begin + draw
        end = seconds[step] = np.partition(arrival, num_gradients - 1)[num_gradients - 1]
        now = end * (1 + SAME_MOMENT)
        begin = np.where(arrival <= now, 0.0, np.where(begin > now, begin, arrival) - end)
    return seconds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A law of arrival for `best_backups`, with stragglers carried from step to step: a mean over `num_steps` drawn steps.

    The same draws for every N of one m, so that a curve over b is smooth. `standard_error` says how sure a mean is.

    >>> from workbench.theory import ConstantTime, LognormalTime
    >>> Carried(arrival=ConstantTime(seconds=2.0)).expected_order_statistic(7, 8)
    2.0
    >>> law = LognormalTime.of_mean(1.0, 0.5)
    >>> Carried(arrival=law).expected_order_statistic(7, 8) / law.expected_order_statistic(7, 8) > 1.05
    True
    """

    arrival: Arrival
    num_steps: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or self.num_steps < 20:
            raise ConfigError(f"num_steps={self.num_steps}: how many steps are drawn, 20 or more")

    def expected_order_statistic(self, which: int, of: int) -> float:
        """Mean seconds until `which` gradients of a step are there, of `of` workers."""
        return float(self._steps(which, of).mean())

    def standard_error(self, which: int, of: int) -> float:
        """Of that mean, from ten parts of the steps: neighbours are not independent."""
        parts = [part.mean() for part in np.array_split(self._steps(which, of), 10)]
        return float(np.std(parts, ddof=1) / len(parts) ** 0.5)

    def _steps(self, which: int, of: int) -> Array:
        check_order(which, of)
        return carried_steps(_draw(self.arrival, self.num_steps, of, self.seed), which)


@lru_cache(maxsize=4)
def _draw(arrival: Arrival, num_steps: int, of: int, seed: int) -> Array:
    """(steps, m) times."""
    return arrival.quantile(generator(seed, "arrivals").random((num_steps, of)))
