"""A failure of one rank: every rank leaves within seconds with an error that names it; the ranks can run again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import shared_pool
from tests.distributed.ranks import Outcome
from tests.laws import tiny
from tests.laws.train import MPI, by_turns, make_job, train
from workbench.algorithms import ApplyOrder, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.errors import ConfigError, Diverged, PeerFailed, RankMismatch, Stalled
from workbench.problems.base import Problem
from workbench.program import Algorithm, settings_of
from workbench.replica.local_training import EVALUATION_BATCH
from workbench.runtimes.control.commands import STOP, write_command
from workbench.runtimes.rank.main import Job, run_rank
from workbench.settings import Settings

NUM_RANKS = 3
BROKEN = 1  # the rank on which things go wrong
SOON_S = 8.0  # a rank looks for failed peers four times a second; the rest is a busy machine
HOW = Settings(steps=20, batch_size=1, timeout_s=60)

ALGORITHMS = [
    SynchronousSGD(),
    SynchronousSGD(collective=Ring()),
    PipeSGD(width=3),
    PipeSGD(width=2, collective=Ring()),
    LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.ANY),
]


def ids(algorithm: Algorithm) -> str:
    return f"{type(algorithm).__name__}-{type(settings_of(algorithm)['collective']).__name__}"


def on_one_runtime(turn: int) -> pytest.MarkDecorator:
    """Each algorithm on one runtime; an exception ends it on both."""
    return pytest.mark.parametrize(*by_turns(ALGORITHMS, turn).args, indirect=["runtime"])


@pytest.fixture(params=["torch", MPI])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """A runtime, on whose same processes a run must succeed after the fault."""
    yield request.param
    pool = shared_pool(request.param, NUM_RANKS)
    starts = pool.num_starts
    train(request.param, NUM_RANKS, LayerwiseSGD(bucket_bytes=200.0), tiny.problem(), replace(HOW, steps=2))
    assert pool.num_starts == max(starts, 1), "the ranks had to be started anew"


def outcomes(
    runtime: str,
    algorithm: Algorithm,
    broken: Problem,
    how: Settings = HOW,
    *,
    sound: Problem | None = None,
    **more: Any,
) -> tuple[list[Outcome], Job]:
    """Each rank's outcome of a job whose problem on rank 1 is another."""
    job = make_job(runtime, NUM_RANKS, algorithm, sound or tiny.problem(partial(tiny.FailsAt, None, 0)), how, **more)
    jobs = [replace(job, problem=broken) if rank == BROKEN else job for rank in range(NUM_RANKS)]
    return shared_pool(runtime, NUM_RANKS).outcomes([(run_rank, (job,)) for job in jobs]), job  # type: ignore[arg-type]


def check_record(job: Job, words: str) -> None:
    """`run.json` says failed and why; the broken rank's error is in its file, and the others left none."""
    info = json.loads((Path(job.folder) / "run.json").read_text())
    assert info["status"] == "failed"
    assert words in info["error"]
    assert f"rank {BROKEN}" in info["error"]
    assert [path.name for path in sorted(Path(job.folder).glob("failed-*.json"))] == [f"failed-{BROKEN:05d}.json"]
    failure = json.loads((Path(job.folder) / f"failed-{BROKEN:05d}.json").read_text())
    assert failure["rank"] == BROKEN
    assert words in failure["error"]
    assert "Traceback" in failure["traceback"]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=ids)
