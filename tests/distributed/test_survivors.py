"""A worker's process is killed: the others continue without it, lose at most its unsent gradient, and record which rank left and when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.killing import DiesAt, outcomes
from tests.distributed.pool import Call
from tests.distributed.ranks import Outcome
from tests.laws import tiny
from tests.laws.train import make_job, on_real_runtimes
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    DelayCompensatedSGD,
    OnlineBackupSGD,
    ParameterServerSGD,
    SoftsyncSGD,
    StaleSynchronousSGD,
)
from workbench.errors import ConfigError, PeerFailed
from workbench.program import Algorithm
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.liveness.membership import Membership
from workbench.runtimes.rank.main import Job, RuntimeName, make_transport, run_rank
from workbench.runtimes.simulator.replay import replay
from workbench.runtimes.transport.base import Deadline
from workbench.settings import Settings
from workbench.trace.run import Run

NUM_RANKS, VICTIM, AT_STEP = 3, 1, 4
HOW = Settings(steps=12, batch_size=2, timeout_s=30)
ALGORITHMS = [
    AsyncSGD(),
    AsyncSGD(shards=1, dedicated=True),
    StaleSynchronousSGD(bound=1),
    SoftsyncSGD(),
    DelayCompensatedSGD(),
    ParameterServerSGD(),
    ParameterServerSGD(dedicated=True),
    BackupSGD(backups=1),
    OnlineBackupSGD(),
]


def train_with_a_death(
    algorithm: Algorithm, victim: int = VICTIM, how: Settings = HOW, runtime: RuntimeName = "torch"
) -> tuple[dict[int, Outcome], Job]:
    job = make_job(runtime, NUM_RANKS, algorithm, tiny.problem(partial(tiny.FailsAt, None, 0)), how)
    dying = replace(job, problem=tiny.problem(partial(DiesAt, AT_STEP, job.folder if how.checkpoint_every else None)))
    calls: list[Call] = [(run_rank, (dying if rank == victim else job,)) for rank in range(NUM_RANKS)]
    return outcomes(calls, runtime=runtime), job


def name_of(algorithm: Algorithm) -> str:
    dedicated = "-dedicated" if getattr(algorithm, "dedicated", False) else ""
    return f"{type(algorithm).__name__}{dedicated}-{getattr(algorithm, 'backups', '')}"


@on_real_runtimes
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_the_others_go_on_without_a_worker(algorithm: Algorithm, runtime: RuntimeName) -> None:
    found, job = train_with_a_death(algorithm, runtime=runtime)
    assert set(found) == {0, 2}
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    run = Run.load(job.folder)
    assert run.info["status"] == "finished"
    assert [row["rank"] for row in run.info["departures"]] == [VICTIM]
    assert 0 < run.info["departures"][0]["seconds"] < 30
    assert "its process has ended" in run.info["departures"][0]["why"]
    assert any(f"rank {VICTIM} left" in note for note in run.info["notes"])
    assert not (Path(job.folder) / "members").exists()
    pushes = [(source, update["update"]) for update in run.updates() for source in update["sources"]]
    workers = algorithm.roles(NUM_RANKS).num_computing
    late = algorithm.max_staleness == 0
    by = {rank: sum(source == rank for source, _ in pushes) for rank in range(workers)}
    assert by[VICTIM] <= AT_STEP
    if not late:
        assert by == {rank: AT_STEP if rank == VICTIM else HOW.steps for rank in range(workers)}, (
            "what was sent is used, each once"
        )
    else:
        assert max(update["update"] for update in run.updates()) == HOW.steps, "as many updates as steps"
        assert all(set(update["sources"]) for update in run.updates())
    with pytest.raises(ConfigError, match="cannot be replayed"):
        replay(run, algorithm, tiny.problem(), HOW)


def test_checkpoints_of_all_ranks_stand() -> None:
    """State that only that rank had is lost: no checkpoint is written without it, and the record says so."""
    found, job = train_with_a_death(AsyncSGD(), how=replace(HOW, checkpoint_every=3))
    for outcome in found.values():
        assert outcome.error is None, outcome.trace
    run = Run.load(job.folder)
    assert [(checkpoint.step, checkpoint.num_ranks) for checkpoint in complete_checkpoints(Path(job.folder))] == [
        (2, NUM_RANKS)
    ]
    assert run.info["notes"].count(f"rank {VICTIM} left, and no checkpoint was kept since: earlier ones are valid") == 1


def test_a_server_cannot_be_done_without() -> None:
    """Its shard's parameters are nowhere else: the others leave soon, and name the rank."""
    found, job = train_with_a_death(AsyncSGD(shards=2))  # rank 1 serves the second half
    assert set(found) == {0, 2}
    for outcome in found.values():
        assert isinstance(outcome.error, PeerFailed), outcome.trace
        assert f"rank {VICTIM} has left (its process has ended)" in str(outcome.error)
        assert "checkpoint" in str(outcome.error)
        assert outcome.seconds < HOW.timeout_s / 2
    assert json.loads((Path(job.folder) / "run.json").read_text())["status"] == "failed"


