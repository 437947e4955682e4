"""Turns the failures of ranks into one error that the notebook can raise."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipyparallel import error as ipp_error

from workbench import errors
from workbench.clusters.local.spawn import RankFailed
from workbench.clusters.supervision.exit_status import describe_exit, parse_exit_statuses, ranks_by_pid
from workbench.errors import WorkbenchError
from workbench.runtimes.liveness.failure_detector import CONNECTION
from workbench.runtimes.liveness.membership import tolerates_loss

if TYPE_CHECKING:
    from workbench.clusters.engines.engines import Engines

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def failed_ranks(results: Sequence[Any], folder: Path) -> dict[int, BaseException]:
    """Return rank -> its error, for ranks that returned one. Lost ranks that the run tolerates are left out."""
    ended = {rank: result for rank, result in enumerate(results) if result.done()}
    errors = {rank: result.exception() for rank, result in ended.items()}
    failed = {rank: error for rank, error in errors.items() if error is not None}
    if failed and tolerates_loss(folder, over=len(ended) == len(results)):
        return {rank: error for rank, error in failed.items() if consequence(error) != 1}
    return failed


def first_cause(
    failed: Mapping[int, BaseException], exits: Mapping[int, str] | None = None
) -> tuple[int, BaseException]:
    """Return the rank that failed first, and its error.

    A rank's own failure comes before a lost process, and both come before ranks that failed because of another rank.

    Args:
        failed: rank -> its error.
        exits: rank -> how its process ended, where known. These come before other lost processes.
    """

    def order(rank: int) -> tuple[int, bool, int]:
        return consequence(failed[rank]), rank not in (exits or {}), rank

    rank = min(failed, key=order)
    return rank, failed[rank]


def consequence(error: BaseException) -> int:
    """Return 0 for a rank's own failure, 1 for a lost process, 2 for a failure that another rank's end caused."""
    kind = getattr(error, "ename", "")
    if kind == "RuntimeError" and CONNECTION.search(str(getattr(error, "evalue", ""))):
        return 2
    return {"PeerFailed": 2, "EngineError": 1}.get(kind, 0)


def describe_exits(
    failed: Mapping[int, BaseException], engines: Engines, folder: Path, wait_s: float
) -> dict[int, str]:
    """Return rank -> how its process ended, if that ended the run. Wait up to `wait_s` seconds for the exit status."""
    if not failed or consequence(first_cause(failed)[1]) != 1:
        return {}
    return {
        rank: describe_exit(folder, rank, status) for rank, status in exit_statuses(engines, folder, wait_s).items()
    }


def local_error(
    rank: int, error: BaseException, last_output: str, exits: Mapping[int, str] | None = None, gone: Sequence[int] = ()
) -> WorkbenchError:
    """Return the rank's error for the caller. It keeps its class if that is one of `workbench.errors`.

    The remote traceback becomes a note on the error: shown with a traceback, absent from the message.

    Args:
        rank: the rank that failed.
        error: its error.
        last_output: last lines of the engines' output, for a lost process.
        exits: rank -> how its process ended, where known.
        gone: ranks whose processes have ended too: mpiexec ends all ranks when it loses one.
    """
    if not isinstance(error, ipp_error.RemoteError):
        return RankFailed(f"rank {rank}: {type(error).__name__}: {error}")
    if error.ename == "EngineError":
        subject = f"rank {rank}'s process is gone"
        end = (exits or {}).get(rank, "killed (out of memory?), or crashed in native code")
        if rank not in (exits or {}) and set(gone) - {rank}:
            ranks = ", ".join(map(str, sorted({rank, *gone})))
            subject = f"the processes of ranks {ranks} are gone, and it is not known which was the first"
        advice = "The other ranks of its world cannot continue: heal() the cluster, or start a new one."
        return RankFailed(f"{subject}: {end}. {advice}{last_output}")
    if error.ename == "KeyboardInterrupt":
        return RankFailed(f"rank {rank} was interrupted, and the run ended with it; the ranks can train again")
    kind = getattr(errors, error.ename, None)
    if isinstance(kind, type) and issubclass(kind, WorkbenchError):
        found = kind(f"rank {rank}: {error.evalue}")
    else:
        found = RankFailed(f"rank {rank} failed: {error.ename}: {error.evalue}")
    found.add_note(f"Traceback on rank {rank}:\n{COLOURS.sub('', error.traceback or 'none was sent')}")
    return found


def exit_statuses(engines: Engines, folder: Path, wait_s: float = 0.0) -> dict[int, int]:
    """Return rank -> its process's exit status (minus the signal's number), for engines that trained in `folder`.

    Args:
        wait_s: how long to wait for a first exit status, in seconds.
    """
    if engines.engine_set is None:
        return {}
    deadline = time.monotonic() + wait_s
    while not (found := _reported_exit_statuses(engines, folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _reported_exit_statuses(engines: Engines, folder: Path) -> dict[int, int]:
    started = engines.engine_set
    assert started is not None
    if engines.launcher.is_mpi:
        return parse_exit_statuses(engines.launcher.last_output(started), ranks_by_pid(folder))
    stopped = (started.stop_data or {}).get("engines", {})
    return {
        int(rank): data["exit_code"] for rank, data in stopped.items() if str(rank).isdigit() and data.get("exit_code")
    }
