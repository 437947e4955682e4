"""Ranks with different code, settings or data: reported before the first step, on all ranks, with the number of the rank that differs."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.pool import shared_pool
from tests.laws import tiny
from tests.laws.train import make_job, on_real_runtimes
from workbench.algorithms import AsyncSGD, LocalSGD, SynchronousSGD
from workbench.errors import RankMismatch
from workbench.program import Algorithm
from workbench.runtimes.rank import consistency
from workbench.runtimes.rank.main import Job, run_rank
from workbench.settings import Settings
from workbench.trace.run import Run

P, ODD = 3, 2
HOW = Settings(steps=3, batch_size=3, timeout_s=30)


def run_with(job: Job, what: str) -> dict[str, Any]:
    """On a rank: train, with other software than it has."""
    others: dict[str, Any] = {
        "torch": patch.object(torch, "__version__", "1.13.1+cpu"),
        "workbench": patch.object(consistency, "package_digest", lambda: "0" * 12),
        "Python": patch.object(platform, "python_version_tuple", lambda: ("3", "9", "1")),
        "patch of Python": patch.object(platform, "python_version_tuple", lambda: (*platform_version[:2], "77")),
        "code of the algorithm": patch.object(consistency, "code_digest", lambda *functions: "0" * 12),
    }
    with others[what]:
        return run_rank(job)


platform_version = platform.python_version_tuple()


@on_real_runtimes
@pytest.mark.parametrize("what", ["torch", "workbench", "Python", "code of the algorithm"])
def test_other_software_on_one_rank_is_refused(runtime: str, what: str) -> None:
    job = make_job(runtime, P, SynchronousSGD(), tiny.problem(), HOW)
    calls: list[Any] = [(run_with, (job, what)) if rank == ODD else (run_rank, (job,)) for rank in range(P)]
    for outcome in shared_pool(runtime, P).outcomes(calls):
        assert isinstance(outcome.error, RankMismatch), outcome.error
        assert f"rank 2 differs from ranks 0 and 1: {what} is " in str(outcome.error)
        assert ("1.13.1" in str(outcome.error)) == (what == "torch")


@on_real_runtimes
def test_other_data_on_one_rank_are_refused(runtime: str) -> None:
    """One number of one sample differs, in a set of equal size."""
    x, y = tiny.data()
    x[5, 1] += 1e-9
    job = make_job(runtime, P, SynchronousSGD(), tiny.problem(), HOW)
    calls: list[Any] = [
        (run_rank, (replace(job, problem=tiny.problem(train=(x, y))) if rank == ODD else job,)) for rank in range(P)
    ]
    for outcome in shared_pool(runtime, P).outcomes(calls):
        assert isinstance(outcome.error, RankMismatch), outcome.error
        assert "rank 2 differs from ranks 0 and 1: training data is " in str(outcome.error) and "same data" in str(
            outcome.error
        )


def other_weights() -> torch.nn.Module:
    """The usual model with other initial weights, as of an initialization that ignores the seed."""
    model = tiny.mlp()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


@pytest.mark.parametrize("algorithm", [SynchronousSGD(), LocalSGD(every=2)], ids=["synchronous", "local"])
def test_averages_of_weights_begin_with_those_of_rank_0(algorithm: Algorithm) -> None:
    evaluations = []
    for build in (tiny.mlp, other_weights):
        job = make_job("torch", P, algorithm, tiny.problem(), replace(HOW, ema_decay=0.9, evaluate_every=1))
        problem = tiny.problem(build)
        calls: list[Any] = [(run_rank, (replace(job, problem=problem) if rank == ODD else job,)) for rank in range(P)]
        assert all(outcome.error is None for outcome in shared_pool("torch", P).outcomes(calls))
        evaluations.append([row["test_loss"] for row in Run.load(job.folder).evaluations()])
    assert len(evaluations[0]) == HOW.steps and evaluations[0] == evaluations[1]


def test_what_changes_no_number_is_noted() -> None:
    job = make_job("torch", P, SynchronousSGD(), tiny.problem(), HOW)
    calls: list[Any] = [
        (run_with, (job, "patch of Python")) if rank == ODD else (run_rank, (job,)) for rank in range(P)
    ]
    assert all(outcome.error is None for outcome in shared_pool("torch", P).outcomes(calls))
    assert any("patch of Python is" in note and "'77' on rank 2" in note for note in Run.load(job.folder).info["notes"])


@contextmanager
def a_clock_that_is_set() -> Iterator[None]:
    """The time of day jumps by hours at every look, ahead and back."""
    now, state = time.time, [0]

    def jumping() -> float:
        state[0] += 1
        return now() + (7200.0, -7200.0, 0.0)[state[0] % 3]

    with patch.object(time, "time", jumping):
        yield


def run_while_the_clock_is_set(job: Job) -> dict[str, Any]:
    with a_clock_that_is_set():
        return run_rank(job)


@on_real_runtimes
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), AsyncSGD()], ids=["synchronous", "asynchronous"])
def test_a_clock_that_is_set_changes_nothing(algorithm: Algorithm, runtime: str) -> None:
    """Durations of a run, its steps and its spans use a clock that is never set; no rank is reported as gone."""
    job = make_job(runtime, P, algorithm, tiny.problem(), replace(HOW, steps=6, checkpoint_every=2))
    begin = time.monotonic()
    summaries = shared_pool(runtime, P).run(run_while_the_clock_is_set, job)
    took_s, run = time.monotonic() - begin, Run.load(job.folder)
    assert all(0 <= summary["seconds"] <= took_s for summary in summaries)
    assert run.info["status"] == "finished" and not run.info.get("departures")
    for rank in range(P):
        seconds = [row["seconds"] for row in run.metrics[rank] if "evaluation" not in row]
        assert len(seconds) == 6 and seconds == sorted(seconds) and 0 <= seconds[0] <= seconds[-1] <= took_s
    table = run.spans.table
    assert len(table) and float((table["end_s"] - table["start_s"]).min()) >= 0
    assert float(table["start_s"].min()) > -1 and float(table["end_s"].max()) <= took_s + 1
