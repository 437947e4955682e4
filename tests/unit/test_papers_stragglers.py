"""Delay distributions, the rule for backups, staleness distributions and timing-only steps of the papers' notebooks."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.algorithms import AsyncSGD, BackupSGD
from workbench.costs import Constant, Lognormal, SlowMachines
from workbench.errors import ConfigError
from workbench.papers.studies import stragglers
from workbench.papers.studies.backup_rule import BackupRule, idle_shares, iterations_of
from workbench.theory import fit_iterations

pytestmark = pytest.mark.notebooks
PAPER = fit_iterations([(50, 137.5e3), (100, 76.2e3)])


@pytest.mark.parametrize("name", stragglers.OF_SPREAD)
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_a_distribution_has_the_spread_that_was_asked_for(name: str, spread: float) -> None:
    law = stragglers.of_spread(name, spread)
    levels = (np.arange(400_000) + 0.5) / 400_000
    drawn = law.quantile(levels)
    assert drawn.std() / drawn.mean() == pytest.approx(spread, rel=0.03)
    assert stragglers.arrival_of(law).mean_s == pytest.approx(1.0, rel=1e-3)


def test_workers_that_do_not_draw_independently_are_refused() -> None:
    with pytest.raises(ConfigError, match="give random ones"):
        stragglers.independent("slow-machines:0.1,3")


def test_counts_that_no_law_fits_are_interpolated() -> None:
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


def test_carried_stragglers_and_overhead_change_the_rule() -> None:
    law = Lognormal(sigma=0.3)
    rule = BackupRule(machines=40, iterations=PAPER, drawn=300)
    assert rule.step_s(law, [0, 4])[4] > rule.step_s(law, [0, 4], cancelled=True)[4], "late also in the next step"
    assert (
        rule.best(law).backups >= BackupRule(machines=40, iterations=PAPER, drawn=300, overhead=5.0).best(law).backups
    )


@pytest.mark.parametrize("kind", stragglers.STALENESS)
def test_a_distribution_of_staleness_has_the_mean_that_was_asked_for(kind: str) -> None:
    law = stragglers.staleness_of(kind, 6)
    drawn = [law.draw(np.random.default_rng(seed)) for seed in range(4000)]
    assert np.mean(drawn) == pytest.approx(6, rel=0.1)


def test_asynchronous_workers_make_p_updates_in_the_time_of_a_gradient() -> None:
    run = stragglers.timed(AsyncSGD(), Lognormal(sigma=0.2), workers=5, steps=60, mean=Lognormal(sigma=0.2).mean)
    assert stragglers.update_interval_s(run) == pytest.approx(0.2, rel=0.05)
    assert stragglers.steady_staleness(run).mean() == pytest.approx(4, rel=0.05)
    assert stragglers.used_share([run]) == 1.0
