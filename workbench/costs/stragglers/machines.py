"""Distributions of machines: permanently slow, slow for a while, slow at some hours, or failed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isfinite, log, sqrt
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from workbench.arguments import is_whole
from workbench.costs.stragglers.base import Array, Finish, Stragglers, check_numbers, check_rule, full_speed_finish_s
from workbench.costs.stragglers.independent import normal_quantile
from workbench.errors import ConfigError
from workbench.rng import generator


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMachines(Stragglers):
    """Machines that are permanently slow.

    Attributes:
        factor_of: rank -> factor, as pairs or a dictionary.
        share, factor: each rank that is not in `factor_of` is slower by `factor` with probability `share`, drawn with
            the seed.
    """

    factor_of: tuple[tuple[int, float], ...] = ()
    share: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.factor_of, Mapping):
            object.__setattr__(self, "factor_of", tuple(sorted(self.factor_of.items())))
        ranks = [rank for rank, _ in self.factor_of]
        check_rule(
            self,
            all(is_whole(rank) and rank >= 0 for rank in ranks),
            "factor_of has ranks, counted from 0, and their factors",
        )
        check_rule(self, len(set(ranks)) == len(ranks), "factor_of names a rank twice: give it one factor")
        check_rule(
            self, all(isfinite(factor) and factor > 0 for _, factor in self.factor_of), "factors are finite and above 0"
        )
        check_numbers(self, "share", least=0)
        check_numbers(self, "factor", above=0)
        check_rule(self, self.share <= 1, "share is a probability, 0 to 1")
        check_rule(self, (self.share == 0) == (self.factor == 1), "share of the ranks are slower by factor: give both")
        check_rule(
            self,
            bool(self.factor_of) or self.share > 0,
            "no rank is slow: give factor_of={rank: factor}, or share and factor",
        )

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        slow = generator(seed, "slowmachines").random(num_workers) < self.share
        found = np.where(slow, float(self.factor), 1.0)
        for rank, factor in self.factor_of:
            if rank < num_workers:
                found[rank] = factor
        return found


TIME_VARYING_TOLERANCE = 1e-8  # earlier steps with less influence on a step's logarithm are ignored
BLOCK_STEPS = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimeVarying(Stragglers):
    """A machine that is slow stays slow for a while: the factor's logarithm is a stationary AR(1) process over steps.

    factor = exp(sigma x[t] - sigma^2 / 2),   x[t] = c x[t-1] + sqrt(1 - c^2) e[t],   e standard normal

    The factor of one step is a `Lognormal(sigma)`, of mean 1. The logarithms of two steps k apart have correlation c^k.

    Attributes:
        sigma: standard deviation of the logarithm.
        correlation: c, of the logarithms of two consecutive steps. 0.99 is a memory of about a hundred steps.
    """

    sigma: float
    correlation: float

    def __post_init__(self) -> None:
        check_numbers(self, "sigma", "correlation", least=0)
        check_rule(
            self,
            self.correlation <= 0.999,
            "correlation is at most 0.999, a memory of 1,000 steps; use SlowMachines for longer",
        )

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        block, row = divmod(step, BLOCK_STEPS)
        found: Array = np.exp(
            self.sigma * _correlated(seed, self.correlation, block, num_workers)[row] - self.sigma**2 / 2
        )
        return found

    def quantile(self, level: ArrayLike) -> Array:
        """Return quantiles of one step's factor."""
        return np.exp(self.sigma * normal_quantile(level) - self.sigma**2 / 2)

    @property
    def mean(self) -> float:
        """Mean of the factor."""
        return 1.0


