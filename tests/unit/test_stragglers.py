"""Distributions of stragglers: their numbers against closed forms; the order of queries changes nothing."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from workbench.costs import Compute, stragglers
from workbench.costs.stragglers import (
    Bimodal,
    Constant,
    Empirical,
    EmpiricalByRank,
    Failures,
    Independent,
    Lognormal,
    Pareto,
    ShiftedExponential,
    SlowMachines,
    Stragglers,
    TimeVarying,
    Uniform,
    Windows,
)
from workbench.errors import ConfigError

INDEPENDENT: list[tuple[Independent, Any]] = [  # each with what SciPy calls it
    (Lognormal(sigma=0.4), stats.lognorm(0.4, scale=math.exp(-0.08))),
    (ShiftedExponential(shift=0.5, scale=2.0), stats.expon(0.5, 2.0)),
    (Pareto(shape=4.5, scale=0.7), stats.pareto(4.5, scale=0.7)),
    (Uniform(low=0.5, high=2.5), stats.uniform(0.5, 2.0)),
]
DISCRETE: list[Independent] = [
    Constant(factor=1.5),
    Bimodal(probability=0.1, factor=4.0),
    Bimodal(probability=0.3, factor=0.5),
    Empirical(values=(3.0, 1.0, 1.0, 2.0)),
]
BY_STEP: list[Stragglers] = [
    *(law for law, _ in INDEPENDENT),
    *DISCRETE,
    EmpiricalByRank(rows=((1.0, 1.1), (2.0, 2.2, 2.4))),
    SlowMachines(factor_of={1: 3.0}),
    SlowMachines(factor_of={1: 3.0}, share=0.3, factor=2.0),
    TimeVarying(sigma=0.3, correlation=0.9),
]
ALL = [*BY_STEP, Windows(windows=((1.0, 2.0, 3.0),)), Failures(mean_between_s=5.0, repair_s=1.0)]


def sample(law: Stragglers, num_workers: int = 4096, steps: int = 100) -> np.ndarray:
    return np.concatenate([law.factors(3, step, num_workers) for step in range(steps)])


# ---------------------------------------------------------------- laws of all


@pytest.mark.parametrize("law", ALL, ids=str)
def test_a_worker_s_factor_depends_on_seed_and_step_and_on_nothing_else(law: Stragglers) -> None:
    """Not on how many workers there are, nor on what was asked before."""
    steps = [0, 7, 300]
    forth = {step: law.factors(5, step, 64) for step in steps}
    for step in reversed(steps):
        assert np.array_equal(law.factors(5, step, 64), forth[step])
        assert np.array_equal(law.factors(5, step, 10), forth[step][:10])
        assert forth[step].shape == (64,) and forth[step].dtype == np.float64
        assert np.isfinite(forth[step]).all() and (forth[step] > 0).all()


@pytest.mark.parametrize(
    "law", [*(law for law, _ in INDEPENDENT), *DISCRETE[1:], BY_STEP[8], BY_STEP[10], BY_STEP[11]], ids=str
)
def test_another_seed_and_another_worker_draw_other_numbers(law: Stragglers) -> None:
    one, other = law.factors(0, 4, 256), law.factors(1, 4, 256)
    assert not np.array_equal(one, other) and len(set(one)) > 1


@pytest.mark.parametrize(("law", "known"), INDEPENDENT, ids=lambda item: str(item)[:40])
def test_quantiles_mean_and_draws_are_those_of_the_distribution(law: Independent, known: Any) -> None:
    levels = np.linspace(0.001, 0.999, 101).reshape(1, 101)
    np.testing.assert_allclose(law.quantile(levels), known.ppf(levels), rtol=1e-9)
    assert law.mean == pytest.approx(known.mean())
    drawn = sample(law)
    assert stats.kstest(drawn[::20], known.cdf).pvalue > 1e-3
    assert drawn.mean() == pytest.approx(known.mean(), abs=5 * known.std() / math.sqrt(len(drawn)))
    assert drawn.std() == pytest.approx(known.std(), rel=0.05)


@pytest.mark.parametrize("law", DISCRETE, ids=str)
def test_quantiles_of_a_few_values_are_those_of_what_is_drawn(law: Independent) -> None:
    drawn = sample(law)
    for value in np.unique(drawn):
        below, up_to = (drawn < value).mean(), (drawn <= value).mean()
        assert law.quantile((below + up_to) / 2) == value
        assert law.quantile(min(max(below + 0.01, 0), 0.9999)) == value == law.quantile(max(up_to - 0.01, 0))
    assert drawn.mean() == pytest.approx(law.mean, rel=0.01)


def test_the_mean_of_a_heavy_tail_may_be_infinite() -> None:
    assert Pareto(shape=1.0).mean == math.inf
    assert Pareto(shape=2.5).mean == pytest.approx(2.5 / 1.5)


def test_order_statistics_follow_from_quantiles() -> None:
    """The mean of the 96th of 100 shifted exponentials, H_100 - H_4, by the Beta law of its level and by drawing."""
    law = ShiftedExponential(shift=0.0, scale=1.0)
    expected = sum(1 / k for k in range(5, 101))
    levels = stats.beta(96, 5).ppf((np.arange(20000) + 0.5) / 20000)
    assert law.quantile(levels).mean() == pytest.approx(expected, rel=1e-3)
    drawn = np.sort([law.factors(0, step, 100) for step in range(2000)], axis=1)[:, 95]
    assert drawn.mean() == pytest.approx(expected, rel=0.02)


def test_four_thousand_workers_draw_a_thousand_steps_in_about_a_second() -> None:
    for law in (
        Lognormal(sigma=0.3),
        Pareto(shape=2.5),
        TimeVarying(sigma=0.3, correlation=0.9),
        EmpiricalByRank(rows=((1.0, 2.0),) * 8),
    ):
        begin = time.perf_counter()
        for step in range(250):
            law.factors(0, step, 4096)
        assert time.perf_counter() - begin < 1.0, law  # a quarter of it; 0.1 s where no other worker computes


# ---------------------------------------------------------------- machines


def test_slow_machines_are_slow_for_good() -> None:
    law = SlowMachines(factor_of={1: 3.0, 900: 4.0}, share=0.2, factor=2.0)
    first = law.factors(0, 0, 2000)
    assert np.array_equal(law.factors(0, 99, 2000), first)
    assert (first[1], first[900]) == (3.0, 4.0)
    assert 0.15 < (first == 2.0).mean() < 0.25
    assert not np.array_equal(law.factors(1, 0, 2000), first)
    assert SlowMachines(factor_of=((1, 3.0),)) == SlowMachines(factor_of={1: 3.0})


def test_a_time_varying_machine_remembers() -> None:
    """Lognormal in each step; the logarithm's correlation k steps apart is c^k, also from one block of steps to the next."""
    law = TimeVarying(sigma=0.3, correlation=0.8)
    logs = np.log([law.factors(2, step, 4000) for step in range(250, 262)]) + 0.3**2 / 2
    assert stats.kstest(logs[3] / 0.3, "norm").pvalue > 1e-3
    for first, later in ((0, 1), (0, 3), (4, 8)):  # the second block begins at step 256
        found = np.corrcoef(logs[first], logs[later])[0, 1]
        assert found == pytest.approx(0.8 ** (later - first), abs=0.04)
    np.testing.assert_allclose(law.quantile([0.1, 0.9]), Lognormal(sigma=0.3).quantile([0.1, 0.9]))
    independent = TimeVarying(sigma=0.3, correlation=0.0)
    assert abs(np.corrcoef(independent.factors(0, 0, 4000), independent.factors(0, 1, 4000))[0, 1]) < 0.06


