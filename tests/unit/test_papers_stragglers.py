"""Delay distributions, the rule for backups, staleness distributions and timing-only steps of the papers' notebooks."""

from __future__ import annotations

import numpy as np
import pytest

from workbench import problems
from workbench.algorithms import AsyncSGD, BackupSGD, SerialSGD
from workbench.costs import Constant, Lognormal, SlowMachines
from workbench.errors import ConfigError
from workbench.papers.studies import stragglers, training
from workbench.papers.studies.backup_rule import (
    BackupRule,
    backups_table,
    idle_shares,
    iterations_of,
    relative_times,
    updates_to_loss,
)
from workbench.papers.studies.training import compute_cost
from workbench.theory import fit_iterations

pytestmark = pytest.mark.notebooks
PAPER = fit_iterations([(50, 137.5e3), (100, 76.2e3)])


@pytest.mark.parametrize("name", stragglers.OF_SPREAD)
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_a_distribution_has_the_spread_that_was_asked_for(name: str, spread: float) -> None:
    distribution = stragglers.of_spread(name, spread)
    levels = (np.arange(400_000) + 0.5) / 400_000
    drawn = distribution.quantile(levels)
    assert drawn.std() / drawn.mean() == pytest.approx(spread, rel=0.03)
    assert stragglers.arrival_of(distribution).mean_s == pytest.approx(1.0, rel=1e-3)


def test_workers_that_do_not_draw_independently_are_refused() -> None:
    with pytest.raises(ConfigError, match="give random ones"):
        stragglers.independent("slow-machines:0.1,3")


def test_counts_that_no_formula_fits_are_interpolated() -> None:
    rising = iterations_of({10: 100.0, 20: 120.0})  # more gradients, more updates
    assert rising(15) == pytest.approx(110.0)
    assert rising(5) == pytest.approx(200.0), "as many gradients in all"


def test_steady_machines_need_no_backup_and_slow_ones_one_each() -> None:
    rule = BackupRule(machines=20, iterations=PAPER, drawn=40)
    steady = rule.best(Constant())
    assert steady.backups == 0 and idle_shares(steady) == pytest.approx((0.0, 0.0))
    assert rule.step_s(Constant(), [0, 3]) == pytest.approx({0: 1.0, 3: 1.0})
    assert rule.machine_seconds(Constant(), [0, 5]) == pytest.approx({0: 1.0, 5: 1.25}), "paid, and of no use"
    slow = SlowMachines(factor_of={0: 3.0, 1: 3.0})
    for backups, seconds in ((1, 3.0), (2, 1.0)):
        run = stragglers.timed(BackupSGD(backups=backups), slow, workers=6, steps=4, mean=1.0)
        assert stragglers.steps_s(run, 4) == pytest.approx(seconds)
        assert stragglers.share_of_ranks([run], [0, 1]) == pytest.approx(0.2 if backups == 1 else 0.0)


def test_backlog_and_overhead_change_the_rule() -> None:
    distribution = Lognormal(sigma=0.3)
    rule = BackupRule(machines=40, iterations=PAPER, drawn=300)
    assert rule.step_s(distribution, [0, 4])[4] > rule.step_s(distribution, [0, 4], cancelled=True)[4], (
        "late also in the next step"
    )
    assert (
        rule.best(distribution).backups
        >= BackupRule(machines=40, iterations=PAPER, drawn=300, overhead=5.0).best(distribution).backups
    )


@pytest.mark.parametrize("kind", stragglers.STALENESS)
def test_a_distribution_of_staleness_has_the_mean_that_was_asked_for(kind: str) -> None:
    distribution = stragglers.staleness_of(kind, 6)
    drawn = [distribution.draw(np.random.default_rng(seed)) for seed in range(4000)]
    assert np.mean(drawn) == pytest.approx(6, rel=0.1)


def test_asynchronous_workers_make_p_updates_in_the_time_of_a_gradient() -> None:
    run = stragglers.timed(AsyncSGD(), Lognormal(sigma=0.2), workers=5, steps=60, mean=Lognormal(sigma=0.2).mean)
    assert stragglers.update_interval_s(run) == pytest.approx(0.2, rel=0.05)
    assert stragglers.steady_staleness(run).mean() == pytest.approx(4, rel=0.05)
    assert stragglers.used_share([run]) == 1.0


def test_the_best_number_of_backups_by_the_papers_two_numbers_is_four() -> None:
    rule = BackupRule(machines=100, iterations=PAPER, drawn=1000)
    fresh, late = rule.best_if_cancelled(Lognormal(sigma=0.1)), rule.best(Lognormal(sigma=0.1))
    assert (fresh.backups, late.backups) == (5, 4)
    (row,) = backups_table({0.1: (fresh, late)}, "best b")
    assert (row["fresh"], row["backlog"]) == (5, 4)
    assert row["fresh_gain"] == fresh.gain > row["backlog_gain"] == late.gain > 1
    times = relative_times(late, range(10))
    assert times[0] == 1.0 and min(times, key=lambda b: times[b]) == 4
    assert 1 / times[4] == pytest.approx(late.gain)


def test_updates_to_a_loss_are_those_of_the_first_evaluation_with_it() -> None:
    problem = problems.get("digits-softmax")
    how = {"lr": 0.2, "batch_size": 32, "compute": compute_cost(1.0), "evaluate_every": 1, "trace_steps": 0}
    found = updates_to_loss(problem, 1.5, [0, 1], limit=40, **how)  # type: ignore[arg-type]
    for seed, updates in enumerate(found):
        losses = training.train(SerialSGD(), problem, workers=1, steps=40, seed=seed, **how).curve(
            "steps", "test_loss"
        )[1]  # type: ignore[arg-type]
        assert losses[updates - 1] <= 1.5 < min(losses[: updates - 1])
    with pytest.raises(ConfigError, match="is not reached in 2 updates"):
        updates_to_loss(problem, 1.5, [0], limit=2, **how)  # type: ignore[arg-type]
