"""Training in the same way on every runtime, for the laws to compare."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import pytest
from torch import Tensor

from tests.distributed.pool import shared_pool
from tests.laws.sentences import assert_near
from tests.laws.variants import name_of
from workbench.costs import Compute, Lognormal, Network
from workbench.ops import EndStep, Program, ReadParameters
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context, Elasticity, Replicas, Requirements, Restart, Roles, Update
from workbench.replica.local_training import run_info
from workbench.runtimes.rank.main import Job, run_rank
from workbench.runtimes.simulator.simulation import Simulation
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


# An all-reduce of the tiny model takes about as long as a step, and no two steps or ranks take equally long.
NETWORK = Network(latency_s=0.1, bandwidth_bytes_per_s=1000.0)
COMPUTE = Compute(forward_s=0.3, backward_s=0.7, update_s=0.1, stragglers=(Lognormal(sigma=0.5),))

_seen: dict[int, list[Tensor]] = {}  # rank -> what `Watched` saw there, in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper(Algorithm):
    """Another algorithm, run otherwise. Runtimes cannot tell the difference."""

    inner: Algorithm

    @property
    def max_staleness(self) -> int | None:
        return self.inner.max_staleness

    @property
    def replicas(self) -> Replicas:
        return self.inner.replicas

    @property
    def update(self) -> Update:
        return self.inner.update

    @property
    def asynchronous(self) -> bool:
        return self.inner.asynchronous

    @property
    def depends_on_timing(self) -> bool:
        return self.inner.depends_on_timing

    @property
    def requires(self) -> Requirements:
        return self.inner.requires

    @property
    def elasticity(self) -> Elasticity:
        return self.inner.elasticity

    @property
    def restart(self) -> Restart:
        return self.inner.restart

    def roles(self, num_ranks: int) -> Roles:
        return self.inner.roles(num_ranks)

    def check(self, num_ranks: int) -> None:
        self.inner.check(num_ranks)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Wrapper):
    """Another algorithm, whose parameters are read at each `EndStep` and after its end."""

    def worker(self, ctx: Context) -> Program:
        seen = _seen[ctx.rank] = []
        program, answer = self.inner.worker(ctx), None
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                break
            if isinstance(request, EndStep):
                seen.append((yield ReadParameters()))
            answer = yield request
        seen.append((yield ReadParameters()))


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run: `parameters[rank]` after each step and, last, at its end; the record; how to resume it."""

    parameters: list[list[Tensor]]
    run: Run
    checkpoint: Any  # what `resume=` takes

    @property
    def final(self) -> Tensor:
        return self.parameters[0][-1]

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """The rank's rows of steps."""
        return [row for row in self.run.metrics[rank] if "evaluation" not in row]


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
    watched = Watched(inner=algorithm)
    if runtime == "simulated":
        simulation = Simulation(
            watched, problem, settings, num_ranks, network=NETWORK, compute=COMPUTE, check_in_flight=True
        )
        run = simulation.run(resume=resume, stop_after=stop_after)
        return Trained([_seen[rank] for rank in range(num_ranks)], run, simulation.checkpoints.at_stop)
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
    return _seen[summary["rank"]] if summary else None


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