def test_windows_slow_the_work_that_falls_into_them() -> None:
    law = Windows(windows=((10.0, 20.0, 2.0), (30.0, 40.0, 4.0)), ranks=(1,))
    assert law.timed and Compute(forward_s=1, backward_s=1, stragglers=(law,)).timed
    cases = [
        ((0.0, 10.0), 10.0),  # before
        ((5.0, 5.0 + 3.0), 16.0),  # 5 before, 3 at half speed
        ((5.0, 5.0 + 5.0), 20.0),
        ((12.0, 4.0 + 2.0), 22.0),  # begun inside
        ((5.0, 5.0 + 5.0 + 10.0 + 2.5 + 5.0), 45.0),  # through both
        ((50.0, 7.0), 57.0),  # after
        ((35.0, 0.0), 35.0),
    ]
    for (begin, seconds), end in cases:
        assert law.finish_s(0, 1, begin, seconds) == pytest.approx(end)
        assert law.finish_s(0, 0, begin, seconds) == begin + seconds, "not this one"


def test_windows_come_again() -> None:
    """Ten seconds of sixty at a fifth of the speed: 52 seconds of work a period, from wherever it begins."""
    law = Windows(windows=((10.0, 20.0, 5.0),), period_s=60.0)
    for begin in (0.0, 15.0, 20.0, 59.0, 3600.0, 3615.0):
        assert law.finish_s(0, 0, begin, 52.0 * 3) == pytest.approx(begin + 180.0)
    assert law.finish_s(0, 0, 65.0, 5.0 + 1.0) == pytest.approx(75.0)
    once = Windows(windows=((10.0, 20.0, 5.0), (70.0, 80.0, 5.0)))
    for begin, seconds in ((3.0, 50.0), (12.0, 100.0), (0.0, 104.0)):
        assert law.finish_s(0, 0, begin, seconds) == pytest.approx(once.finish_s(0, 0, begin, seconds))


