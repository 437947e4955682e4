"""Slept compute on real ranks: the times of the trace, the numbers of the training, the words of the record."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import assert_same, on_real_runtimes, train
from workbench.algorithms import AsyncSGD, LayerwiseSGD
from workbench.analysis import compare
from workbench.calibration import calibrate
from workbench.costs import Compute, SlowMachines
from workbench.errors import ConfigError
from workbench.settings import Settings

COMPUTE = Compute(forward_s=0.02, backward_s=0.04, update_s=0.01, stragglers=(SlowMachines(share=0.5, factor=2.0),))
HOW = Settings(steps=4, batch_size=3, timeout_s=30, seed=1, evaluate_every=0, compute=COMPUTE)
SHORT_S = 1e-4  # rounding of the trace


@on_real_runtimes
@pytest.mark.filterwarnings("ignore:compute took longer")
def test_ranks_take_the_seconds_and_compute_the_same(runtime: str) -> None:
    algorithm = LayerwiseSGD(bucket_bytes=200.0)
    trained = train(runtime, 2, algorithm, tiny.problem(), HOW)
    real = train(runtime, 2, algorithm, tiny.problem(), replace(HOW, compute=None))
    assert_same(
        trained.parameters[0], real.parameters[0], 0.0, "a rank that sleeps computes what one that does not computes"
    )
    run = trained.run
    factors = COMPUTE.factors(1, 0, 2)
    assert sorted(factors) == [1.0, 2.0]
    spans = run.spans
    assert "compute (slept)" in spans.lanes and "compute" not in spans.lanes
    for rank in range(2):
        mine = spans.of_rank(rank)
        for kind, seconds in (("forward", 0.02), ("backward", 0.04)):
            taken = mine.select(kinds=[kind]).table
            assert (
                len(taken) == 4
                and (taken["end_s"] - taken["start_s"] >= seconds * factors[rank] - SHORT_S - 0.005).all()
            )
        both = mine.select(kinds=["forward", "backward"]).table
        lengths = [sum(row["end_s"] - row["start_s"] for row in both if row["step"] == step) for step in range(4)]
        assert min(lengths) >= 0.06 * factors[rank] - 0.01
        updates = mine.select(kinds=["apply"]).table
        assert np.bincount(updates["step"], updates["end_s"] - updates["start_s"]).min() >= 0.01 - SHORT_S


@on_real_runtimes
@pytest.mark.filterwarnings("ignore:compute took longer")
def test_the_record_says_that_compute_was_slept(runtime: str) -> None:
    run = train(runtime, 2, LayerwiseSGD(bucket_bytes=200.0), tiny.problem(), HOW).run
    assert run.slept and run.label == "Watched, compute (slept)"
    assert "SlowMachines(share=0.5, factor=2.0)" in run.info["settings"]["compute"]
    assert any(note.startswith("compute (slept): forward 20 ms") for note in run.info["notes"])
    assert "compute (slept)" in str(compare([run])) and "compute (slept)" in str(run.timeline().layout.yaxis.ticktext)
    with pytest.raises(ConfigError, match="slept for its compute"):
        calibrate(run)


@on_real_runtimes
@pytest.mark.filterwarnings("ignore:compute took longer")
def test_workers_of_a_server_sleep_and_the_server_does_not(runtime: str) -> None:
    algorithm = AsyncSGD(dedicated=True)
    run = train(
        runtime, 3, algorithm, tiny.problem(), replace(HOW, compute=replace(COMPUTE, update_s=0.0, stragglers=()))
    ).run
    assert "compute (slept)" in run.label
    computing = {rank for rank in range(3) if len(run.spans.of_rank(rank).select(kinds=["forward"]).table)}
    assert len(computing) == 2
    ends = [row["seconds"] for rank in computing for row in run.metrics[rank] if "evaluation" not in row]
    assert max(ends) >= 4 * 0.06


def own_loop(late: bool) -> tuple[list[float], bool]:
    """On a rank: three steps with a slept compute of 40 ms, whose loss takes longer if `late`."""
    import warnings

    import torch

    from workbench.algorithms import SynchronousSGD
    from workbench.runtimes.user_loop.trainer import Trainer

    model: Any = torch.nn.Linear(3, 1)
    compute = Compute(forward_s=0.02, backward_s=0.02)
    seconds = []

    def loss() -> torch.Tensor:
        time.sleep(0.06 * late)
        found: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        return found

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), SynchronousSGD(), compute=compute) as trainer:
            for _ in range(3):
                begin = time.perf_counter()
                trainer.step(loss)
                seconds.append(time.perf_counter() - begin)
    return seconds, any(
        "compute took longer than the slept time in 1e+02 % of the steps" in str(one.message) for one in told
    )


def test_a_loop_of_your_own_sleeps_and_warns_if_compute_takes_longer() -> None:
    for seconds, _ in shared_pool("torch", 2).run(own_loop, False):
        assert min(seconds) >= 0.04
    assert all(told for _, told in shared_pool("torch", 2).run(own_loop, True))
