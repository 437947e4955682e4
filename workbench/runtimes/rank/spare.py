"""A spare process of an MPI run waits until a rank is killed, and trains in its place."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from workbench.errors import PeerFailed
from workbench.logs import LOG
from workbench.runtimes.elastic.mpi_admission import number_of_spare, ranks_of_run
from workbench.runtimes.liveness.failure_detector import read_heartbeat, state_of
from workbench.runtimes.liveness.membership import FOLDER, left_name
from workbench.runtimes.rank.join import rejoin
from workbench.runtimes.rank.main import Job, failure_before_join
from workbench.trace.files.atomic import write_atomic
from workbench.trace.files.text import read_json
from workbench.trace.processes import ENDED, pid_namespace, start_of
from workbench.trace.store import read_info

POLL_S = 0.2


def stand_by(job: Job) -> None:
    """Wait until a rank has left the run, and train in its place to the run's end. Return if the run ends before.

    Spare processes take places in the order of their numbers. One that was not admitted ends by SIGKILL: the library
    reports a killed process to the others, which would wait for any other one at the next admission.

    Raises:
        PeerFailed: all ranks have ended before the run.
    """
    folder, number = Path(job.folder), number_of_spare()
    ranks_of_run(partial(failure_before_join, folder), job.settings.timeout_s)
    rank = _wait_for_place(folder, number)
    if rank is None:
        return
    num_joined = _num_joined(folder, rank)
    try:
        rejoin(job, rank)
    except Exception as error:
        if _num_joined(folder, rank) > num_joined:  # the error of the training
            raise
        LOG.warning("spare process %d did not take the place of rank %d: %s", number, rank, error)
        if not _is_over(folder):
            os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_place(folder: Path, number: int) -> int | None:
    """Return the rank whose place this process takes; None if the run has ended."""
    mine: dict[str, Any] = {"place": pid_namespace(), "pid": os.getpid(), "started_s": start_of(os.getpid())}
    is_known = False
    while not _is_over(folder):
        MPI.COMM_SELF.Iprobe()  # the library learns of ended processes only inside its calls
        with suppress(FileNotFoundError):  # the folder exists from the first step to the end
            if not is_known:
                _write(folder, number, {**mine, "rank": None})
                is_known = True
            if (rank := _place_for(folder, number)) is not None:
                _write(folder, number, {**mine, "rank": rank})
                return rank
        time.sleep(POLL_S)
    return None


def _is_over(folder: Path) -> bool:
    """Return True if the run has ended.

    Raises:
        PeerFailed: it has not, but all its ranks have.
    """
    info = read_info(folder)
    rows = [read_heartbeat(folder, rank) for rank in range(int(info["num_workers"]))]
    are_gone = any(rows) and all(row is None or state_of(row) == "gone" for row in rows)
    is_over = read_info(folder).get("status") in ENDED  # after the heartbeats: a rank writes it before it leaves
    if are_gone and not is_over:
        raise PeerFailed(f"all ranks of the run {folder.name} have ended")
    return is_over


def _place_for(folder: Path, number: int) -> int | None:
    """Return the rank whose place that spare process takes now; None if there is none, or if it is not its turn."""
    earlier = [_read(folder, other) for other in range(1, number)]
    if any(row is None or (row["rank"] is None and state_of(row) != "gone") for row in earlier):
        return None
    taken = {row["rank"] for row in earlier if row is not None and state_of(row) != "gone"}
    return next((rank for rank in _open_places(folder) if rank not in taken), None)


def _open_places(folder: Path) -> Iterator[int]:
    yield from (rank for rank in range(int(read_info(folder)["num_workers"])) if _is_open(folder, rank))


def _is_open(folder: Path, rank: int) -> bool:
    """Return True if a rank has left, and no process has taken its place since."""
    return (folder / FOLDER / left_name(rank, _num_joined(folder, rank))).exists()


def _num_joined(folder: Path, rank: int) -> int:
    """Return the number of processes that have taken a rank's place."""
    return sum(row["rank"] == rank for row in read_info(folder).get("joined", ()))


def _path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"spare-{number:05d}.json"


def _write(folder: Path, number: int, row: dict[str, Any]) -> None:
    write_atomic(_path(folder, number), json.dumps(row))


def _read(folder: Path, number: int) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = read_json(_path(folder, number))
    except (OSError, ValueError):
        return None
    return row
