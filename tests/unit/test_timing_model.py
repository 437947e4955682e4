"""Pipe-SGD in parts: with one part it is Pipe-SGD, and with several it pays latencies as the timing model says."""

from __future__ import annotations

import pytest

from workbench import problems
from workbench.algorithms import PipeSGD
from workbench.collectives import Ring
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.papers.studies.simulated_steps import gradient_bytes, simulated_step_s
from workbench.papers.studies.timing_model import (
    PipeInParts,
    layerwise_gain,
    model_compute,
    part_layout,
    parts_off_formula,
    ring_sums_s,
    steps_in_parts,
)
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
