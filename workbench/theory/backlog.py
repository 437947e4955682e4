"""Backup workers without cancellation of stragglers: a worker that is late in one step begins the next step late.

An order statistic assumes that every worker begins every step at its start. Here a late worker first ends its old
gradient, which is dropped, and then begins the present step's gradient. Steps are therefore longer. With 2 backups of
8 workers and lognormal times, they are longer by 3 % at sigma = 0.1 and by 40 % at sigma = 1.
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

SAME_MOMENT = 1e-9  # relative to a step


def backlog_steps(times: Array, num_gradients: int) -> Array:
    """Return the seconds of each step, by a recurrence: step t ends with the N-th gradient that was begun in it.

    A worker begins when the step does, or when it has ended a gradient of an earlier step: r_i seconds later. It
    arrives at r_i + x_i. T is the N-th smallest of these. The next r_i is 0 for workers that have arrived. It is
    r_i - T for workers still at an old gradient, and r_i + x_i - T for workers at this step's gradient. Times that
    differ by less than 1e-9 of a step are equal. If times have few values, many coincide, and rounding must not decide
    which gradient a worker computes.

    Args:
        times: (steps, N + b) seconds of each worker's gradient begun in each step.
        num_gradients: N.

    Derived here. Paper: chen2016revisiting, Alg. 3-4 (the algorithm).

    >>> backlog_steps(np.array([[1.0, 5.0], [2.0, 1.0], [9.0, 1.0]]), 1)  # the second worker is ready after 5 s, and is then quicker
    array([1., 2., 3.])

    Raises:
        ConfigError: N is not from 1 to N + b.
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
class Backlog:
    """An arrival distribution for `best_backups` with backlog: stragglers begin the next step late.

    Means are over `num_steps` drawn steps. All N of one m use the same draws, so that a curve over b is smooth.
    `standard_error` is the uncertainty of a mean.

    >>> from workbench.theory import ConstantTime, LognormalTime
    >>> Backlog(arrival=ConstantTime(seconds=2.0)).expected_order_statistic(7, 8)
    2.0
    >>> lognormal = LognormalTime.of_mean(1.0, 0.5)
    >>> Backlog(arrival=lognormal).expected_order_statistic(7, 8) / lognormal.expected_order_statistic(7, 8) > 1.05
    True
    """

    arrival: Arrival
    num_steps: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or self.num_steps < 20:
            raise ConfigError(f"num_steps={self.num_steps}: give the number of drawn steps, 20 or more")

    def expected_order_statistic(self, which: int, of: int) -> float:
        """Return the mean seconds until `which` gradients of a step have arrived, of `of` workers."""
        return float(self._steps(which, of).mean())

    def standard_error(self, which: int, of: int) -> float:
        """Return the standard error of that mean, from ten parts of the steps: neighbours are not independent."""
        parts = [part.mean() for part in np.array_split(self._steps(which, of), 10)]
        return float(np.std(parts, ddof=1) / len(parts) ** 0.5)

    def _steps(self, which: int, of: int) -> Array:
        check_order(which, of)
        return backlog_steps(_draw(self.arrival, self.num_steps, of, self.seed), which)


@lru_cache(maxsize=4)
def _draw(arrival: Arrival, num_steps: int, of: int, seed: int) -> Array:
    """Draw times, shape (steps, m)."""
    return arrival.quantile(generator(seed, "arrivals").random((num_steps, of)))
