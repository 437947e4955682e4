"""Laws of arrival and their order statistics: against chance, against each other, and the numbers one can look up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import costs, theory
from workbench.errors import ConfigError
from workbench.theory import (
    Arrival,
    BimodalTime,
    ConstantTime,
    EmpiricalTime,
    LognormalTime,
    NormalTime,
    ParetoTime,
    QuantileTime,
    ShiftedExponentialTime,
    UniformTime,
)
from workbench.theory.arrivals import standard_normal_order_statistic

MEASURED = tuple(np.random.default_rng(1).gamma(2.0, size=57))
LAWS: dict[str, Arrival] = {
    "constant": ConstantTime(seconds=2.0),
    "shifted-exponential": ShiftedExponentialTime(shift_s=1.0, scale_s=0.3),
    "exponential": ShiftedExponentialTime(shift_s=0.0, scale_s=1.0),
    "lognormal": LognormalTime(median_s=1.0, sigma=0.5),
    "pareto": ParetoTime(minimum_s=1.0, shape=2.5),
    "uniform": UniformTime(low_s=0.5, high_s=2.0),
    "normal": NormalTime(mean_s=3.0, deviation_s=0.4),
    "bimodal": BimodalTime(usual_s=1.0, slow_s=5.0, probability=0.03),
    "empirical": EmpiricalTime(values_s=MEASURED),
    "quantile": QuantileTime(quantile_of=lambda u: u**2, scale_s=3.0, shift_s=1.0),
}
EACH = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
ORDERS = [(1, 1), (1, 2), (2, 2), (3, 7), (96, 100), (100, 100), (1, 100), (900, 1000), (4096, 4096)]


@EACH
def test_quantile_undoes_the_distribution_function(law: Arrival) -> None:
    u = np.array([1e-6, 0.01, 0.3, 0.5, 0.77, 0.96, 0.99, 1 - 1e-6])
    times = law.quantile(u)
    assert np.all(np.diff(times) >= 0)
    assert np.all(law.cdf(times) >= u - 1e-9)
    assert np.all(law.cdf(times - 1e-6) <= u + 1e-9), "no earlier time has that probability"


@EACH
@pytest.mark.parametrize(("which", "of"), ORDERS)
def test_order_statistics_are_the_integral_of_the_quantile(law: Arrival, which: int, of: int) -> None:
    """Closed forms and sums over atoms, against quadrature, which knows the quantile function alone."""
    expected = law.expected_order_statistic(which, of)
    assert theory.expected_order_statistic(law.quantile, which, of) == pytest.approx(expected, rel=1e-7)


@EACH
@pytest.mark.parametrize(("which", "of"), [(1, 1), (5, 8), (8, 8), (60, 64)])
def test_order_statistics_are_what_chance_makes_of_them(law: Arrival, which: int, of: int) -> None:
    """40,000 draws: four standard errors."""
    drawn = np.sort(law.quantile(np.random.default_rng(3).random((40_000, of))), axis=1)[:, which - 1]
    error = 4 * drawn.std() / math.sqrt(len(drawn)) + 1e-9
    assert drawn.mean() == pytest.approx(law.expected_order_statistic(which, of), abs=error)


@EACH
def test_the_only_one_s_order_statistic_is_the_mean(law: Arrival) -> None:
    assert law.expected_order_statistic(1, 1) == pytest.approx(law.mean_s, rel=1e-7)
    fifth = [law.expected_order_statistic(which, 5) for which in range(1, 6)]
    assert fifth == sorted(fifth) and sum(fifth) / 5 == pytest.approx(law.mean_s, rel=1e-7)


@pytest.mark.parametrize("shape", [1.1, 1.5, 3.0])
@pytest.mark.parametrize(("which", "of"), [(1, 1), (100, 100), (96, 100), (10_000, 10_000)])
def test_heavy_tails_are_integrated_to_their_end(shape: float, which: int, of: int) -> None:
    """At a shape of 1.1 a tenth of the mean lies beyond what 1 - u can say in floating point."""
    law = ParetoTime(minimum_s=1.0, shape=shape)
    assert theory.expected_order_statistic(law.quantile, which, of) == pytest.approx(
        law.expected_order_statistic(which, of), rel=1e-7
    )


@settings(max_examples=60)
@given(probability=st.floats(1e-6, 1 - 1e-6), of=st.integers(1, 2000), data=st.data())
def test_jumps_are_found_wherever_they_are(probability: float, of: int, data: Any) -> None:
    which = data.draw(st.integers(1, of))
    law = BimodalTime(usual_s=1.0, slow_s=20.0, probability=probability)
    found = theory.expected_order_statistic(law.quantile, which, of)
    assert found == pytest.approx(law.expected_order_statistic(which, of), rel=1e-6)


def test_a_mean_that_does_not_exist_is_infinite() -> None:
    law = ParetoTime(minimum_s=1.0, shape=0.8)
    assert law.mean_s == law.expected_order_statistic(7, 7) == math.inf
    assert theory.expected_order_statistic(law.quantile, 7, 7) == math.inf
    assert law.expected_order_statistic(6, 7) < math.inf, "one backup makes it finite"
    assert theory.expected_order_statistic(law.quantile, 6, 7) == pytest.approx(
        law.expected_order_statistic(6, 7), rel=1e-6
    )


def test_numbers_of_a_hundred_machines() -> None:
    exponential, pareto = LAWS["exponential"], LAWS["pareto"]
    assert [round(exponential.expected_order_statistic(which, 100), 2) for which in (100, 96)] == [5.19, 3.10]
    assert pareto.expected_order_statistic(100, 100) == pytest.approx(9.4, abs=0.05)
    assert pareto.expected_order_statistic(96, 100) == pytest.approx(3.52, abs=0.005)
    assert [round(theory.blom(0.0, 1.0, which, 100), 2) for which in (100, 96)] == [2.50, 1.68]


@pytest.mark.parametrize("of", [1, 2, 5, 30, 100, 1000])
def test_blom_is_near(of: int) -> None:
    """Within 0.03 standard deviations, and the better the more there are."""
    for which in range(1, of + 1, max(1, of // 50)):
        assert theory.blom(0.0, 1.0, which, of) == pytest.approx(
            standard_normal_order_statistic(which, of), abs=0.03 if of < 10 else 0.015
        )


def test_normal_order_statistics_are_those_of_the_tables() -> None:
    """What is known exactly for 2 and 3."""
    assert standard_normal_order_statistic(2, 2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-9)
    assert standard_normal_order_statistic(3, 3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-9)
    assert standard_normal_order_statistic(1, 3) == -standard_normal_order_statistic(3, 3)
    assert standard_normal_order_statistic(2, 3) == 0.0


def test_the_median_of_an_order_statistic() -> None:
    """The slowest of m is done by the time at which one is with probability 0.5^(1/m)."""
    law = LAWS["lognormal"]
    found = theory.quantile_of_order_statistic(law.quantile, 10, 10, 0.5)
    assert law.cdf(np.array([found]))[0] ** 10 == pytest.approx(0.5)


def test_lognormal_of_a_mean() -> None:
    assert LognormalTime.of_mean(2.0, 0.8).mean_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ConstantTime(seconds=-1.0),
        lambda: ShiftedExponentialTime(shift_s=0.0, scale_s=-1.0),
        lambda: LognormalTime(median_s=0.0, sigma=1.0),
        lambda: ParetoTime(minimum_s=1.0, shape=0.0),
        lambda: UniformTime(low_s=2.0, high_s=1.0),
        lambda: NormalTime(mean_s=1.0, deviation_s=-1.0),
        lambda: EmpiricalTime(values_s=()),
        lambda: EmpiricalTime(values_s=(1.0, math.nan)),
        lambda: BimodalTime(usual_s=1.0, slow_s=2.0, probability=1.5),
        lambda: QuantileTime(quantile_of=lambda u: u, scale_s=-1.0),
        lambda: LAWS["uniform"].expected_order_statistic(0, 3),
        lambda: LAWS["normal"].expected_order_statistic(4, 3),
        lambda: theory.expected_order_statistic(lambda u: u, 1, 0),
        lambda: theory.blom(0.0, 1.0, 3, 2),
    ],
)
def test_what_is_no_law_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        wrong()


@pytest.mark.parametrize(
    ("slowness", "law"),
    [
        (costs.Constant(factor=1.5), ConstantTime(seconds=3.0)),
        (costs.Lognormal(sigma=0.7), LognormalTime.of_mean(2.0, 0.7)),
        (costs.ShiftedExponential(shift=0.8, scale=0.2), ShiftedExponentialTime(shift_s=1.6, scale_s=0.4)),
        (costs.Pareto(shape=2.5), ParetoTime(minimum_s=2.0, shape=2.5)),
        (costs.Uniform(low=0.5, high=1.5), UniformTime(low_s=1.0, high_s=3.0)),
        (costs.Bimodal(probability=0.1, factor=5.0), BimodalTime(usual_s=2.0, slow_s=10.0, probability=0.1)),
        (costs.Empirical(values=MEASURED), EmpiricalTime(values_s=tuple(2 * value for value in MEASURED))),
    ],
    ids=lambda item: type(item).__name__,
)
def test_laws_of_slowness_are_those_of_arrival_of_two_seconds_of_work(slowness: costs.Stragglers, law: Arrival) -> None:
    """What the simulator draws from, through its quantile function, meets the closed form."""
    found = QuantileTime(quantile_of=slowness.quantile, scale_s=2.0)
    for which, of in ((1, 1), (6, 8), (8, 8), (96, 100)):
        assert found.expected_order_statistic(which, of) == pytest.approx(
            law.expected_order_statistic(which, of), rel=1e-7
        )
