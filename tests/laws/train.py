"""Training in the same way on every runtime, for the laws to compare."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.pool import shared_pool
from workbench.laws.sentences import assert_near, name_of
from workbench.laws.training import COMPUTE as COMPUTE
from workbench.laws.training import NETWORK as NETWORK
from workbench.laws.training import SEEN, Trained, Watched, train_simulated
from workbench.laws.training import Wrapper as Wrapper
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.replica.local_training import run_info
from workbench.runtimes.rank.main import Job, run_rank
from workbench.settings import Settings
from workbench.trace.run import Run
from workbench.trace.store import new_run

REAL = ("torch", "mpi")
RUNTIMES = ("simulated", *REAL)
MPI = pytest.param("mpi", marks=pytest.mark.mpi)
on_real_runtimes = pytest.mark.parametrize("runtime", ["torch", MPI])
on_all_runtimes = pytest.mark.parametrize("runtime", ["simulated", "torch", MPI])


def by_turns(algorithms: Sequence[Algorithm], turn: int, *, simulated: bool = False) -> pytest.MarkDecorator:
    """Give each algorithm one real runtime, and the next one the other: of algorithm, law and runtime, every two meet.

    For algorithms that another law has on both. `test_every_runtime_takes_the_same_steps` has all that do not look at
    the time.

    Args:
        turn: 0 or 1. Two laws that are alike, of the same algorithms, have one each.
        simulated: on simulated workers, too.
    """
    rows = [(algorithm, REAL[(number + turn) % 2]) for number, algorithm in enumerate(algorithms)]
    rows += [(algorithm, "simulated") for algorithm in algorithms if simulated]
    return pytest.mark.parametrize(
        ("algorithm", "runtime"),
        [
            pytest.param(*row, id=f"{name_of(row[0])}-{row[1]}", marks=[pytest.mark.mpi] if row[1] == "mpi" else [])
            for row in rows
        ],
    )


def train(
    runtime: str,
    num_ranks: int,
    algorithm: Algorithm,
    problem: Problem,
    settings: Settings,
    *,
    resume: Any = None,
    stop_after: int | None = None,
    control: Sequence[dict[str, Any]] = (),
) -> Trained:
    """Train with that algorithm on simulated workers, or on real ranks of the session's pool, with commands given in advance."""
    if runtime == "simulated":
        return train_simulated(num_ranks, algorithm, problem, settings, resume=resume, stop_after=stop_after)
    watched = Watched(inner=algorithm)
    job = make_job(runtime, num_ranks, watched, problem, settings, resume=resume, stop_after=stop_after)
    (Path(job.folder) / "control.jsonl").write_text("".join(json.dumps(word) + "\n" for word in control))
    parameters = run_on_ranks(train_here, job, num_ranks)
    return Trained(parameters, Run.load(job.folder), job.folder)


@lru_cache(maxsize=1)
def _store() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="laws-")  # removed when this process ends


def make_job(
    runtime: str, num_ranks: int, algorithm: Algorithm, problem: Problem, settings: Settings, **more: Any
) -> Job:
    """A job in a folder of its own."""
    folder = new_run(run_info(algorithm, problem, settings, runtime, num_ranks), Path(_store().name))
    return Job(algorithm=algorithm, problem=problem, settings=settings, runtime=runtime, folder=str(folder), **more)  # type: ignore[arg-type]


def run_on_ranks(function: Callable[..., Any], job: Job, num_ranks: int) -> list[Any]:
    """`function(job, num_ranks)` on each rank; it trains with `run_job`.

    Fewer MPI ranks than three are a part of the three.
    """
    size = max(num_ranks, 3) if job.runtime == "mpi" else num_ranks
    timeout_s = max(110.0, 2 * job.settings.timeout_s)
    return shared_pool(job.runtime, size).run(function, job, num_ranks, timeout_s=timeout_s)[:num_ranks]


def run_job(job: Job, num_ranks: int) -> dict[str, Any] | None:
    """On a rank: train; None on the ranks that are not taken."""
    if job.runtime != "mpi":
        return run_rank(job)
    from workbench.runtimes.transport.mpi import MpiTransport

    communicator = _first_ranks(num_ranks)
    return run_rank(job, MpiTransport(communicator, timeout_s=job.settings.timeout_s)) if communicator else None


@lru_cache(maxsize=3)
def _first_ranks(num_ranks: int) -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.Get_rank() < num_ranks else MPI.UNDEFINED)


def train_here(job: Job, num_ranks: int) -> list[Tensor] | None:
    """On a rank: train, and return what was seen."""
    summary = run_job(job, num_ranks)
    return SEEN[summary["rank"]] if summary else None


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over largest value."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


def assert_same(
    found: list[Tensor], expected: list[Tensor], tolerance: float, law: str = "parameters are as expected"
) -> None:
    """Two trajectories of equal length, equal to `tolerance` relative at every step; 0 for bitwise.

    `law` is named where they are not.
    """
    assert len(found) == len(expected), f"{law}: {len(found)} steps in place of {len(expected)}"
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if tolerance == 0 or not relative_error(ours, theirs) <= tolerance:  # also if it is NaN
            assert_near(law, ours, theirs, 0.0, f"after step {step} of 0 to {len(found) - 1}")
