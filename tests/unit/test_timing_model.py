"""Pipe-SGD in parts: with one part it is Pipe-SGD, and with several it pays latencies as the timing model says."""

from __future__ import annotations

import pytest

from tests.unit.made_runs import made_run
from workbench import problems
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.costs import Network, SlowMachines
from workbench.errors import ConfigError
from workbench.papers.studies.simulated_steps import gradient_bytes, simulated_step_s, simulated_steps
from workbench.papers.studies.timing_model import (
    PipeInParts,
    bucket_layout,
    layerwise_gain,
    layerwise_step_s,
    measured_over_predicted,
    model_compute,
    over_predicted_table,
    part_layout,
    parts_off_formula,
    ring_sums_s,
    steps_in_parts,
    sum_alone_s,
)
from workbench.papers.studies.training import compute_cost
from workbench.papers.studies.wires import Wire
from workbench.theory import all_reduce_s

LINK = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
TASK = problems.wide_mlp(megabytes=0.5, layers=4)
CUT = {"workers": 4, "link": LINK, "segments": [1, 2, 4], "steps": 12}


def test_one_part_is_the_whole_gradient() -> None:
    how = {"workers": 4, "network": LINK, "compute": model_compute(0.001), "steps": 12}
    whole, one = (simulated_step_s(a, TASK, **how) for a in (PipeSGD(collective=Ring()), PipeInParts(parts=1)))  # type: ignore[arg-type]
    assert one == pytest.approx(whole)
    whole_s = all_reduce_s(Ring(), gradient_bytes(TASK), 4, LINK)
    assert ring_sums_s(part_layout(TASK, 1), 4, LINK) == pytest.approx([whole_s], rel=1e-3)  # a bucket has a short tail


def test_parts_cost_latencies_only_if_communication_is_the_limit() -> None:
    surplus, change = parts_off_formula(TASK, **CUT)  # type: ignore[arg-type]
    assert surplus < 0.02 and change < 0.001


def test_simulated_steps_lie_on_their_lines() -> None:
    expected, simulated = steps_in_parts(TASK, **CUT)  # type: ignore[arg-type]
    assert [*expected] == [*simulated] and len(expected) == 4
    for name, line in expected.items():
        assert simulated[name] == pytest.approx(line, rel=0.02)
    slow = expected["Pipe-SGD, bound by communication"]
    assert slow[4] - slow[1] == pytest.approx(1e3 * 2 * 3 * 3 * LINK.latency_s, rel=0.02)


def test_d_sync_gains_by_layers() -> None:
    assert 1.1 < layerwise_gain(TASK, **CUT) < 2  # type: ignore[arg-type]


def test_more_parts_than_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="give fewer parts"):
        part_layout(TASK, 1000)


def test_buckets_are_of_about_the_bytes_that_were_asked_for_and_hold_all_parameters() -> None:
    size = gradient_bytes(TASK)
    layout = bucket_layout(TASK, size / 4)
    assert 2 <= len(layout.buckets) <= 4 and layout.parameter_numel * 4 == size
    assert len(bucket_layout(TASK, size).buckets) == 1


def test_layer_wise_sums_of_one_bucket_hide_nothing_and_quick_ones_all_but_the_last() -> None:
    compute = model_compute(0.1)
    whole = bucket_layout(TASK, gradient_bytes(TASK))
    assert layerwise_step_s(whole, compute, 4, LINK) == pytest.approx(0.1 + sum(ring_sums_s(whole, 4, LINK)))
    cut = bucket_layout(TASK, gradient_bytes(TASK) / 4)
    *hidden, last = ring_sums_s(cut, 4, LINK)
    assert hidden and layerwise_step_s(cut, compute, 4, LINK) == pytest.approx(0.1 + last)


def test_a_sum_alone_is_that_of_the_rank_that_waits_for_none() -> None:
    cost = compute_cost(0.01, SlowMachines(factor_of={1: 3.0}))
    how = {"workers": 4, "network": LINK, "compute": cost, "steps": 12, "trace_steps": None, "detail": "messages"}
    run = simulated_steps(SynchronousSGD(), TASK, **how)  # type: ignore[arg-type]
    assert sum_alone_s(run) == pytest.approx(LINK.all_reduce_s(gradient_bytes(TASK), 4), rel=0.01)


def test_measured_steps_are_divided_by_those_of_the_timing_model() -> None:
    wire = Wire(library="gloo", hosts=4, mbit=100)
    sum_s, megabytes = 0.02, wire.megabytes(0.02)
    # c = 50 ms: PS-Sync takes c + 4 m, D-Sync c + m, Pipe-SGD the longer
    predicted = {"PS-Sync": 0.05 + 4 * sum_s, "D-Sync": 0.05 + sum_s, "Pipe-SGD": 0.05}
    runs = {
        "wire": {
            name: [made_run([factor * step_s * (step + 1) for step in range(5)]) for factor in (1.0, 1.5)]
            for name, step_s in predicted.items()
        }
    }
    found = measured_over_predicted(runs, {"wire": wire}, megabytes, 0.05, list(predicted))
    assert found == {(str(wire), name): pytest.approx([1.0, 1.5], rel=1e-3) for name in predicted}
    assert measured_over_predicted(runs, {"wire": wire}, 10 * megabytes, 0.05, ["Pipe-SGD"]) == {
        (str(wire), "Pipe-SGD"): pytest.approx([0.25, 0.375], rel=1e-3)
    }, "m of 200 ms is longer"
    rows = [*over_predicted_table(found, "measured over predicted")]
    assert [(row["wire"], row["name"]) for row in rows] == [(str(wire), name) for name in predicted]
    assert rows[0]["over"].startswith("1.3 [")
