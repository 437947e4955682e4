"""Bucket times of simulated runs, whose steps the recurrences give to the last digits."""

from __future__ import annotations

from typing import Any, Literal

import pytest

import workbench as wb
from workbench.algorithms import ApplyOrder
from workbench.algorithms.bucket_plans import PlanState
from workbench.analysis.buckets import bucket_times
from workbench.costs import Compute, Network
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.ops import Backward, Now
from workbench.program import Context

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


@pytest.mark.parametrize("latency_s", [1e-5, 1e-3, 1e-2])
def test_the_chosen_plan_is_as_fast_as_the_best_bucket_size(latency_s: float) -> None:
    """Within 3 % of a sweep, whether short sums cost much or nothing."""
    problem = wb.problems.get("digits-mlp", hidden=[64, 64, 64, 64])
    how = {
        "workers": 4,
        "compute": COMPUTE,
        "timing_only": True,
        "network": Network(latency_s=latency_s, bandwidth_bytes_per_s=1e7),
    }

    def step_s(bucket_bytes: float | Literal["auto"] | None, steps: int) -> float:
        run = wb.simulate(wb.LayerwiseSGD(bucket_bytes=bucket_bytes), problem, steps=steps, **how)
        before, last = run.steps()[-2:]
        return float(last["seconds"] - before["seconds"])

    fixed = [step_s(size, 4) for size in (0, 8_000, 16_000, 32_000, 64_000, None)]
    assert step_s("auto", 27) <= 1.03 * min(fixed)


def test_plans_do_not_change_the_result_of_two_ranks() -> None:
    """From the first step on, in which each plan is tried."""
    problem = wb.problems.get("digits-mlp", hidden=[64, 64])
    runs = [
        wb.simulate(algorithm, problem, workers=2, compute=COMPUTE, network=NETWORK, steps=27, seed=3)
        for algorithm in (wb.LayerwiseSGD(bucket_bytes="auto"), wb.SynchronousSGD())
    ]
    losses = [run.curve("steps")[1].tolist() for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"collective": wb.collectives.Once(codec=wb.codecs.Truncate16())},
        {"apply": "any"},
        {"lanes": 2},
    ],
)
def test_settings_that_a_plan_decides_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bucket_bytes='auto'"):
        wb.LayerwiseSGD(bucket_bytes="auto", **settings)


def test_a_resumed_program_keeps_the_plan_of_its_checkpoint() -> None:
    layout = build_layout(trainable(wb.problems.get("digits-mlp", hidden=[64, 64]).model()), num_buckets=16)
    algorithm = wb.LayerwiseSGD(bucket_bytes="auto")
    first = [next(algorithm.worker(Context(0, 2, layout=layout, resumed=state))) for state in (None, PlanState(plan=2))]
    assert [type(request) for request in first] == [Now, Backward], "a fresh one measures"
