"""Staleness of each bucket, as servers record it, and as if all reads were at the beginning of a step."""

import numpy as np
import pytest

import workbench as wb
from workbench.analysis.staleness import staleness_by_bucket, staleness_if_read_first
from workbench.costs import Compute, Lognormal
from workbench.errors import ConfigError
from workbench.gradients import build_layout

PROBLEM = wb.problems.wide_mlp(megabytes=0.1, layers=5, samples=1_000)
COMPUTE = Compute(forward_s=1.0, backward_s=2.0)


def simulated(workers: int, algorithm: object, **settings: object) -> wb.Run:
    how: dict[str, object] = {
        "compute": COMPUTE,
        "network": "free",
        "timing_only": True,
        "steps": 24,
        "batch_size": 1,
        **settings,
    }
    return wb.simulate(algorithm, PROBLEM, workers=workers, **how)  # type: ignore[arg-type]


def test_one_worker_is_never_late() -> None:
    run = simulated(1, wb.AsyncSGD(shards=3))
    assert all(
        not values.any() for values in (*staleness_by_bucket(run).values(), *staleness_if_read_first(run).values())
    )


def test_a_read_with_the_push_makes_all_buckets_as_late_and_a_read_first_those_at_the_top_less() -> None:
    run = simulated(
        6,
        wb.AsyncSGD(shards=3),
        compute=Compute(forward_s=1.0, backward_s=2.0, stragglers=Lognormal(sigma=0.5)),
        steps=80,
    )
    answered = [values.mean() for values in staleness_by_bucket(run).values()]
    np.testing.assert_allclose(answered, 5, rtol=0.05)
    first = [values.mean() for values in staleness_if_read_first(run).values()]
    assert first == sorted(first) and first[-1] == pytest.approx(5, rel=0.05)
    shares = COMPUTE.ready_shares(build_layout(PROBLEM.model().named_parameters(), num_buckets=3))  # of backward
    np.testing.assert_allclose(first, [5 * (1 + 2 * share) / 3 for share in shares], rtol=0.05)


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="parameter servers"):
        staleness_by_bucket(simulated(2, wb.SynchronousSGD()))
    with pytest.raises(ConfigError, match="one gradient"):
        staleness_if_read_first(simulated(2, wb.BackupSGD(backups=0)))
    with pytest.raises(ConfigError, match="set trace_steps=None"):
        staleness_if_read_first(simulated(2, wb.AsyncSGD(), trace_steps=3))
    with pytest.raises(ConfigError, match="simulated"):
        staleness_if_read_first(wb.Run(info={"clock": "wall"}, metrics={}))
