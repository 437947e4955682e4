"""What a rank does, for the ranks that wait for it; and a time limit for library calls that cannot be interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from workbench import units
from workbench.logs import LOG

EXIT_STATUS = 75  # of a rank that ended itself because a library's call did not return: EX_TEMPFAIL


@final
class Watchdog:
    """Watches the thread that creates it.

    Args:
        folder: the run's folder.
        rank: this rank.
        step: the current step; -1 before the first.
        bound: returns a number while the rank's thread is in a library call that cannot be interrupted, and another
            number in the next such call; None otherwise.
        timeout_s: limit for such a call. The process then ends, because nothing else ends the wait. None: no limit.
        activity: what the rank does now, such as "in backward"; "" if unknown.
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
        self._waits: tuple[str, float] | None = None  # what the rank's thread waits for, and when it last reported that
        self._blocked: tuple[float, int, float] | None = None  # in which call, of which step, since when
        self._report_after_s = 0.0

    def note_wait(self, what: str) -> None:
        """Note that the calling thread waits for `what`, with its own deadline. It is called a few times a second."""
        if threading.get_ident() == self._thread:
            self._waits = (what, time.monotonic())

    def _waiting(self, within_s: float) -> str | None:
        waits = self._waits
        return waits[0] if waits is not None and time.monotonic() - waits[1] < within_s else None

    def row(self, within_s: float) -> dict[str, Any]:
        """Entries of the heartbeat. A wait that was not reported for `within_s` seconds has ended."""
        waits = self._waiting(within_s)
        return {"waits": waits, "does": "" if waits else self._activity(), "step": self.step()}

    def watch_library_call(self, within_s: float, absent: Callable[[str | None], str]) -> None:
        """Report a long library call, and what the others do (`absent`).

        End the process if the call lasts too long.
        """
        bound, step, now = self._bound(), self.step(), time.monotonic()
        if bound is None or self._waiting(within_s) is not None:
            self._blocked = None
            return
        if self._blocked is None or self._blocked[:2] != (bound, step):
            self._blocked, self._report_after_s = (bound, step, now), units.WAIT_REPORT_S
        waited = now - self._blocked[2]
        what = f"the library's own call in step {step}, which all ranks had reached"
        if self._timeout_s is not None and waited > self._timeout_s:
            self._leave(
                f"waited {waited:.0f} s for {what}{absent(None)}. Nothing can interrupt it, so rank {self._rank} ends: "
                "heal()"
            )
        elif waited > self._report_after_s:
            self._report_after_s *= 2
            LOG.warning("waiting %.0f s for %s%s", waited, what, absent(None))

    def _leave(self, reason: str) -> None:
        """End the process. In an MPI world the launcher then ends the others."""
        record = {
            "rank": self._rank,
            "error": f"rank {self._rank} failed: Stalled: {reason}",
            "traceback": "",
            "exit_code": 2,
        }
        with contextlib.suppress(OSError):
            (self._folder / f"failed-{self._rank:05d}.json").write_text(json.dumps(record))
            os.write(2, f"{reason}\n".encode())
        os._exit(EXIT_STATUS)


def describe_place(row: dict[str, Any]) -> str:
    """What a rank does, from its heartbeat: "in backward of step 17"."""
    if row["waits"] is not None:
        return f"waits for {row['waits']}"
    return f"{row['does'] or 'at work'} of step {row['step']}" if row["step"] >= 0 else "before its first step"
