"""Bucket times of simulated runs, whose steps the recurrences give to the last digits."""

from __future__ import annotations

import pytest

import workbench as wb
from workbench.algorithms import ApplyOrder
from workbench.analysis.buckets import bucket_times
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable

NETWORK = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
COMPUTE = Compute(forward_s=0.01, backward_s=0.02, update_s=0.004)


def simulated(algorithm: wb.Algorithm) -> wb.Run:
    problem = wb.problems.get("digits-mlp", hidden=[64, 64])
    return wb.simulate(algorithm, problem, workers=4, network=NETWORK, compute=COMPUTE, timing_only=True, steps=5)


@pytest.mark.parametrize("order", list(ApplyOrder))
def test_recurrences_of_a_trace_are_its_steps(order: ApplyOrder) -> None:
    algorithm = wb.LayerwiseSGD(bucket_bytes=0, apply=order)
    found = bucket_times(simulated(algorithm))
    assert (found.forward_s, found.backward_s) == pytest.approx((0.01, 0.02))
    assert sum(found.update_s) == pytest.approx(0.004, rel=1e-3)
    layout = build_layout(trainable(wb.problems.get("digits-mlp", hidden=[64, 64]).model()), 0)
    schedule = found.recurrences(COMPUTE.ready_shares(layout), order.value)
    assert schedule.begin_s == pytest.approx(found.begin_s, rel=1e-6)
    assert schedule.end_s == pytest.approx(found.end_s, rel=1e-6)
    assert schedule.step_s == pytest.approx(found.step_s, rel=1e-6)


def test_a_run_without_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="no sums by bucket"):
        bucket_times(simulated(wb.SynchronousSGD()))
