"""The thread of rank 0 that calls a run's callbacks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import final

from workbench.callbacks.base import Callback, Notifier
from workbench.errors import RunNotFound
from workbench.runtimes.control.commands import STOP, write_command
from workbench.trace.follow import Follower
from workbench.trace.run import Run
from workbench.trace.store import read_info, update_run

POLL_S = 0.5


@final
class CallbackThread:
    """Calls callbacks while a run is written.

    Args:
        folder: the run's folder.
        callbacks: what to call.
    """

    def __init__(self, folder: Path, callbacks: Sequence[Callback]) -> None:
        self._folder, self._follower = folder, Follower(folder)
        self._notifier = Notifier(callbacks, self._note)
        self._notes: list[str] = []
        self._over, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name="workbench callbacks", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Tell the callbacks the rest, and that the run has ended. Call it after the last row is written."""
        self._over.set()
        self._thread.join()
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

    def _note(self, text: str) -> None:
        self._notes.append(text)
        print(f"workbench: {text}", file=sys.stderr, flush=True)
