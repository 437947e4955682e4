"""The thread of rank 0 that calls a run's callbacks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, final

from workbench.callbacks.base import Callback, Notifier, stops_at_evaluations
from workbench.errors import RunNotFound, WorkbenchError
from workbench.logs import LOG
from workbench.runtimes.control.commands import STOP, write_command
from workbench.trace.follow import Follower
from workbench.trace.run import Run
from workbench.trace.store import read_info, update_run

POLL_S = 0.5
END_S = 60.0  # the longest wait for a call that began before the run's end


@final
class CallbackThread:
    """Calls callbacks while a run is written, on the rank that is rank 0 at the time. A context manager.

    If rank 0 leaves and another rank takes its number, that process calls its own copies, from the run's beginning on.
    At the end, callbacks receive the remaining rows and how the run ended: after the last row and the status are
    written.

    Args:
        folder: the run's folder.
        callbacks: what to call.
    """

    def __init__(self, folder: Path, callbacks: Sequence[Callback]) -> None:
        self._folder, self._follower = folder, Follower(folder)
        self._callbacks = callbacks
        self._notifier = Notifier(callbacks, self.note)
        self._notes: list[str] = []
        self._over, self._stopping = threading.Event(), False
        self._thread: threading.Thread | None = None

    @property
    def stops_at_evaluations(self) -> bool:
        """Return True if a callback may stop the run because of an evaluation."""
        return stops_at_evaluations(self._callbacks)

    def follow_as(self, rank: int) -> None:
        """Begin if this rank is now rank 0. End if it no longer is."""
        if rank == 0 and self._callbacks and self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="workbench callbacks", daemon=True)
            self._thread.start()
        elif rank != 0:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(WorkbenchError):  # the folder is gone, or the disk is full: the run's own error says so
            self._finish()

    def _finish(self) -> None:
        if self._thread is None or self._over.is_set():
            return
        self._over.set()
        self._thread.join(timeout=END_S)
        if self._thread.is_alive():
            return self.note(f"a callback has not returned {END_S:g} s after the run's end: none is called again")
        self._notifier.update(Run.load(self._folder), ended=True)
        if self._notes:
            update_run(self._folder, notes=[*read_info(self._folder).get("notes", ()), *self._notes])

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            try:
                run = self._follower.poll()
            except RunNotFound:
                return
            if self._notifier.update(run) and not self._stopping:
                self._stopping = True
                write_command(self._folder, STOP)

    def note(self, text: str) -> None:
        """Note it in the run's record at the end, and log it now."""
        self._notes.append(text)
        LOG.warning("%s", text)
