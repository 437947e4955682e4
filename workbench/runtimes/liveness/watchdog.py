"""What a rank does, for the ranks that wait for it; and a time limit for library calls that cannot be interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from workbench import units

EXIT_STATUS = 75  # of a rank that ended itself because a library's call did not return: EX_TEMPFAIL


@final
class Watchdog:
    """Of the thread that makes it.

    Args:
        folder: the run's.
        rank: whose.
        step: the step under way; -1 before the first.
        bound: None, or, where the rank's thread is in a call of the library that it cannot leave by itself, a number that is another
            when it comes to the next such call.
        timeout_s: how long such a call may take: then the process ends, for nothing else can end the wait. None: for ever.
        activity: what the rank does now: "in backward"; "" where nothing tells.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        step: Callable[[], int],
        bound: Callable[[], float | None] = lambda: None,
        timeout_s: float | None = None,
        activity: Callable[[], str] = str,
    ) -> None:
        self.step, self._activity = step, activity
        self._folder, self._rank, self._bound, self._timeout_s = folder, rank, bound, timeout_s
        self._thread = threading.get_ident()
        self._waits: tuple[str, float] | None = None  # what the rank's thread waits for, and when it last said so
        self._blocked: tuple[float, int, float] | None = None  # in which call, of which step, since when
        self._says_after_s = 0.0

    def note_wait(self, what: str) -> None:
        """The calling thread waits for that, and looks after itself; called some times a second."""
        if threading.get_ident() == self._thread:
            self._waits = (what, time.monotonic())

    def _waiting(self, within_s: float) -> str | None:
        waits = self._waits
        return waits[0] if waits is not None and time.monotonic() - waits[1] < within_s else None

    def row(self, within_s: float) -> dict[str, Any]:
        """For a record; who has not said for so long that it waits does not wait."""
        waits = self._waiting(within_s)
        return {"waits": waits, "does": "" if waits else self._activity(), "step": self.step()}

    def look_after_the_library(self, within_s: float, absent: Callable[[str | None], str]) -> None:
        """Say that its call lasts, and where the others are (`absent`); end the process where it lasts too long."""
        bound, step, now = self._bound(), self.step(), time.monotonic()
        if bound is None or self._waiting(within_s) is not None:
            self._blocked = None
            return
        if self._blocked is None or self._blocked[:2] != (bound, step):
            self._blocked, self._says_after_s = (bound, step, now), units.SAYS_S
        waited = now - self._blocked[2]
        what = f"the library's own call in step {step}, which all ranks had come to"
        if self._timeout_s is not None and waited > self._timeout_s:
            self._leave(f"waited {waited:.0f} s for {what}{absent(None)}. Nothing can interrupt it, so rank {self._rank} ends: heal()")
        elif waited > self._says_after_s:
            self._says_after_s *= 2
            print(f"waiting {waited:.0f} s for {what}{absent(None)}", file=sys.stderr, flush=True)

    def _leave(self, words: str) -> None:
        """End the process: in an MPI world the launcher then ends the others."""
        record = {"rank": self._rank, "error": f"rank {self._rank} failed: Stalled: {words}", "traceback": "", "exit_code": 2}
        with contextlib.suppress(OSError):
            (self._folder / f"failed-{self._rank:05d}.json").write_text(json.dumps(record))
            os.write(2, f"{words}\n".encode())
        os._exit(EXIT_STATUS)


def describe_place(row: dict[str, Any]) -> str:
    """Where a rank is, by its record: "in backward of step 17"."""
    if row["waits"] is not None:
        return f"waits for {row['waits']}"
    return f"{row['does'] or 'at work'} of step {row['step']}" if row["step"] >= 0 else "before its first step"
