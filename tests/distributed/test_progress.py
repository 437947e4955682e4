"""However communication makes progress, the numbers are the same; what cannot be is refused in words."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import assert_same, on_real_runtimes, train
from workbench.algorithms import AsyncSGD, DeAR, LayerwiseSGD, PipeSGD
from workbench.collectives import Linear, Ring
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.user_loop.trainer import Trainer
from workbench.settings import PROGRESS, Settings

ROUNDING = 1e-11


def settings(progress: str) -> Settings:
    return Settings(steps=5, batch_size=3, timeout_s=30, optimizer=tiny.momentum, progress=progress)  # type: ignore[arg-type]


@on_real_runtimes
@pytest.mark.parametrize("progress", PROGRESS)
def test_native_sums_are_the_same(progress: str, runtime: str) -> None:
    for algorithm in (
        PipeSGD(width=3),
        LayerwiseSGD(bucket_bytes=100, lanes=2 if progress in ("auto", "thread") else 1),
    ):
        expected = train("simulated", 3, algorithm, tiny.problem(), settings("auto"))
        found = train(runtime, 3, algorithm, tiny.problem(), settings(progress))
        for rank in range(3):
            assert_same(found.parameters[rank], expected.parameters[0], ROUNDING)


@pytest.mark.parametrize("progress", ["auto", "library"])
def test_long_sums_go_one_after_the_other(progress: str) -> None:
    """5 MB each, three under way at once; begun by the library they overlap, and the numbers are the same."""
    problem = tiny.problem(
        partial(nn.Linear, tiny.NUM_FEATURES, 90_000, dtype=torch.float64),
        loss=lambda out, y: out.square().mean(),
        test=None,
    )
    found = train("torch", 2, PipeSGD(width=4), problem, settings(progress))
    expected = train("simulated", 2, PipeSGD(width=4), problem, settings("auto"))
    assert_same(found.parameters[0], expected.parameters[0], ROUNDING)
    sums = found.run.spans.select(kinds=["all_reduce"]).table
    for rank in range(2):
        mine = np.sort(sums[sums["rank"] == rank], order="start_s")
        overlapping = (mine["start_s"][1:] < mine["end_s"][:-1]).sum()
        assert overlapping == 0 if progress == "auto" else len(mine) == 5


@on_real_runtimes
@pytest.mark.parametrize("progress", ["auto", "blocking", "tests", "thread"])
def test_sub_programs_are_the_same_to_the_last_bit(progress: str, runtime: str) -> None:
    for algorithm in (PipeSGD(width=2, collective=Linear()), DeAR(bucket_bytes=100)):
        expected = train("simulated", 3, algorithm, tiny.problem(), settings("auto"))
        found = train(runtime, 3, algorithm, tiny.problem(), settings(progress))
        assert_same(found.parameters[1], expected.parameters[1], 0)


@pytest.mark.parametrize("algorithm", [PipeSGD(collective=Ring()), DeAR()], ids=["pipe", "dear"])
def test_what_takes_the_librarys_own_sums_only_says_so(algorithm: Algorithm) -> None:
    with pytest.raises(ConfigError, match=r"collective=Native\(\), or progress='thread'"):
        train("torch", 3, algorithm, tiny.problem(), settings("library"))


@on_real_runtimes
@pytest.mark.parametrize("progress", PROGRESS)
def test_servers_answer_whatever_the_progress(progress: str, runtime: str) -> None:
    trained = train(runtime, 3, AsyncSGD(), tiny.problem(), settings(progress))
    assert len(trained.run.updates()) == 15
    for rank in range(3):
        assert_same(trained.parameters[rank][-1:], trained.parameters[0][-1:], 0)


def test_an_unknown_progress_is_named() -> None:
    with pytest.raises(ConfigError, match="choose one of auto, blocking"):
        settings("magic")


def train_by_hand(progress: str) -> list[float]:
    """On a rank: a loop of one's own; the weights at its end."""
    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    torch.nn.init.constant_(model.bias, 0.0)
    with Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), PipeSGD(), progress=progress) as trainer:
        for step in range(4):
            trainer.step(lambda step=step: model(torch.full((2, 3), float(step + trainer.rank))).square().mean())
    return [float(value) for value in model.weight[0]]


@on_real_runtimes
@pytest.mark.parametrize("progress", PROGRESS)
def test_a_trainer_takes_it_too(progress: str, runtime: str) -> None:
    auto = shared_pool("torch", 2).run(train_by_hand, "auto")
    found = shared_pool(runtime, 2).run(train_by_hand, progress)
    assert found[0] == found[1] == pytest.approx(auto[0], rel=1e-5)