class StopsAt(tiny.FailsAt):
    """The MLP, whose process is stopped for a while in the forward pass of a step."""

    def __init__(self, step: int, seconds: float) -> None:
        super().__init__(None, step)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.count == self.step:
            subprocess.Popen(["/bin/sh", "-c", f"sleep {self.seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(x)


def test_a_stopped_worker_has_not_left() -> None:
    """The others check for it ten times a second, and wait for it at the end."""
    job = make_job("torch", NUM_RANKS, AsyncSGD(), tiny.problem(partial(tiny.FailsAt, None, 0)), HOW)
    stopped = replace(job, problem=tiny.problem(partial(StopsAt, AT_STEP, 1.5)))
    found = outcomes([(run_rank, (stopped if rank == VICTIM else job,)) for rank in range(NUM_RANKS)])
    assert [outcome.error for _, outcome in sorted(found.items())] == [None] * NUM_RANKS
    run = Run.load(job.folder)
    assert "departures" not in run.info
    ends = [row["seconds"] for row in run.metrics[VICTIM] if "evaluation" not in row]
    assert len(ends) == HOW.steps
    assert max(after - before for before, after in pairwise(ends)) > 1.0, "it was not stopped while it trained"


# -- a process that ends in the middle of a message ------------------------------------------------------------

TAG, HALF_S = 5, 0.5
BIG = 4_000_000  # float32 values: more than a socket holds


def speak(moment: str, folder: str, runtime: RuntimeName) -> list[tuple[int, float]]:
    """Rank 0 receives from rank 1 twice by receives from any rank; rank 2 is killed at `moment`.

    Return what rank 0 received.
    """
    transport = make_transport(runtime, 30)
    members = transport.members = Membership(
        FailureDetector(Path(folder), transport.rank, 3).__enter__(), lambda rank: rank == 2
    )
    deadline = Deadline("", transport.peer_failure, 20)
    members.gather_texts("", deadline)
    flat = torch.full((BIG,), float(transport.rank))
    if transport.rank == 2:
        if moment != "before":
            transport.start_send(0, flat, TAG)
        time.sleep(HALF_S if moment == "announced" else 0.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if transport.rank == 1:
        while not members.has_left(2):
            deadline.pause()
        for _ in range(2):
            transport.start_send(0, flat, TAG).wait(deadline)
    heard: list[tuple[int, float]] = []
    if transport.rank == 0:
        if moment == "announced":
            while not members.has_left(2):
                deadline.pause()
        transport.start_send(2, flat, TAG).wait(deadline)  # lost
        while len([source for source, _ in heard if source == 1]) < 2:
            handle = transport.start_recv(-1, memory := torch.zeros(BIG), TAG)
            handle.wait(deadline)
            heard.append((handle.source, float(memory[-1])))  # type: ignore[attr-defined]
    members.gather_texts("", deadline)
    transport.close()
    return heard


@on_real_runtimes
@pytest.mark.parametrize("moment", ["before", "announced", "sending"])
def test_messages_of_the_others_arrive(moment: str, runtime: RuntimeName, tmp_path: Path) -> None:
    """`announced`: gloo then refuses every further receive from any rank of that tag.

    MPI refuses it until the death is acknowledged. The receive that was posted stays in its queue.
    """
    found = outcomes([(speak, (moment, str(tmp_path), runtime))] * 3, runtime=runtime)
    assert found[0].error is None, found[0].trace
    assert [item for item in found[0].value if item[0] == 1] == [(1, 1.0)] * 2
