"""The ranks' answers to a training that another notebook asked for, read from the run's folder."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from ipyparallel import error as ipp_error

from workbench.clusters.engines.engines import Engines
from workbench.clusters.launchers.base import ended_here
from workbench.clusters.supervision.heartbeat import end_name
from workbench.errors import RunNotFound
from workbench.trace.store import OVER, read_info

POLL_S = 0.1
LAST_S = 1.0  # how long the last files of ranks whose processes are gone may take to be seen


@final
class FolderResult:
    """One rank's, with what a handle needs of an AsyncResult."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the rank has come back."""
        return self._over.is_set()

    def exception(self) -> BaseException | None:
        """What it came back with, if with an error."""
        return self._error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call it when the rank has come back; at once if it has."""
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback(self)

    def settle(self, error: BaseException | None) -> None:
        """The rank has come back."""
        with self._lock:
            self._error = error
            self._over.set()
        for callback in self._callbacks:
            callback(self)


def follow_ends(folder: Path, engines: Engines | None, ranks: Sequence[dict[str, Any]]) -> list[FolderResult]:
    """Answers of all ranks, settled as the ranks leave word in the folder, or are seen to be gone.

    Args:
        engines: what shows whether they are there; None: the run's record does, and this machine of processes of its own.
        ranks: who they are.
    """
    results = [FolderResult() for _ in ranks]
    _look(folder, results)
    if not all(result.done() for result in results):
        threading.Thread(target=_follow, args=(folder, engines, ranks, results), name="workbench-ends", daemon=True).start()
    return results


def _follow(folder: Path, engines: Engines | None, ranks: Sequence[dict[str, Any]], results: list[FolderResult]) -> None:
    while not all(result.done() for result in results) and (engines is None or folder.is_dir()):
        info = _recorded(folder) if engines is None else {}
        over = info.get("status") in OVER
        if engines is None:
            present = {rank for rank, who in enumerate(ranks) if not over and not ended_here(who)}
        else:
            client = engines.client
            if client is None:  # stopped, or let go of again
                return
            present = set(client.ids) if engines.alive else set()
        if len(present) < len(results):
            time.sleep(LAST_S)
        _look(folder, results)
        for rank, result in enumerate(results):
            if rank not in present and not result.done():
                result.settle(_without_word(rank, info) if over else _died(rank))
        time.sleep(POLL_S)


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        return read_info(folder)
    except RunNotFound:
        return {} if folder.is_dir() else {"status": "failed", "error": "the run's folder was removed"}


def _without_word(rank: int, info: dict[str, Any]) -> BaseException | None:
    """What to say of a rank that left none, in a run that is over as its record says."""
    if info["status"] != "failed":
        return None
    return ipp_error.RemoteError("PeerFailed", info["error"], "") if info.get("error") else _died(rank)


def _died(rank: int) -> BaseException:
    error: BaseException = ipp_error.RemoteError("EngineError", f"engine {rank} died", "")
    return error


def _look(folder: Path, results: list[FolderResult]) -> None:
    for rank, result in enumerate(results):
        if not result.done():
            with contextlib.suppress(OSError, ValueError):
                end = json.loads((folder / end_name(rank)).read_text())
                failed = "ename" in end
                result.settle(ipp_error.RemoteError(end["ename"], end["evalue"], end["traceback"]) if failed else None)
