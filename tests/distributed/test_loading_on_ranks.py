"""Reading data on real ranks: it has spans of its own, and all ways of reading train alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.distributed.test_rejoin import NUM_RANKS, STEPS_OF_FEWER, and_weights, expected, until_left, with_another
from tests.laws import tiny
from tests.laws.train import on_real_runtimes, train
from workbench.algorithms import LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.errors import WorkbenchError
from workbench.program import Algorithm
from workbench.runtimes.rank.join import rejoin
from workbench.runtimes.rank.main import Job
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
class Noisy(Dataset[Any]):
    """A data set that draws noise for each item."""

    def __init__(self) -> None:
        self.columns = tiny.data()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = (column[index] for column in self.columns)
        return x + torch.randn_like(x), y


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


@final
class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return ((x + torch.randn_like(x), y) for x, y in zip(*tiny.data(), strict=True))


@on_real_runtimes
@pytest.mark.parametrize("data", [Noisy, NoisyStream])
def test_a_simulation_reads_what_loader_processes_of_ranks_read(data: type[Any], runtime: str) -> None:
    loader = DataLoader(data(), num_workers=1, shuffle=None if data is NoisyStream else True)
    problem = replace(tiny.problem(), train=loader)
    real, simulated = (train(one, 2, SynchronousSGD(), problem, HOW) for one in (runtime, "simulated"))
    assert losses(real.run) == losses(simulated.run)
    assert torch.equal(real.final, simulated.final)


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


DATA = {
    "samples that draw, by loader processes": lambda: DataLoader(Noisy(), shuffle=True, num_workers=1),
    "a sampler that draws": lambda: DataLoader(
        Noisy(), sampler=WeightedRandomSampler([1.0, 2.0] * 11 + [3.0], 23, generator=torch.Generator())
    ),
    "a stream": Dealt,
}


@on_real_runtimes
@pytest.mark.parametrize("data", DATA)
def test_a_resumed_run_reads_what_an_unbroken_one_reads(data: str, runtime: str) -> None:
    """Over the end of an epoch of 23 samples: the run is stopped in the first, and continues in the second."""
    problem = replace(tiny.problem(), train=DATA[data]())
    whole = train(runtime, 2, SynchronousSGD(), problem, HOW)
    first = train(runtime, 2, SynchronousSGD(), problem, HOW, stop_after=2)
    assert first.run.info["status"] == "stopped"
    rest = train(runtime, 2, SynchronousSGD(), problem, HOW, resume=first.checkpoint)
    assert torch.equal(rest.final, whole.final)
    assert losses(rest.run) == losses(whole.run)[3:]


def test_on_another_number_of_ranks_the_record_says_what_a_stream_repeats() -> None:
    problem = replace(tiny.problem(), train=Dealt())
    first = train("torch", 2, SynchronousSGD(), problem, HOW, stop_after=2)
    rest = train("torch", 1, SynchronousSGD(), problem, HOW, resume=first.checkpoint).run
    assert [row["step"] for row in rest.steps()] == [3, 4, 5]
    assert any("some samples are used twice or not at all" in note for note in rest.info["notes"])


def rejoins_and_counts(job: Job, rank: int) -> tuple[Tensor, int]:
    """Train in the place of that rank. Return its parameters, and how many processes it then has."""
    until_left(job, rank)
    final = and_weights(rejoin, job, rank)
    return final, len(psutil.Process().children())


def test_loader_processes_of_ranks_that_shrink_and_grow_read_the_right_samples() -> None:
    """One of three ranks is killed, two continue, and another process takes its place."""
    loader = DataLoader(TensorDataset(*tiny.data()), shuffle=True, num_workers=1)
    found, came, run = with_another(SynchronousSGD(), rejoins_and_counts, STEPS_OF_FEWER, data=loader)
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    (final, children), fewer, more = came.value, run.info["shrunk"][0]["step"], run.info["joined"][0]["step"]
    assert 0 < fewer < more < (STEPS_OF_FEWER.steps or 0) and len(run.metrics) == NUM_RANKS
    assert torch.allclose(final, expected(fewer, more), rtol=1e-11, atol=1e-13)
    assert children == 0, "its loader processes have ended"
