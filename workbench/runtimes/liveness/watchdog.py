"""What a rank does, for whoever waits for it; and an end for calls that nothing can interrupt.

No request says what it is about to do: `detector`'s thread reads that from the rank's own stack, so that a step costs nothing more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, final

from workbench import units

EXIT_STATUS = 75  # of a rank that ended itself because a library's call did not return: EX_TEMPFAIL

# (module, function) on a rank's stack, innermost first -> what it does there.
PLACES = {
    ("workbench.replica.local_training", "_micro"): "reading data",
    ("workbench.runtimes.rank.training_loop", "_evaluate"): "in the evaluation",
    ("workbench.runtimes.checkpoint.writer", "keep"): "keeping a checkpoint",
    ("workbench.runtimes.elastic.shrink", "shrink"): "going on as fewer ranks",
    ("workbench.runtimes.execution.interpreter", "_apply"): "in the update",
    ("workbench.runtimes.execution.interpreter", "_apply_master"): "in the update",
    ("workbench.runtimes.execution.interpreter", "_backward"): "in backward",
    ("workbench.runtimes.control.controller", "_hold_a_beat"): "held",
}


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
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        step: Callable[[], int],
        bound: Callable[[], float | None] = lambda: None,
        timeout_s: float | None = None,
    ) -> None:
        self.step = step
        self._folder, self._rank, self._bound, self._timeout_s = folder, rank, bound, timeout_s
        self._thread = threading.get_ident()
        self._waits: tuple[str, float] | None = None  # what the rank's thread waits for, and when it last said so
        self._blocked: tuple[float, int, float] | None = None  # in which call, of which step, since when
        self._says_after_s = 0.0

    def waits(self, what: str) -> None:
        """The calling thread waits for that, and looks after itself; called some times a second."""
        if threading.get_ident() == self._thread:
            self._waits = (what, time.monotonic())

    def _waiting(self, within_s: float) -> str | None:
        waits = self._waits
        return waits[0] if waits is not None and time.monotonic() - waits[1] < within_s else None

    def row(self, within_s: float) -> dict[str, Any]:
        """For a record; who has not said for so long that it waits does not wait."""
        waits = self._waiting(within_s)
        return {"waits": waits, "does": "" if waits else doing(stack_of(self._thread)), "step": self.step()}

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


def stack_of(thread: int) -> FrameType | None:
    """What another thread executes now, innermost first.

    Nothing is collected meanwhile: Python 3.11 makes the frames under a lock that finalizers take too (CPython's issue 106883), and so
    ranks were seen to hang for good.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def doing(frame: FrameType | None) -> str:
    """What a thread does, by its stack: "in backward"; "" where nothing on it tells."""
    while frame is not None:
        place = PLACES.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if place == "in backward" and (phase := frame.f_locals.get("phase")):
            return f"in {phase}"
        if place is not None:
            return place
        frame = frame.f_back
    return ""


def place_words(row: dict[str, Any]) -> str:
    """Where a rank is, by its record: "in backward of step 17"."""
    if row["waits"] is not None:
        return f"waits for {row['waits']}"
    return f"{row['does'] or 'at work'} of step {row['step']}" if row["step"] >= 0 else "before its first step"
