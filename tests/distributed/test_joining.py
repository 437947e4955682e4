"""Ranks join a run: a rank that does not come is named, and no rank waits longer than `timeout_s`."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.killing import outcomes
from tests.laws import tiny
from tests.laws.train import make_job
from workbench.algorithms import SynchronousSGD
from workbench.errors import PeerFailed, Stalled
from workbench.runtimes.liveness.failure_detector import FailureDetector
from workbench.runtimes.liveness.rendezvous import wait_for_all
from workbench.runtimes.rank.main import Job, run_rank
from workbench.settings import Settings


def job_of(ranks: int, **changes: Any) -> Job:
    return make_job(
        "torch",
        ranks,
        SynchronousSGD(),
        tiny.problem(),
        Settings(**{"steps": 3, "batch_size": 2, "timeout_s": 20, **changes}),
    )


def stays_away() -> None:
    """A rank that never comes."""


def dies_waiting(folder: str) -> None:
    """Come, and be killed before the others have."""
    FailureDetector(Path(folder), 2, 3).__enter__()
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_does_not_come_is_named() -> None:
    job = job_of(3, timeout_s=3)
    found = outcomes([(run_rank, (job,)), (run_rank, (job,)), (stays_away, ())])
    for rank in (0, 1):
        assert isinstance(found[rank].error, Stalled), found[rank].trace
        assert re.search("for all ranks to join the run: .*rank 2 has not arrived", str(found[rank].error))
        assert found[rank].seconds < 40
    assert not list(Path(job.folder).glob("present-*")), "who gives up leaves in order"


def test_who_came_and_was_killed_is_named_at_once() -> None:
    job = job_of(3)
    found = outcomes([(run_rank, (job,)), (run_rank, (job,)), (dies_waiting, (job.folder,))])
    for rank in (0, 1):
        assert isinstance(found[rank].error, PeerFailed), found[rank].trace
        assert str(found[rank].error).startswith("rank 2's process is gone")
        assert found[rank].seconds < 40


def test_what_a_launcher_tells_counts(tmp_path: Path) -> None:
    with FailureDetector(tmp_path, 0, 2) as detector, pytest.raises(PeerFailed, match="boom"):
        wait_for_all(detector, 10, lambda: "rank 1 failed before it joined the run: boom")