@lru_cache(maxsize=4)
def _correlated(seed: int, correlation: float, block: int, num_workers: int) -> Array:
    """Return the process in one block of steps, shape (BLOCK_STEPS, num_workers).

    The process starts so long before the block that its start has no influence.
    """
    memory = ceil(log(TIME_VARYING_TOLERANCE) / log(correlation)) if correlation > 0 else 0
    first = block * BLOCK_STEPS
    begin = max(0, first - memory)
    fresh = sqrt(1 - correlation**2)
    state = generator(seed, "timevarying", 0, begin).standard_normal(num_workers)
    found = np.empty((BLOCK_STEPS, num_workers))
    for step in range(begin, first + BLOCK_STEPS):
        if step > begin:
            state = correlation * state + fresh * generator(seed, "timevarying", 0, step).standard_normal(num_workers)
        if step >= first:
            found[step - first] = state
    found.flags.writeable = False
    return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Windows(Stragglers):
    """Workers that are slower in windows of virtual time: another user's job, an hourly backup.

    Work runs at 1 / factor of its speed inside a window, and at full speed outside.

    Attributes:
        windows: (begin_s, end_s, factor) of each, in order and not overlapping.
        period_s: period after which the windows repeat, counted from 0; infinite: never.
        ranks: slow ranks; empty: all.
    """

    windows: tuple[tuple[float, float, float], ...]
    period_s: float = float("inf")
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_rule(
            self,
            len(self.windows) > 0 and all(len(window) == 3 for window in self.windows),
            "windows are (begin_s, end_s, factor)",
        )
        edges = [edge for begin, end, _ in self.windows for edge in (begin, end)]
        check_rule(
            self, edges == sorted(edges) and edges[0] >= 0, "windows begin at 0 or later, in order, and do not overlap"
        )
        check_rule(
            self,
            all(begin < end < float("inf") for begin, end, _ in self.windows),
            "end_s of a window is finite, and after its begin_s",
        )
        check_rule(self, edges[-1] <= self.period_s, "the last window ends within period_s")
        check_rule(
            self,
            all(isfinite(factor) and factor > 0 for _, _, factor in self.windows),
            "factors are finite and above 0; see Failures",
        )

    @property
    def timed(self) -> bool:
        return True

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        return np.ones(num_workers)

    def finish_s(
        self, seed: int, rank: int, begin_s: float, seconds: float, work: Finish = full_speed_finish_s
    ) -> float:
        if self.ranks and rank not in self.ranks:
            return work(begin_s, seconds)
        left = work(begin_s, seconds) - begin_s
        if isfinite(self.period_s):  # all complete periods do the same work
            origin = begin_s // self.period_s * self.period_s
            whole = self.period_s - sum((end - begin) * (1 - 1 / factor) for begin, end, factor in self.windows)
            done = self._work_until(begin_s - origin)
            periods, rest = divmod(done + left, whole)
            return max(begin_s, origin + periods * self.period_s + self._time_of(rest))
        return max(begin_s, self._time_of(self._work_until(begin_s) + left))

    def _work_until(self, time_s: float) -> float:
        """Return the seconds of work done from 0 to a time in the first period."""
        lost = sum(
            (min(end, time_s) - begin) * (1 - 1 / factor) for begin, end, factor in self.windows if begin < time_s
        )
        return time_s - lost

    def _time_of(self, work_s: float) -> float:
        """Return when this much work, counted from 0, is done."""
        time_s = work_s
        for begin, end, factor in self.windows:
            if time_s <= begin:
                break
            inside_s = (time_s - begin) * factor
            time_s = begin + inside_s if inside_s <= end - begin else time_s + (end - begin) * (1 - 1 / factor)
        return time_s


FIRST_FAILURES, MAX_FAILURES = 16, 2**16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failures(Stragglers):
    """Workers that fail and recover: up for an exponential time with mean `mean_between_s`, then down for `repair_s`.

    A worker that fails during forward or backward loses that work and repeats it when it is up. A worker that is down
    begins new work when it is up. Earlier sums are kept, and messages are not lost: this models a checkpoint at every
    step.

    Attributes:
        mean_between_s: mean time that a worker is up, in virtual seconds.
        repair_s: seconds from a failure until the worker is up.
        ranks: ranks that fail; empty: all.
    """

    mean_between_s: float
    repair_s: float = 0.0
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self, "mean_between_s", above=0)
        check_numbers(self, "repair_s", least=0)

    @property
    def timed(self) -> bool:
        return True

    def factors(self, seed: int, step: int, num_workers: int) -> Array:
        return np.ones(num_workers)

    def failures_s(self, seed: int, rank: int, until_s: float) -> Array:
        """Return the times at which this worker fails, up to the first time after `until_s`."""
        found = self._known(seed, rank, until_s)
        return np.array(found[: bisect_right(found, until_s) + 1])

    def _known(self, seed: int, rank: int, until_s: float) -> tuple[float, ...]:
        """Return the times of `failures_s`, and possibly later times."""
        num = FIRST_FAILURES
        while (found := _failures(seed, rank, self.mean_between_s, self.repair_s, num))[-1] <= until_s:
            num *= 2
        return found

    def finish_s(
        self, seed: int, rank: int, begin_s: float, seconds: float, work: Finish = full_speed_finish_s
    ) -> float:
        if self.ranks and rank not in self.ranks:
            return work(begin_s, seconds)
        failures = self._known(seed, rank, begin_s)
        number = bisect_right(failures, begin_s)  # the next failure
        start_s = begin_s if number == 0 else max(begin_s, failures[number - 1] + self.repair_s)
        for _ in range(MAX_FAILURES):
            if number == len(failures):
                failures = self._known(seed, rank, failures[-1])
            end_s = work(start_s, seconds)
            if end_s <= failures[number]:
                return end_s
            start_s = failures[number] + self.repair_s
            number += 1
        raise ConfigError(
            f"{self}: work of {seconds:g} s is not done after {MAX_FAILURES} failures in a row: give a longer "
            "mean_between_s"
        )


@lru_cache(maxsize=65536)
def _failures(seed: int, rank: int, mean_between_s: float, repair_s: float, num: int) -> tuple[float, ...]:
    """Return the times of a worker's first `num` failures; a longer list begins with the same times."""
    up_s = generator(seed, "failures", rank).exponential(mean_between_s, num)
    return tuple((np.cumsum(up_s) + repair_s * np.arange(num)).tolist())
