"""The ranks' answers to a training that another notebook asked for, read from the run's folder."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from ipyparallel import error as ipp_error

from workbench.clusters.engines import Engines
from workbench.clusters.vitals import end_name

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


def follow_ends(folder: Path, engines: Engines | None, num_ranks: int) -> list[FolderResult]:
    """Answers of all ranks, settled as the ranks leave word in the folder, or their `engines` are seen to be gone."""
    results = [FolderResult() for _ in range(num_ranks)]
    _look(folder, results)
    if not all(result.done() for result in results):
        threading.Thread(target=_follow, args=(folder, engines, results), name="workbench-ends", daemon=True).start()
    return results


def _follow(folder: Path, engines: Engines | None, results: list[FolderResult]) -> None:
    while folder.is_dir() and not all(result.done() for result in results):
        present = set(range(len(results)))
        if engines is not None:
            client = engines.client
            if client is None:  # stopped, or let go of again
                return
            present = set(client.ids) if engines.alive else set()
        if len(present) < len(results):
            time.sleep(LAST_S)
        _look(folder, results)
        for rank, result in enumerate(results):
            if rank not in present and not result.done():
                result.settle(ipp_error.RemoteError("EngineError", f"engine {rank} died", ""))
        time.sleep(POLL_S)


def _look(folder: Path, results: list[FolderResult]) -> None:
    for rank, result in enumerate(results):
        if not result.done():
            with contextlib.suppress(OSError, ValueError):
                end = json.loads((folder / end_name(rank)).read_text())
                failed = "ename" in end
                result.settle(ipp_error.RemoteError(end["ename"], end["evalue"], end["traceback"]) if failed else None)