def test_a_faster_window_is_faster() -> None:
    law = Windows(windows=((10.0, 20.0, 0.5),))
    assert [law.finish_s(0, 0, 5.0, seconds) for seconds in (5.0, 15.0, 25.0, 26.0)] == pytest.approx(
        [10.0, 15.0, 20.0, 21.0]
    )


# ---------------------------------------------------------------- failures


def by_hand(law: Failures, rank: int, begin_s: float, seconds: float) -> float:
    """Second by second of the renewal process, from the start each time."""
    failures = law.failures_s(7, rank, 1e5)
    now, done = begin_s, 0.0
    for failure in failures:
        back = failure + law.repair_s
        if now >= back:
            continue
        if now + seconds - done <= failure:
            return now + seconds - done
        now, done = back if now <= failure or now < back else now, 0.0
    raise AssertionError("longer than was drawn")


def test_who_fails_at_work_does_it_again_when_it_is_back() -> None:
    law = Failures(mean_between_s=20.0, repair_s=5.0)
    again = 0
    for rank in range(20):
        for begin in np.linspace(0, 300, 31):
            end = law.finish_s(7, rank, begin, 6.0)
            assert end == pytest.approx(by_hand(law, rank, begin, 6.0))
            again += end > begin + 6.0
    assert again > 100


def test_failures_are_a_renewal_process_that_nobody_s_asking_changes() -> None:
    law = Failures(mean_between_s=20.0, repair_s=5.0)
    early = law.failures_s(0, 3, 50.0)
    late = law.failures_s(0, 3, 5000.0)
    assert np.array_equal(late[: len(early)], early) and early[-1] > 50.0 >= early[-2]
    up_s = np.diff(late) - 5.0
    assert (up_s > 0).all() and stats.kstest(up_s, stats.expon(0, 20.0).cdf).pvalue > 1e-3
    assert not np.array_equal(law.failures_s(0, 4, 50.0), early)
    assert law.finish_s(0, 3, 4000.0, 1.0) == replace(law).finish_s(0, 3, 4000.0, 1.0)


def test_the_time_that_work_takes_among_failures_is_the_renewal_formula_s() -> None:
    """From a start at full health: mean (1/l + repair) (e^(l s) - 1), with l failures a second of being up and s seconds of work."""
    law = Failures(mean_between_s=10.0, repair_s=3.0)
    taken = [law.finish_s(seed, 0, 0.0, 8.0) for seed in range(8000)]
    assert np.mean(taken) == pytest.approx((10.0 + 3.0) * (math.exp(0.8) - 1), rel=0.04)


def test_work_that_never_ends_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="longer mean_between_s"):
        Failures(mean_between_s=0.01).finish_s(0, 0, 0.0, 10.0)


def test_a_failure_among_windows_makes_slowed_work_again() -> None:
    """Work in a window that halves the speed takes twice as long, so it is hit as often as work of twice the seconds."""
    fails = Failures(mean_between_s=20.0, repair_s=5.0)
    slow = Windows(windows=((0.0, 1e6, 2.0),))
    for laws in ((fails, slow), (slow, fails)):
        both = Compute(forward_s=1.0, backward_s=1.0, stragglers=laws)
        for begin in (0.0, 17.0, 80.0):
            seed = stragglers_seed(laws, fails)
            assert both.finish_s(4, 2, begin, 6.0) == pytest.approx(fails.finish_s(seed, 2, begin, 12.0))


def stragglers_seed(laws: tuple[Stragglers, ...], law: Stragglers) -> int:
    """What the law at its place in `Compute` is given for seed 4."""
    from workbench.costs.compute import _seed_of

    return _seed_of(4, laws.index(law))


# ---------------------------------------------------------------- measured


def test_factors_of_measured_seconds_are_over_their_median() -> None:
    law = Empirical.from_seconds([0.2, 0.1, 0.4, math.nan, 0.2])
    assert law.values == (0.5, 1.0, 1.0, 2.0) and str(law) == "Empirical(values=4 of them, 0.5 to 2)"
    assert Empirical.from_seconds(np.array([[0.2, 0.1], [0.4, math.nan]])).values == (0.5, 1.0, 2.0)
    with pytest.raises(ConfigError, match="no seconds were measured"):
        Empirical.from_seconds([math.nan])


