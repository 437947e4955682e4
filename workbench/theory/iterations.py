"""How many iterations N gradients a step need, and how many backups are worth having."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from workbench.errors import ConfigError


class OrderStatistic(Protocol):
    """What is asked of a law of arrival times (`arrivals.Arrival` is one)."""

    def expected_order_statistic(self, which: int, of: int) -> float:
        """Mean seconds until `which` of `of` are there."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """I(N) = I_inf (1 + N_c / N): iterations to a goal with N workers' gradients in each.

    Attributes:
        limit: I_inf, with gradients without noise.
        critical_workers: N_c, where half of the iterations are due to noise: the gradient noise scale in batches of one worker.
        limit_error, critical_workers_error: standard errors; None where two points fix the line exactly, or nothing was fitted.

    The form is mccandlish2018empirical's (there in steps against batch size).

    >>> round(Iterations(limit=1000.0, critical_workers=50.0)(25))
    3000
    """

    limit: float
    critical_workers: float
    limit_error: float | None = None
    critical_workers_error: float | None = None

    def __call__(self, num_workers: float) -> float:
        return self.limit * (1 + self.critical_workers / num_workers)


def fit_iterations(points: Iterable[tuple[float, float]]) -> Iterations:
    """Least squares of measured (N, iterations) in iterations against 1/N, a straight line, with standard errors from what is left over.

    Two points leave nothing over: no errors. Errors of N_c are to first order.

    >>> found = fit_iterations([(50, 137.5e3), (100, 76.2e3)])  # read in chen2016revisiting
    >>> round(found.limit), round(found.critical_workers)
    (14900, 411)

    Raises:
        ConfigError: fewer than two numbers of workers, or points on a line that falls below zero: no law of this form.
    """
    found = [(float(workers), float(count)) for workers, count in points]
    if len({workers for workers, _ in found}) < 2 or min((min(point) for point in found), default=0.0) <= 0:
        raise ConfigError(f"points={found}: (workers, iterations), both above 0, for at least two numbers of workers")
    inverse, counts = np.array([1 / workers for workers, _ in found]), np.array([count for _, count in found])
    design = np.column_stack([np.ones_like(inverse), inverse])
    (limit, slope), *_ = np.linalg.lstsq(design, counts, rcond=None)
    if limit <= 0 or slope < 0:
        raise ConfigError(
            f"points={found}: iterations fall faster than 1/N, or grow with N, and I_inf (1 + N_c/N) does neither: "
            "use the points by interpolation, or measure at larger N"
        )
    if len(found) == 2:
        return Iterations(limit=float(limit), critical_workers=float(slope / limit))
    residual = counts - design @ np.array([limit, slope])
    covariance = np.linalg.inv(design.T @ design) * (residual @ residual) / (len(found) - 2)
    toward = np.array([-slope / limit**2, 1 / limit])  # how N_c = slope / limit changes with each
    return Iterations(
        limit=float(limit),
        critical_workers=float(slope / limit),
        limit_error=math.sqrt(covariance[0, 0]),
        critical_workers_error=math.sqrt(toward @ covariance @ toward),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackupChoice:
    """Predicted time to a goal for each number of backups, and the best.

    Attributes:
        total: N + b.
        backups: the b of least time; the smaller one of equals.
        num_gradients, iterations, step_s, total_s: for b = 0, 1, ...: N, I(N), the mean time of the N-th arrival, their product.
    """

    total: int
    backups: int
    num_gradients: tuple[int, ...]
    iterations: tuple[float, ...]
    step_s: tuple[float, ...]
    total_s: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """Predicted seconds with the best b."""
        return self.total_s[self.backups]

    @property
    def gain(self) -> float:
        """How many times as long b = 0 takes."""
        return self.total_s[0] / self.best_s


def best_backups(total: int, iterations: Callable[[int], float], arrival: OrderStatistic, overhead_s: float = 0.0) -> BackupChoice:
    """The b that makes the most of `total` machines: argmin of I(N) (E[X_(N:N+b)] + overhead), N = total - b.

    Args:
        total: N + b machines.
        iterations: I, from N; an `Iterations`, or any function.
        arrival: the law of a gradient's seconds; whatever has `expected_order_statistic`.
        overhead_s: of a step, whatever N is: gather, update, scatter.

    Every step is drawn anew for every worker. A simulated straggler is not cancelled: it comes late into the next step, so that its
    steps take a little longer than here.

    Paper: chen2016revisiting, section 3.1 (the rule); xu2020dynamic (chosen as one goes). Formula derived here.

    >>> from workbench.theory import ConstantTime, ShiftedExponentialTime
    >>> law = Iterations(limit=14900, critical_workers=411)
    >>> best_backups(100, law, ConstantTime(seconds=1.0)).backups
    0
    >>> best_backups(100, law, ShiftedExponentialTime(shift_s=2.5, scale_s=0.1)).backups
    4

    Raises:
        ConfigError: no machines.
    """
    if not isinstance(total, int) or total < 1:
        raise ConfigError(f"total={total}: the number of machines, N + b, 1 or more")
    num_gradients = tuple(range(total, 0, -1))
    counts = tuple(float(iterations(number)) for number in num_gradients)
    steps = tuple(arrival.expected_order_statistic(number, total) + overhead_s for number in num_gradients)
    times = tuple(count * step for count, step in zip(counts, steps, strict=True))
    best = min(range(total), key=lambda backups: times[backups])
    return BackupChoice(total=total, backups=best, num_gradients=num_gradients, iterations=counts, step_s=steps, total_s=times)


def machine_seconds(num_gradients: int, backups: int, iterations: Callable[[int], float], arrival: OrderStatistic) -> float:
    """(N + b) I(N) E[X_(N:N+b)]: what a goal costs in seconds of a machine, backups included. Derived here."""
    total = num_gradients + backups
    return total * iterations(num_gradients) * arrival.expected_order_statistic(num_gradients, total)


def backups_repay(num_gradients: int, backups: int, iterations: Callable[[int], float], arrival: OrderStatistic, *, extra: bool) -> bool:
    """Whether N + b with b backups take fewer machine seconds than machines without backups.

    Args:
        extra: against N machines, the backups being additional ones; else against the same N + b, all waited for.

    >>> from workbench.theory import ShiftedExponentialTime
    >>> law = Iterations(limit=14900, critical_workers=411)
    >>> [backups_repay(96, 4, law, ShiftedExponentialTime(shift_s=1.0, scale_s=scale_s), extra=True) for scale_s in (0.1, 0.01)]
    [True, False]
    """
    without = num_gradients if extra else num_gradients + backups
    return machine_seconds(num_gradients, backups, iterations, arrival) < machine_seconds(without, 0, iterations, arrival)
