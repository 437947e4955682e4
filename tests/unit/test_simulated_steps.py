"""Steps simulated by shapes alone take what the timing model says, and one late worker delays one step."""

from __future__ import annotations

import pytest

from workbench import problems
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.costs import Network
from workbench.papers.studies.simulated_steps import (
    LateOnce,
    gradient_bytes,
    simulated_step_s,
    simulated_steps,
)
from workbench.papers.studies.training import compute_cost
from workbench.theory import all_reduce_s

LINK = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e8)
TASK = problems.wide_mlp(megabytes=0.5)
SUM_S = all_reduce_s(Ring(), gradient_bytes(TASK), 4, LINK)


def test_the_bytes_of_a_gradient_are_those_of_its_parameters() -> None:
    assert gradient_bytes(TASK) == sum(4 * weight.numel() for weight in TASK.model().parameters())


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_step_takes_c_plus_m_or_the_longer(share: float) -> None:
    compute = compute_cost(share * SUM_S)
    sync, pipe = (
        simulated_step_s(algorithm, TASK, workers=4, network=LINK, compute=compute, steps=12)
        for algorithm in (SynchronousSGD(collective=Ring()), PipeSGD(width=2, collective=Ring()))
    )
    assert sync == pytest.approx((1 + share) * SUM_S, rel=0.01)
    assert pipe == pytest.approx(max(1.0, share) * SUM_S, rel=0.01)


def test_a_pipeline_that_still_fills_is_left_out() -> None:
    how = {"workers": 4, "network": LINK, "compute": compute_cost(SUM_S / 2), "steps": 12}
    warmed = PipeSGD(width=2, warmup_steps=3)
    ends = [row["seconds"] for row in simulated_steps(warmed, TASK, **how).steps()]  # type: ignore[arg-type]
    for filled in (0, 4):
        found = simulated_step_s(warmed, TASK, filled=filled, **how)
        assert found == pytest.approx((ends[-1] - ends[filled]) / (11 - filled))
    assert (ends[-1] - ends[0]) / 11 != pytest.approx((ends[-1] - ends[4]) / 7, rel=0.01), "the warm-up counts in one"


def test_one_worker_is_late_once() -> None:
    late = LateOnce(factor=3.0, rank=2, step=5)
    assert late.factors(0, 5, 4).tolist() == [1, 1, 3, 1]
    assert late.factors(0, 4, 4).tolist() == late.factors(7, 6, 4).tolist() == [1] * 4
    ends = [
        simulated_steps(
            SynchronousSGD(),
            TASK,
            workers=4,
            network=LINK,
            compute=compute_cost(0.1, *laws),
            steps=8,
            detail="messages",
        ).steps()[-1]["seconds"]
        for laws in ((), (late,))
    ]
    assert ends[1] - ends[0] == pytest.approx(0.2)