def test_by_rank_each_machine_keeps_its_own() -> None:
    law = EmpiricalByRank.from_seconds([[0.1, 0.1, 0.1, 0.12], [0.3, 0.33, math.nan, 0.3]])
    drawn = np.array([law.factors(0, step, 4) for step in range(400)])
    assert set(drawn[:, 0]) == set(drawn[:, 2]) == set(law.rows[0])
    assert set(drawn[:, 1]) == set(drawn[:, 3]) == set(law.rows[1]) and len(law.rows[1]) == 3
    assert not np.array_equal(drawn[:, 0], drawn[:, 2])
    with pytest.raises(ConfigError, match="shape \\(ranks, steps\\)"):
        EmpiricalByRank.from_seconds([1.0, 2.0])


# ---------------------------------------------------------------- by name, and refused


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("constant:2", Constant(factor=2)),
        ("constant", Constant()),
        ("lognormal:0.3", Lognormal(sigma=0.3)),
        ("Lognormal: 0.3", Lognormal(sigma=0.3)),
        ("shifted-exponential:1,0.5", ShiftedExponential(shift=1, scale=0.5)),
        ("pareto:2.5", Pareto(shape=2.5)),
        ("pareto:2.5,0.6", Pareto(shape=2.5, scale=0.6)),
        ("uniform:0.5,2", Uniform(low=0.5, high=2)),
        ("bimodal:0.05,4", Bimodal(probability=0.05, factor=4)),
        ("bimodal:factor=4,probability=0.05", Bimodal(probability=0.05, factor=4)),
        ("slow-machines:0.1,3", SlowMachines(share=0.1, factor=3)),
        ("slow-machines:3=4", SlowMachines(factor_of=((3, 4),))),
        ("slow-machines: 5 = 1.5, 3=4", SlowMachines(factor_of=((5, 1.5), (3, 4)))),
        ("slow-machines:0.1,3,2=4", SlowMachines(factor_of=((2, 4),), share=0.1, factor=3)),
        ("time-varying:0.3,0.9", TimeVarying(sigma=0.3, correlation=0.9)),
        ("failures:3600,60", Failures(mean_between_s=3600, repair_s=60)),
    ],
)
def test_laws_by_name(text: str, law: Stragglers) -> None:
    assert stragglers.get(text) == law


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("lognormall:0.3", "did you mean lognormal"),
        ("lognormal", "lognormal:sigma"),
        ("lognormal:0.3,2", "at most 1: lognormal:sigma"),
        ("lognormal:much", "a number"),
        ("lognormal:-1", "0 or more"),
        ("pareto:shap=2", "did you mean shape"),
        ("pareto:2.5,shape=3", "given twice"),
        ("shifted-exponential:1", "shifted-exponential:shift,scale"),
        ("slow-machines", "slow-machines:rank=factor"),
        ("slow-machines:3", "slow-machines:rank=factor"),
        ("slow-machines:3:4", "slow-machines:rank=factor"),
        ("slow-machines:3=", "factor of rank 3 is '': give a number"),
        ("slow-machines:3=four", "factor of rank 3 is 'four': give a number"),
        ("slow-machines:3=0", "above 0"),
        ("slow-machines:3=4,3=5", "names a rank twice"),
        ("slow-machines:-1=4", "counted from 0"),
        ("lognormal:3=4", "has no option '3'"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_fix(text: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        stragglers.get(text)


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (lambda: Lognormal(sigma=-0.1), "0 or more"),
        (lambda: Constant(factor=0), "above 0"),
        (lambda: ShiftedExponential(shift=0, scale=0), "above 0"),
        (lambda: ShiftedExponential(scale=math.inf), "finite"),
        (lambda: Pareto(shape=0), "above 0"),
        (lambda: Uniform(low=2, high=1), "low at most high"),
        (lambda: Bimodal(probability=1.5, factor=2), "0 to 1"),
        (lambda: Empirical(values=()), "at least one"),
        (lambda: EmpiricalByRank(rows=((1.0,), ())), "at least one"),
        (lambda: SlowMachines(), "no rank is slow"),
        (lambda: SlowMachines(share=0.1), "give both"),
        (lambda: SlowMachines(factor_of=((0, 2.0), (0, 3.0))), "twice"),
        (lambda: SlowMachines(factor_of={0: 0.0}), "above 0"),
        (lambda: TimeVarying(sigma=0.1, correlation=1.0), "at most 0.999"),
        (lambda: Windows(windows=()), "begin_s, end_s, factor"),
        (lambda: Windows(windows=((5.0, 4.0, 2.0),)), "in order"),
        (lambda: Windows(windows=((0.0, 3.0, 2.0), (2.0, 4.0, 2.0))), "do not overlap"),
        (lambda: Windows(windows=((0.0, 3.0, math.inf),)), "see Failures"),
        (lambda: Windows(windows=((0.0, 3.0, 2.0),), period_s=2.0), "within period_s"),
        (lambda: Failures(mean_between_s=0), "above 0"),
        (lambda: Failures(mean_between_s=1, repair_s=-1), "0 or more"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_fix(wrong: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        wrong()
