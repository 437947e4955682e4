"""The ranks' results of a training that another notebook started, read from the run's folder."""

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
from workbench.clusters.supervision.rank_output import end_name
from workbench.errors import RunNotFound
from workbench.trace.store import ENDED, read_info

POLL_S = 0.1
LAST_S = 1.0  # how long the last files of a rank may take to appear after its process has ended


@final
class FolderResult:
    """One rank's result, with the part of ipyparallel's AsyncResult that a handle needs."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return True if the rank has returned."""
        return self._over.is_set()

    def exception(self) -> BaseException | None:
        """The rank's error; None if it has none."""
        return self._error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` when the rank has returned, or at once if it has already."""
        with self._lock:
            if not self.done():
                self._callbacks.append(callback)
                return
        callback(self)

    def set_result(self, error: BaseException | None) -> None:
        """Set the result: the rank has returned, with an error or None."""
        with self._lock:
            self._error = error
            self._over.set()
        for callback in self._callbacks:
            callback(self)


def follow_ends(folder: Path, engines: Engines | None, ranks: Sequence[dict[str, Any]]) -> list[FolderResult]:
    """Return the results of all ranks.

    Each is set when the rank's end file appears in the folder, or its process has ended.

    Args:
        folder: the run's folder.
        engines: they show which ranks are alive. None: the run's record and this machine's processes show it.
        ranks: one mapping per rank, with host and pid.
    """
    results = [FolderResult() for _ in ranks]
    _read_ends(folder, results)
    if not all(result.done() for result in results):
        threading.Thread(
            target=_follow, args=(folder, engines, ranks, results), name="workbench-ends", daemon=True
        ).start()
    return results


def _follow(
    folder: Path, engines: Engines | None, ranks: Sequence[dict[str, Any]], results: list[FolderResult]
) -> None:
    while not all(result.done() for result in results) and (engines is None or folder.is_dir()):
        info = _recorded(folder) if engines is None else {}
        over = info.get("status") in ENDED
        if engines is None:
            present = {rank for rank, process in enumerate(ranks) if not over and not ended_here(process)}
        else:
            client = engines.client
            if client is None or engines.why_silent() is not None:  # stopped here or elsewhere, or detached again
                return  # the handle notices it
            present = set(client.ids) if engines.alive else set()
        if len(present) < len(results):
            time.sleep(LAST_S)
        _read_ends(folder, results)
        for rank, result in enumerate(results):
            if rank not in present and not result.done():
                result.set_result(_without_end_file(rank, info) if over else _died(rank))
        time.sleep(POLL_S)


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        return read_info(folder)
    except RunNotFound:
        return {} if folder.is_dir() else {"status": "failed", "error": "the run's folder was removed"}


def _without_end_file(rank: int, info: dict[str, Any]) -> BaseException | None:
    """Return the result of a rank without an end file, in a run whose record says that it has ended."""
    if info["status"] != "failed":
        return None
    return ipp_error.RemoteError("PeerFailed", info["error"], "") if info.get("error") else _died(rank)


def _died(rank: int) -> BaseException:
    error: BaseException = ipp_error.RemoteError("EngineError", f"engine {rank} died", "")
    return error


def _read_ends(folder: Path, results: list[FolderResult]) -> None:
    for rank, result in enumerate(results):
        if not result.done():
            with contextlib.suppress(OSError, ValueError):
                end = json.loads((folder / end_name(rank)).read_text())
                failed = "ename" in end
                result.set_result(
                    ipp_error.RemoteError(end["ename"], end["evalue"], end["traceback"]) if failed else None
                )
