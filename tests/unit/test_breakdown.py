"""The parts of a simulated step next to the timing model, and what a codec takes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench import problems
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.codecs import Linear8
from workbench.collectives import Ring
from workbench.costs import Network
from workbench.papers.studies.breakdown import breakdown, codec_share, parts_of_a_sum
from workbench.papers.studies.simulated_steps import gradient_bytes, simulated_steps
from workbench.papers.studies.training import compute_cost
from workbench.program import Algorithm
from workbench.theory import all_reduce_s
from workbench.trace.run import Run

LINK = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8, encode_s_per_byte=1e-9, decode_s_per_byte=5e-10)
TASK = problems.wide_mlp(megabytes=0.5)
STEADY = slice(4, 12)


def traced(algorithm: Algorithm, compute_s: float) -> Run:
    compute = compute_cost(compute_s)
    return simulated_steps(algorithm, TASK, workers=4, network=LINK, compute=compute, steps=14, trace_steps=None)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_d_sync_exposes_m_and_a_pipeline_what_is_longer_than_c(share: float) -> None:
    sum_s = all_reduce_s(Ring(), gradient_bytes(TASK), 4, LINK)
    times = {"compute_s": share * sum_s, "sum_s": sum_s}
    sync = breakdown(traced(SynchronousSGD(collective=Ring()), share * sum_s), STEADY, overlaps=False, **times)
    pipe = breakdown(traced(PipeSGD(collective=Ring()), share * sum_s), STEADY, overlaps=True, **times)
    assert sync["expected_s"] == sum_s and pipe["expected_s"] == pytest.approx(max(0.0, 1 - share) * sum_s)
    assert sync["exposed_s"] == pytest.approx(sum_s, rel=0.01) and sync["hidden"] == 0
    assert pipe["error"] < 0.01 and pipe["hidden"] == pytest.approx(min(1.0, share), rel=0.01)
    assert sync["over"] == pipe["over"] == pytest.approx(1 / share)


def test_a_codec_takes_its_seconds_and_saves_what_the_wire_saves() -> None:
    ring = Ring(codec=Linear8())
    run, plain = traced(SynchronousSGD(collective=ring), 0.01), traced(SynchronousSGD(collective=Ring()), 0.01)
    found, size = codec_share(run, plain, STEADY), gradient_bytes(TASK)
    sum_s, plain_s = all_reduce_s(ring, size, 4, LINK), all_reduce_s(Ring(), size, 4, LINK)
    # A rank encodes 4 blocks of a quarter, and decodes 7: in each of 6 hops, and its own at the end.
    assert found["codec_s"] == pytest.approx(size / 4 * (4 * 1e-9 + 7 * 5e-10), rel=0.01)
    assert found["share"] == pytest.approx(found["codec_s"] / (0.01 + sum_s), rel=0.01)
    assert found["saved"] == pytest.approx((plain_s - sum_s) / (0.01 + plain_s), rel=0.02)
    free = replace(LINK, encode_s_per_byte=0.0, decode_s_per_byte=0.0)
    assert found["wire_s"] <= all_reduce_s(ring, size, 4, free) * 1.01


def test_the_parts_of_a_sum_are_those_of_each_rank_and_step() -> None:
    link = replace(LINK, sum_s_per_byte=2e-9)
    how = {"workers": 4, "network": link, "compute": compute_cost(0.01), "trace_steps": None}
    block = gradient_bytes(TASK) / 4
    for steps in (4, 8):
        run = simulated_steps(SynchronousSGD(collective=Ring()), TASK, steps=steps, **how)  # type: ignore[arg-type]
        parts = parts_of_a_sum(run)
        # A rank receives six blocks and adds three; its next receive has begun, and waits while the sender adds
        adds_s = 3 * block * 2e-9
        expected = {"wait": adds_s, "wire": 6 * (1e-4 + block / 1e8), "decode": 0.0, "sum": adds_s, "encode": 0.0}
        assert parts == pytest.approx(expected, rel=0.01, abs=1e-9)
        assert parts_of_a_sum(run, skipped=0) == pytest.approx(parts, rel=1e-4), "all steps are equal"
