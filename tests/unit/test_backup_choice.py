"""Iterations against workers, the best number of backups, and stragglers that nobody cancels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate

from workbench import theory
from workbench.errors import ConfigError
from workbench.theory import (
    ConstantTime,
    Iterations,
    LognormalTime,
    ParetoTime,
    ShiftedExponentialTime,
)

EXPONENTIAL = ShiftedExponentialTime(shift_s=0.0, scale_s=1.0)


def test_iterations_of_the_paper_s_two_numbers() -> None:
    found = theory.fit_iterations([(50, 137.5e3), (100, 76.2e3)])
    assert found.limit == pytest.approx(14.9e3) and found.critical_workers == pytest.approx(411, abs=0.5)
    assert found.limit_error is None
    assert found(50) == pytest.approx(137.5e3) and found(100) == pytest.approx(76.2e3)


def test_fit_recovers_what_made_the_points_and_its_errors_are_honest() -> None:
    """2000 fits of noisy points: the spread of the fits is the standard error that one of them states."""
    law, chance = Iterations(limit=1000.0, critical_workers=50.0), np.random.default_rng(0)
    workers = np.array([8, 16, 32, 64, 128, 256])
    exact = theory.fit_iterations([(count, law(count)) for count in workers])
    assert (exact.limit, exact.critical_workers) == (pytest.approx(1000.0), pytest.approx(50.0))
    assert exact.limit_error == pytest.approx(0.0, abs=1e-6)
    fits = [
        theory.fit_iterations([(count, law(count) + chance.normal(0, 20)) for count in workers]) for _ in range(2000)
    ]
    for name in ("limit", "critical_workers"):
        spread = np.std([getattr(fit, name) for fit in fits])
        stated = math.sqrt(np.mean([getattr(fit, f"{name}_error") ** 2 for fit in fits]))
        assert stated == pytest.approx(spread, rel=0.08)


@pytest.mark.parametrize(
    "wrong",
    [[], [(50, 1e3)], [(50, 1e3), (50, 2e3)], [(50, 1e3), (100, 2e3)], [(50, 1e3), (100, 400.0)], [(0, 1.0), (1, 2.0)]],
)
def test_points_that_are_no_such_law_are_refused(wrong: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigError, match="points"):
        theory.fit_iterations(wrong)


def test_best_backups_is_the_least_of_the_curve() -> None:
    law = theory.fit_iterations([(50, 137.5e3), (100, 76.2e3)])
    arrival = ShiftedExponentialTime(shift_s=2.5, scale_s=0.1)
    choice = theory.best_backups(100, law, arrival)
    assert choice.backups == 4 and choice.num_gradients[4] == 96
    assert choice.total_s == tuple(law(100 - b) * arrival.expected_order_statistic(100 - b, 100) for b in range(100))
    assert choice.best_s == min(choice.total_s) and choice.gain == choice.total_s[0] / choice.best_s > 1
    assert theory.best_backups(100, law, ConstantTime(seconds=1.0)).backups == 0, "nobody is late"
    noiseless = theory.best_backups(100, Iterations(limit=1.0, critical_workers=0.0), arrival)
    assert noiseless.num_gradients[noiseless.backups] == 1, "without noise one gradient is as good as a hundred"


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.1, 0.3])
def test_more_spread_wants_more_backups_and_more_overhead_fewer(spread: float) -> None:
    law = Iterations(limit=14_900.0, critical_workers=411.0)
    narrow, wide = (
        theory.best_backups(100, law, LognormalTime.of_mean(1.0, sigma)).backups for sigma in (spread, 2 * spread)
    )
    assert narrow <= wide
    arrival = LognormalTime.of_mean(1.0, spread)
    plain, burdened = theory.best_backups(100, law, arrival), theory.best_backups(100, law, arrival, overhead_s=30.0)
    assert burdened.backups < plain.backups == narrow or narrow == 0
    assert burdened.step_s == pytest.approx([seconds + 30.0 for seconds in plain.step_s])


def test_whether_backups_repay() -> None:
    """A permanent price of 4 % against what the tail costs."""
    law = Iterations(limit=14_900.0, critical_workers=411.0)
    heavy, light = ParetoTime(minimum_s=1.0, shape=2.5), ConstantTime(seconds=1.0)
    for extra in (True, False):
        assert theory.backups_repay(96, 4, law, heavy, extra=extra)
        assert not theory.backups_repay(96, 4, law, light, extra=extra)
    assert theory.machine_seconds(96, 4, law, light) == pytest.approx(100 * law(96))
    with pytest.raises(ConfigError):
        theory.best_backups(0, law, light)


# ---------------------------------------------------------------- carried stragglers


def test_carried_stragglers_by_hand() -> None:
    """Two of three are waited for. The third is ready 1.5 into the fourth step, late again by 1, and in the fifth the second at 1.5."""
    times = np.array(
        [[1.0, 2.5, 9.0], [2.5, 1.0, 9.9], [1.0, 2.5, 9.9], [1.0, 2.5, 2.0], [3.0, 1.0, 0.5], [4.0, 1.0, 0.5]]
    )
    assert theory.backlog_steps(times, 2).tolist() == [2.5, 2.5, 2.5, 2.5, 1.5, 1.0]


def test_rounding_does_not_decide_where_moments_coincide() -> None:
    """Two values, and sums of them that no float holds: as with multiples of them that are whole numbers."""
    slow = np.random.default_rng(0).random((300, 30)) < 0.1
    for usual, late in ((7, 31), (10, 33)):
        whole = theory.backlog_steps(np.where(slow, late, usual), 22)
        assert theory.backlog_steps(np.where(slow, late * 0.1, usual * 0.1), 22) == pytest.approx(0.1 * whole, rel=1e-6)


def test_carried_stragglers_without_memory() -> None:
    """Exponential times: at each step's begin N workers are an Exp(1) away and b, at an old gradient, the sum of two."""
    num_gradients, backups = 7, 2
    t = np.linspace(0, 60, 600_001)
    ready, carried = 1 - np.exp(-t), 1 - np.exp(-t) * (1 + t)
    several = np.arange(num_gradients + 1)
    few = np.array([math.comb(num_gradients, k) * ready**k * (1 - ready) ** (num_gradients - k) for k in several])
    late = np.array([math.comb(backups, k) * carried**k * (1 - carried) ** (backups - k) for k in range(backups + 1)])
    not_yet = sum(few[i] * late[j] for i in several for j in range(backups + 1) if i + j < num_gradients)
    expected = float(integrate.trapezoid(not_yet, t))
    found = theory.Backlog(arrival=EXPONENTIAL, num_steps=20_000)
    error = found.standard_error(num_gradients, num_gradients + backups)
    assert error < 0.01 * expected
    assert found.expected_order_statistic(num_gradients, num_gradients + backups) == pytest.approx(
        expected, abs=4 * error
    )
    assert expected > 1.1 * EXPONENTIAL.expected_order_statistic(num_gradients, num_gradients + backups)


def test_carried_stragglers_make_fewer_backups_best() -> None:
    law, arrival = theory.fit_iterations([(50, 137.5e3), (100, 76.2e3)]), LognormalTime.of_mean(1.0, 0.3)
    fresh = theory.best_backups(100, law, arrival)
    carried = theory.best_backups(100, law, theory.Backlog(arrival=arrival, num_steps=300))
    assert 0 < carried.backups <= fresh.backups and 1 < carried.gain < fresh.gain
    assert carried.step_s[0] == pytest.approx(fresh.step_s[0], rel=0.02), "without backups nobody is carried"
    for wrong in (
        lambda: theory.Backlog(arrival=arrival, num_steps=3),
        lambda: theory.backlog_steps(np.ones((3, 2)), 3),
    ):
        with pytest.raises(ConfigError):
            wrong()
