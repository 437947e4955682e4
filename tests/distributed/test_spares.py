"""A rank of an MPI run is killed, and a spare process takes its place in the run that continued without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.killing import DiesAt, SlowUntil, outcomes
from tests.distributed.ranks import Outcome
from tests.distributed.test_rejoin import NUM_RANKS, STEP_S, STEPS_OF_FEWER, and_weights, at_pace, came_path, expected
from tests.distributed.test_survivors import AT_STEP
from tests.laws import tiny
from tests.laws.train import make_job
from workbench.algorithms import ADPSGD, DPSGD, FedAvg, SynchronousSGD
from workbench.errors import PeerFailed
from workbench.program import Algorithm
from workbench.runtimes.liveness.membership import SPARES_VARIABLE
from workbench.runtimes.rank.main import Job, run_rank
from workbench.trace.run import Run

pytestmark = pytest.mark.mpi
Spare = Callable[[Job], Any]


def in_world(num_spares: int, function: Callable[[Job], Any], job: Job) -> Any:
    """Call it in a process of a world with that many spare processes."""
    os.environ[SPARES_VARIABLE] = str(num_spares)
    return function(job)


def trains(job: Job) -> Tensor:
    return and_weights(run_rank, job)


def pace() -> float:
    return STEP_S


def stands_by(job: Job) -> Tensor | None:
    """Parameters at the run's end; None if the process was not needed."""
    from workbench.runtimes.rank.spare import stand_by

    tiny.Remembered.last, SlowUntil.makes_it_at = None, 2
    stand_by(job)
    return None if tiny.Remembered.last is None else and_weights(int)


def with_spares(
    algorithm: Algorithm, victims: set[int], spares: list[Spare], *, dies_again: bool = False
) -> tuple[dict[int, Outcome], Run]:
    """The outcomes of the ranks, and of the spare processes, which follow them; and the record.

    Args:
        dies_again: the first spare process is killed when it has taken `AT_STEP` steps.
    """
    job = make_job("mpi", NUM_RANKS, algorithm, tiny.problem(), STEPS_OF_FEWER)
    problem = replace(job.problem, model=tiny.Remembered(partial(at_pace, pace, came_path(job))))
    job = replace(job, problem=problem)
    dying = replace(job, problem=replace(problem, model=partial(DiesAt, AT_STEP)))
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (in_world, (len(spares), trains, dying if rank in victims else job)) for rank in range(NUM_RANKS)
    ]
    calls += [
        (in_world, (len(spares), spare, dying if dies_again and not at else job)) for at, spare in enumerate(spares)
    ]
    return outcomes(calls, 60, runtime="mpi"), Run.load(job.folder)


def check_equal(found: dict[int, Outcome], processes: set[int]) -> None:
    """These processes have ended, all with the same parameters."""
    assert set(found) == processes
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    first, *others = [outcome.value for outcome in found.values()]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("algorithm", "victim"), [(SynchronousSGD(), 1), (DPSGD(), 0), (FedAvg(every=4), 2), (ADPSGD(), 1)], ids=str
)
def test_a_spare_process_takes_the_place(algorithm: Algorithm, victim: int) -> None:
    """From there on the synchronous algorithm equals its run on three ranks, with momentum."""
    found, run = with_spares(algorithm, {victim}, [stands_by])
    others = [rank for rank in range(NUM_RANKS) if rank != victim]
    check_equal(found, {*others, NUM_RANKS})
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["departures"]] == [victim]
    assert [row["ranks"] for row in run.info["shrunk"]] == [others]
    assert [row["rank"] for row in run.info["joined"]] == [victim]
    fewer, more = run.info["shrunk"][0]["step"], run.info["joined"][0]["step"]
    assert fewer < more < (STEPS_OF_FEWER.steps or 0)
    assert {*range(more, STEPS_OF_FEWER.steps or 0)} <= {row["step"] for row in run.metrics[victim]}
    assert not (Path(str(run.folder)) / "members").exists()
    if isinstance(algorithm, SynchronousSGD):
        assert torch.allclose(found[0].value, expected(fewer, more), rtol=1e-11, atol=1e-13)


def dies_at_the_door(moment: str, job: Job, *, is_last: bool = False) -> None:
    """Stand by, and be killed before the others wait for this process, or when they have agreed to meet it."""
    from workbench.runtimes.elastic import mpi_admission

    def die(*_: Any) -> Any:
        if is_last:
            came_path(job).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before":
        mpi_admission._spare_that_comes = die  # type: ignore[assignment]
    else:
        mpi_admission._meet = die  # type: ignore[assignment]
    stands_by(job)


@pytest.mark.parametrize("moment", ["before", "agreed"])
def test_the_next_one_comes_after_one_that_was_killed_at_the_door(moment: str) -> None:
    found, run = with_spares(SynchronousSGD(), {1}, [partial(dies_at_the_door, moment), stands_by])
    check_equal(found, {0, 2, NUM_RANKS + 1})
    assert [row["rank"] for row in run.info["joined"]] == [1]
    first, second = run.info["steering"]
    assert "had ended again" in first["refused"] and "refused" not in second


def test_the_others_continue_without_one_that_was_killed_at_the_door() -> None:
    found, run = with_spares(SynchronousSGD(), {1}, [partial(dies_at_the_door, "agreed", is_last=True)])
    check_equal(found, {0, 2})
    assert run.info["status"] == "finished" and "joined" not in run.info


def test_one_that_has_joined_is_replaced_too() -> None:
    found, run = with_spares(SynchronousSGD(), {0}, [stands_by, stands_by], dies_again=True)
    check_equal(found, {1, 2, NUM_RANKS + 1})
    assert [row["rank"] for row in run.info["departures"]] == [0, 0]
    assert [row["rank"] for row in run.info["joined"]] == [0, 0]


def test_the_end_of_all_ranks_is_an_error_of_the_spare_process() -> None:
    """Else mpiexec would report success."""
    found, _ = with_spares(SynchronousSGD(), {0, 1, 2}, [stands_by])
    assert set(found) == {NUM_RANKS}
    assert isinstance(found[NUM_RANKS].error, PeerFailed)
    assert "all ranks of the run" in str(found[NUM_RANKS].error)
