"""The number of iterations with N gradients in each, and the number of backups that is worth its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from workbench.errors import ConfigError


class OrderStatistic(Protocol):
    """What is required of an arrival distribution (`arrivals.Arrival` is one)."""

    def expected_order_statistic(self, which: int, of: int) -> float:
        """Return the mean seconds until `which` of `of` have arrived."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """I(N) = I_inf (1 + N_c / N): iterations to a goal with N workers' gradients in each.

    Attributes:
        limit: I_inf, with gradients without noise.
        critical_workers: N_c, at which half of the iterations are due to noise: the gradient noise scale in batches of
            one worker.
        limit_error, critical_workers_error: standard errors; None if two points fix the line exactly, or if nothing was
            fitted.

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
    """Fit iterations over 1/N by a straight line through measured (N, iterations), with standard errors.

    Two points leave no residuals, so there are no errors. Errors of N_c are to first order.

    >>> found = fit_iterations([(50, 137.5e3), (100, 76.2e3)])  # read in chen2016revisiting
    >>> round(found.limit), round(found.critical_workers)
    (14900, 411)

    Raises:
        ConfigError: there are fewer than two numbers of workers, or the fitted I_inf or N_c is negative.
    """
    found = [(float(workers), float(count)) for workers, count in points]
    if len({workers for workers, _ in found}) < 2 or min((min(point) for point in found), default=0.0) <= 0:
        raise ConfigError(
            f"points={found}: give (workers, iterations), both above 0, for two or more numbers of workers"
        )
    inverse, counts = np.array([1 / workers for workers, _ in found]), np.array([count for _, count in found])
    design = np.column_stack([np.ones_like(inverse), inverse])
    (limit, slope), *_ = np.linalg.lstsq(design, counts, rcond=None)
    if limit <= 0 or slope < 0:
        raise ConfigError(
            f"points={found}: iterations fall faster than 1/N, or grow with N, and I_inf (1 + N_c/N) does neither: "
            "interpolate between the points, or measure at larger N"
        )
    if len(found) == 2:
        return Iterations(limit=float(limit), critical_workers=float(slope / limit))
    residual = counts - design @ np.array([limit, slope])
    covariance = np.linalg.inv(design.T @ design) * (residual @ residual) / (len(found) - 2)
    toward = np.array([-slope / limit**2, 1 / limit])  # derivatives of N_c = slope / limit
    return Iterations(
        limit=float(limit),
        critical_workers=float(slope / limit),
        limit_error=math.sqrt(covariance[0, 0]),
        critical_workers_error=math.sqrt(toward @ covariance @ toward),
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackupChoice:
    """Predicted time to a goal for each number of backups, and the best number.

    Attributes:
        total: N + b.
        backups: the b with the smallest time; the smaller one if equal.
        num_gradients, iterations, step_s, total_s: for b = 0, 1, ...: N, I(N), the mean time of the N-th arrival, and
            their product.
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
        """Time with b = 0, divided by the time with the best b."""
        return self.total_s[0] / self.best_s


def best_backups(
    total: int, iterations: Callable[[int], float], arrival: OrderStatistic, overhead_s: float = 0.0
) -> BackupChoice:
    """Return the best b for `total` machines: argmin of I(N) (E[X_(N:N+b)] + overhead), N = total - b.

    Args:
        total: N + b machines.
        iterations: I, from N; an `Iterations`, or any function.
        arrival: the distribution of a gradient's seconds; any object with `expected_order_statistic`.
        overhead_s: overhead of a step that does not depend on N: gather, update, scatter.

    Each worker draws a new time in each step. A simulated straggler is not cancelled and begins the next step late,
    so simulated steps take a little longer than here (`backlog`).

    Paper: chen2016revisiting, section 3.1 (the rule); xu2020dynamic (chosen during training). Formula derived here.

    >>> from workbench.theory import ConstantTime, ShiftedExponentialTime
    >>> iterations = Iterations(limit=14900, critical_workers=411)
    >>> best_backups(100, iterations, ConstantTime(seconds=1.0)).backups
    0
    >>> best_backups(100, iterations, ShiftedExponentialTime(shift_s=2.5, scale_s=0.1)).backups
    4

    Raises:
        ConfigError: there are no machines.
    """
    if not isinstance(total, int) or total < 1:
        raise ConfigError(f"total={total}: give the number of machines, N + b, 1 or more")
    num_gradients = tuple(range(total, 0, -1))
    counts = tuple(float(iterations(number)) for number in num_gradients)
    steps = tuple(arrival.expected_order_statistic(number, total) + overhead_s for number in num_gradients)
    times = tuple(count * step for count, step in zip(counts, steps, strict=True))
    best = min(range(total), key=lambda backups: times[backups])
    return BackupChoice(
        total=total, backups=best, num_gradients=num_gradients, iterations=counts, step_s=steps, total_s=times
    )


def machine_seconds(
    num_gradients: int, backups: int, iterations: Callable[[int], float], arrival: OrderStatistic
) -> float:
    """Return (N + b) I(N) E[X_(N:N+b)]: machine-seconds to a goal, backups included. Derived here."""
    total = num_gradients + backups
    return total * iterations(num_gradients) * arrival.expected_order_statistic(num_gradients, total)


def backups_repay(
    num_gradients: int, backups: int, iterations: Callable[[int], float], arrival: OrderStatistic, *, extra: bool
) -> bool:
    """Return whether N + b machines with b backups take fewer machine-seconds than machines without backups.

    Args:
        extra: compare with N machines, so that backups are additional; otherwise with N + b machines that wait for
            all gradients.

    >>> from workbench.theory import ShiftedExponentialTime
    >>> iterations = Iterations(limit=14900, critical_workers=411)
    >>> [backups_repay(96, 4, iterations, ShiftedExponentialTime(shift_s=1.0, scale_s=scale_s), extra=True) for scale_s in (0.1, 0.01)]
    [True, False]
    """
    without = num_gradients if extra else num_gradients + backups
    return machine_seconds(num_gradients, backups, iterations, arrival) < machine_seconds(
        without, 0, iterations, arrival
    )
