"""Reading data on real ranks: it has spans of its own, and all ways of reading train alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.laws import tiny
from tests.laws.train import on_real_runtimes, train
from workbench.algorithms import LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.errors import WorkbenchError
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace.run import Run

HOW = Settings(steps=6, batch_size=3, timeout_s=60, evaluate_every=0)
READ_S = 0.01  # of an item


@final
class Slow(Dataset[Any]):
    """A data set whose items take their time."""

    def __init__(self) -> None:
        self.columns = tiny.data()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(READ_S)
        return tuple(column[index] for column in self.columns)


@final
class Dealt(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(zip(*tiny.data(), strict=True))


def losses(run: Run) -> list[float]:
    return [float(loss) for loss in run.curve("steps", "loss")[1]]


@on_real_runtimes
@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), PipeSGD(width=2), LayerwiseSGD()], ids=lambda one: type(one).__name__
)
def test_reading_is_no_computation(algorithm: Algorithm, runtime: str) -> None:
    run = train(runtime, 2, algorithm, replace(tiny.problem(), train=Slow()), HOW).run
    for rank in range(2):
        loads, forward = (run.spans.of_rank(rank).select(kinds=[kind]).table for kind in ("load", "forward"))
        assert sorted(loads["step"]) == list(range(6))
        for step in range(6):
            (load,), (first, *_) = loads[loads["step"] == step], forward[forward["step"] == step]
            assert load["end_s"] <= first["start_s"] + 1e-6
            least_s = READ_S * next(row for row in run.metrics[rank] if row["step"] == step)["num_samples"]
            assert load["end_s"] - load["start_s"] >= least_s
            assert first["end_s"] - first["start_s"] < least_s, "the computation is timed without it"


@on_real_runtimes
def test_loader_processes_train_alike_and_read_ahead(runtime: str) -> None:
    plain = train(runtime, 2, SynchronousSGD(), tiny.problem(), HOW)
    loader = DataLoader(Slow(), shuffle=True, num_workers=1)
    ahead = train(runtime, 2, SynchronousSGD(), replace(tiny.problem(), train=loader), HOW)
    assert torch.equal(ahead.final, plain.final)


@on_real_runtimes
def test_a_stream_is_divided_among_ranks(runtime: str) -> None:
    run = train(runtime, 2, SynchronousSGD(), replace(tiny.problem(), train=Dealt()), HOW).run
    again = train(runtime, 2, SynchronousSGD(), replace(tiny.problem(), train=Dealt()), HOW).run
    assert losses(run) == losses(again) and len(losses(run)) == 6
    assert [row["num_samples"] for row in run.metrics[1] if "loss" in row] == [3] * 6


@on_real_runtimes
def test_an_error_in_the_data_names_the_rank(runtime: str) -> None:
    def batches(rank: int, num_ranks: int) -> list[Any]:
        return [] if rank == 1 else [tuple(column[:3] for column in tiny.data())]

    with pytest.raises(WorkbenchError, match="rank 1 of 2 gets no whole minibatch"):
        train(runtime, 2, SynchronousSGD(), replace(tiny.problem(), train=batches), HOW)
