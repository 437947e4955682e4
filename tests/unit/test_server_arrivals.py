"""Arrival times of gradients at a server are the drawn ones if messages cost nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import workbench as wb
from workbench.analysis.arrivals import arrivals, share_of_updates_in_time
from workbench.costs import Compute, Lognormal
from workbench.errors import ConfigError

COMPUTE = Compute(forward_s=0.5, backward_s=0.5, stragglers=Lognormal(sigma=0.4))


def simulated(algorithm: wb.Algorithm, workers: int) -> wb.Run:
    problem = replace(wb.problems.get("digits-softmax"), train=range(10**6), test=None)
    how = {"network": "free", "compute": COMPUTE, "timing_only": True, "steps": 5, "batch_size": 1, "seed": 3}
    return wb.simulate(algorithm, problem, workers=workers, **how)


def test_without_traffic_gradients_arrive_as_drawn() -> None:
    found = arrivals(simulated(wb.BackupSGD(backups=0, dedicated=True), 7))
    assert found == pytest.approx(np.array([np.sort(COMPUTE.factors(3, step, 6)) for step in range(5)]))


def test_a_run_without_servers_is_refused() -> None:
    with pytest.raises(ConfigError, match="an algorithm with servers"):
        arrivals(simulated(wb.SynchronousSGD(), 2))


def test_all_but_some_whatever_the_law() -> None:
    """Two laws, drawn."""
    for law in (Lognormal(sigma=0.2), wb.costs.Pareto(shape=3.0)):
        times = np.sort([law.factors(0, step, 20) for step in range(4000)], axis=1)
        by = np.quantile(times[:, -1], 0.4)
        assert np.mean(times[:, -3] <= by) == pytest.approx(share_of_updates_in_time(20, 2, 0.4), abs=0.02)