def test_an_exception_in_one_ranks_model_ends_the_run_on_all(algorithm: Algorithm, runtime: str) -> None:
    found, job = outcomes(
        runtime, algorithm, tiny.problem(partial(tiny.FailsAt, ZeroDivisionError("no such thing"), 3))
    )
    assert isinstance(found[BROKEN].error, ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(found[rank].error, PeerFailed), found[rank].error
        assert f"rank {BROKEN} failed at step 3: ZeroDivisionError: no such thing" in str(found[rank].error)
    assert max(outcome.seconds for outcome in found) < SOON_S
    check_record(job, "ZeroDivisionError: no such thing")


def test_an_exception_before_the_first_exchange(runtime: str) -> None:
    """A model that cannot even be made."""
    found, job = outcomes(runtime, SynchronousSGD(), tiny.problem(partial(raising, MemoryError("too large"))))
    assert isinstance(found[BROKEN].error, MemoryError)
    assert all(isinstance(found[rank].error, PeerFailed) for rank in (0, 2))
    assert max(outcome.seconds for outcome in found) < SOON_S
    check_record(job, "MemoryError: too large")


def test_an_exception_in_one_ranks_evaluation(runtime: str) -> None:
    """The others wait in the sum of the next step, or for the clocks at the end. Each rank judges a batch."""
    sound = tiny.problem(partial(tiny.FailsAt, None, 0), test=tiny.data(NUM_RANKS * EVALUATION_BATCH))
    broken = replace(sound, correct=partial(raising, KeyError("label")))
    found, job = outcomes(runtime, PipeSGD(width=2), broken, replace(HOW, evaluate_every=4), sound=sound)
    assert isinstance(found[BROKEN].error, KeyError)
    assert all(isinstance(found[rank].error, PeerFailed) for rank in (0, 2))
    assert max(outcome.seconds for outcome in found) < SOON_S
    check_record(job, "KeyError: 'label'")


def test_an_interrupt_of_one_rank(runtime: str) -> None:
    found, job = outcomes(runtime, PipeSGD(width=2), tiny.problem(partial(tiny.FailsAt, KeyboardInterrupt(), 3)))
    assert isinstance(found[BROKEN].error, KeyboardInterrupt)
    assert all(
        isinstance(found[rank].error, PeerFailed) and "KeyboardInterrupt" in str(found[rank].error) for rank in (0, 2)
    )
    assert max(outcome.seconds for outcome in found) < SOON_S
    check_record(job, "KeyboardInterrupt")


@on_one_runtime(0)
def test_a_loss_that_is_no_number(algorithm: Algorithm, runtime: str) -> None:
    """The rank that sees it first says which step, and what to change; the others that it was that rank."""
    found, job = outcomes(runtime, algorithm, tiny.problem(partial(NaNAt, 4)))
    assert isinstance(found[BROKEN].error, Diverged)
    assert f"rank {BROKEN} is nan at step 4" in str(found[BROKEN].error)
    assert "learning rate" in str(found[BROKEN].error)
    for rank in (0, 2):
        assert isinstance(found[rank].error, PeerFailed), found[rank].error
    check_record(job, "Diverged")


def test_a_diverging_run_says_so(runtime: str) -> None:
    """A learning rate at which every rank's loss overflows: each says Diverged or that another did."""
    job = make_job(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(loss=fourth_power), replace(HOW, lr=1e6))
    found = shared_pool(runtime, NUM_RANKS).outcomes([(run_rank, (job,))] * NUM_RANKS)  # type: ignore[arg-type]
    assert any(isinstance(outcome.error, Diverged) for outcome in found)
    assert all(isinstance(outcome.error, Diverged | PeerFailed) for outcome in found)
    assert json.loads((Path(job.folder) / "run.json").read_text())["status"] == "failed"


def test_models_of_different_shapes(runtime: str) -> None:
    """Reported before anything is exchanged, on every rank, with the parameter's name."""
    found, _ = outcomes(runtime, SynchronousSGD(), tiny.problem(WiderMLP))
    for outcome in found:
        assert isinstance(outcome.error, RankMismatch)
        assert f"rank {BROKEN} differs from ranks 0 and 2: parameter 4 is 'body.4.weight: (3, 5)" in str(outcome.error)
        assert f"and 'body.4.weight: (3, 9) torch.float64 bucket 0' on rank {BROKEN}" in str(outcome.error)


def test_different_settings_and_data(runtime: str) -> None:
    job = make_job(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(), HOW)
    others = {
        "algorithm": replace(job, algorithm=PipeSGD(width=3)),
        "settings": replace(job, settings=replace(HOW, seed=7)),
        "samples": replace(job, problem=tiny.problem(num_samples=22)),
    }
    for word, other in others.items():
        folder = make_job(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(), HOW).folder
        jobs = [replace(other if rank == 2 else job, folder=folder) for rank in range(NUM_RANKS)]
        found = shared_pool(runtime, NUM_RANKS).outcomes([(run_rank, (job,)) for job in jobs])  # type: ignore[arg-type]
        for outcome in found:
            assert isinstance(outcome.error, RankMismatch)
            assert "rank 2 differs from ranks 0 and 1" in str(outcome.error)
            assert word in str(outcome.error)


@on_one_runtime(1)
def test_stopped_by_hand_all_ranks_stop_at_the_same_step(algorithm: Algorithm, runtime: str) -> None:
    """A command is appended to a file that rank 0 reads; the others learn of it with the gradients, K - 1 steps later."""
    problem = tiny.problem(partial(StopsAt, 5))
    job = make_job(runtime, NUM_RANKS, algorithm, problem, replace(HOW, steps=200))
    summaries = shared_pool(runtime, NUM_RANKS).run(run_and_steer, job)  # type: ignore[arg-type]
    steps = {summary["steps"] for summary in summaries}
    assert len(steps) == 1
    assert all(summary["stopped"] for summary in summaries)
    assert 5 <= steps.pop() <= 5 + 2 + algorithm.max_staleness
    info = json.loads((Path(job.folder) / "run.json").read_text())
    assert info["status"] == "stopped"
    assert len(list(Path(job.folder).glob("checkpoint-*.pt"))) == NUM_RANKS
    for rank in range(NUM_RANKS):
        saved = torch.load(Path(job.folder) / f"checkpoint-{rank:05d}.pt", weights_only=True)
        assert saved["step"] == info["result"]["last_step"]


def test_a_checkpoint_that_is_not_there(runtime: str) -> None:
    job = make_job(runtime, NUM_RANKS, SynchronousSGD(), tiny.problem(), HOW)
    job = replace(job, resume=job.folder)
    found = shared_pool(runtime, NUM_RANKS).outcomes([(run_rank, (job,))] * NUM_RANKS)  # type: ignore[arg-type]
    for outcome in found:
        assert isinstance(outcome.error, ConfigError | PeerFailed)
        assert "checkpoint-" in str(outcome.error)


@pytest.mark.parametrize("kind", ["torch", MPI])
def test_a_rank_that_never_comes(kind: str) -> None:
    """The others give up at `timeout_s`.

    Afterwards the ranks do not agree on the number of their groups, so new ones are started on torch.
    """
    pool = shared_pool(kind, NUM_RANKS)  # type: ignore[arg-type]
    job = make_job(kind, NUM_RANKS, SynchronousSGD(), tiny.problem(), replace(HOW, timeout_s=1.5))
    found = pool.outcomes([(come, (job, rank != BROKEN)) for rank in range(NUM_RANKS)])
    for rank in (0, 2):
        assert isinstance(found[rank].error, Stalled), found[rank].error
        assert "all ranks" in str(found[rank].error)
        assert 1.4 < found[rank].seconds < 1.5 + SOON_S
    if kind == "torch":
        pool.close()


def come(job: Job, comes: bool) -> None:
    """Train, or stay away; on a communicator of its own where there are such."""
    transport = None
    if job.runtime == "mpi":
        from mpi4py import MPI

        from workbench.runtimes.transport.mpi import MpiTransport

        communicator = MPI.COMM_WORLD.Dup()
        transport = MpiTransport(communicator, timeout_s=job.settings.timeout_s) if comes else None
    if comes:
        run_rank(job, transport)


def test_a_rank_that_is_too_slow(runtime: str) -> None:
    """In the middle of a run: what is waited for is named, and so is the setting to change."""
    found, _ = outcomes(runtime, SynchronousSGD(), tiny.problem(partial(SleepsAt, 3, 3.0)), replace(HOW, timeout_s=1.5))
    for rank in (0, 2):
        assert isinstance(found[rank].error, Stalled | PeerFailed), found[rank].error
        assert "the all-reduce of step 2" in str(found[rank].error)
        assert "timeout_s" in str(found[rank].error)
    assert isinstance(found[BROKEN].error, PeerFailed), "who comes too late learns that the others left"


def raising(error: BaseException, *ignored: Any) -> Any:
    raise error


class WiderMLP(nn.Module):
    """The MLP with a last layer of other shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny.mlp()
        self.body[4] = nn.Linear(9, 3).double()


def fourth_power(output: Tensor, target: Tensor) -> Tensor:
    return output.pow(4).mean()


class NaNAt(tiny.FailsAt):
    """The MLP, whose output in training is not a number at one step."""

    def __init__(self, step: int) -> None:
        super().__init__(None, step)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * float("nan") if self.training and self.count == self.step + 1 else out


class SleepsAt(tiny.FailsAt):
    """The MLP, which takes its time at one step."""

    def __init__(self, step: int, seconds: float) -> None:
        super().__init__(None, step)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and self.count == self.step:
            time.sleep(self.seconds)
        return out


class StopsAt(tiny.FailsAt):
    """The MLP, which asks for a stop of the run at one step, as a user would."""

    folder = ""

    def __init__(self, step: int) -> None:
        super().__init__(None, step)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and self.count == self.step:
            write_command(Path(StopsAt.folder), STOP)
        return out


def run_and_steer(job: Job) -> dict[str, Any]:
    StopsAt.folder = job.folder
    return run_rank(job)
