"""What went wrong on a rank, as one error that the notebook can raise."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipyparallel import error as ipp_error

from workbench import errors
from workbench.clusters.local.spawn import RankFailed
from workbench.clusters.supervision.exit_status import end_words, ends_told, pids_of
from workbench.errors import WorkbenchError
from workbench.runtimes.liveness.failure_detector import CONNECTION
from workbench.runtimes.liveness.membership import tolerates_loss

if TYPE_CHECKING:
    from workbench.clusters.engines.engines import Engines

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def failed_ranks(results: Sequence[Any], folder: Path) -> dict[int, BaseException]:
    """rank -> its error, of the ranks that have come back with one; without those that a run in that folder does without."""
    ended = {rank: result for rank, result in enumerate(results) if result.done()}
    errors = {rank: result.exception() for rank, result in ended.items()}
    failed = {rank: error for rank, error in errors.items() if error is not None}
    if failed and tolerates_loss(folder, over=len(ended) == len(results)):
        return {rank: error for rank, error in failed.items() if consequence(error) != 1}
    return failed


def first_cause(failed: Mapping[int, BaseException], ends: Mapping[int, str] | None = None) -> tuple[int, BaseException]:
    """The rank that failed by itself, and its error; those that only left because of it come last, lost processes before them.

    Args:
        ends: rank -> how its process ended, of those that somebody can tell of: they go before others that are gone.
    """

    def order(rank: int) -> tuple[int, bool, int]:
        return consequence(failed[rank]), rank not in (ends or {}), rank

    rank = min(failed, key=order)
    return rank, failed[rank]


def consequence(error: BaseException) -> int:
    """0 for a rank's own failure; 1 for a process that is gone; 2 for a rank that was told of another's end, or saw its connection end."""
    kind = getattr(error, "ename", "")
    if kind == "RuntimeError" and CONNECTION.search(str(getattr(error, "evalue", ""))):
        return 2
    return {"PeerFailed": 2, "EngineError": 1}.get(kind, 0)


def ends_behind(failed: Mapping[int, BaseException], engines: Engines, folder: Path, wait_s: float) -> dict[int, str]:
    """rank -> how its process ended, if it was one's end that ended the run, and somebody tells of it in so long."""
    if not failed or consequence(first_cause(failed)[1]) != 1:
        return {}
    return {rank: end_words(folder, rank, status) for rank, status in ends_of(engines, folder, wait_s).items()}


def local_error(
    rank: int, error: BaseException, last_words: str, ends: Mapping[int, str] | None = None, gone: Sequence[int] = ()
) -> WorkbenchError:
    """The rank's error in words for the caller, of the same class if it is one of `workbench.errors`.

    The remote traceback is a note on it: shown with a traceback, absent from the message.

    Args:
        last_words: what the engines wrote last, for a process that is gone.
        ends: rank -> how its process ended, where that is known.
        gone: ranks whose processes are gone as well: mpiexec ends all of them when it loses one.
    """
    if not isinstance(error, ipp_error.RemoteError):
        return RankFailed(f"rank {rank}: {type(error).__name__}: {error}")
    if error.ename == "EngineError":
        whose, end = f"rank {rank}'s process is gone", (ends or {}).get(rank, "killed (out of memory?), or crashed in native code")
        if rank not in (ends or {}) and set(gone) - {rank}:
            whose = f"the processes of ranks {', '.join(map(str, sorted({rank, *gone})))} are gone, and nobody tells which was the first"
        return RankFailed(f"{whose}: {end}. Its world cannot train on without it: heal() the cluster, or start a new one.{last_words}")
    if error.ename == "KeyboardInterrupt":
        return RankFailed(f"rank {rank} was interrupted, and the run ended with it; the ranks can train again")
    kind = getattr(errors, error.ename, None)
    if isinstance(kind, type) and issubclass(kind, WorkbenchError):
        found = kind(f"rank {rank}: {error.evalue}")
    else:
        found = RankFailed(f"rank {rank} failed: {error.ename}: {error.evalue}")
    found.add_note(f"Traceback on rank {rank}:\n{COLOURS.sub('', error.traceback or 'none was sent')}")
    return found


def ends_of(engines: Engines, folder: Path, wait_s: float = 0.0) -> dict[int, int]:
    """rank -> how its process ended (minus the signal), of the engines that trained there; looks so long until somebody tells."""
    if engines.engine_set is None:
        return {}
    deadline = time.monotonic() + wait_s
    while not (found := _ends_told(engines, folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _ends_told(engines: Engines, folder: Path) -> dict[int, int]:
    started = engines.engine_set
    assert started is not None
    if engines.launcher.is_mpi:
        return ends_told(engines.launcher.last_words(started), pids_of(folder))
    told = (started.stop_data or {}).get("engines", {})
    return {int(rank): data["exit_code"] for rank, data in told.items() if str(rank).isdigit() and data.get("exit_code")}
