"""How often a live view polls a run and draws it, so that it does not slow down the training."""

from __future__ import annotations

import time
from threading import Event
from typing import final

import psutil

DRAWING_SHARE = 0.2  # largest share of time for drawing: long curves are drawn less often
BUSY_SHARE = 0.01  # if all cores are busy: drawing takes a core from a rank, and all ranks wait for it
BUSY_PERCENT = 85.0  # load of all cores
LONGEST_S = 3.0  # a longer pause would look like a stopped run
SHORT_S, OFTEN_S = 0.1, 10.0  # between two polls after a command, and for how long


def pause_after(took_s: float, least_s: float) -> float:
    """Return seconds until the next drawing, after one that took `took_s` of a core."""
    busy = psutil.cpu_percent(interval=None) > BUSY_PERCENT  # load since the last call
    return max(least_s, min(took_s / (BUSY_SHARE if busy else DRAWING_SHARE), LONGEST_S))


@final
class PollTimer:
    """Waits between two polls of a run. After a command it waits less for a while, so that the effect is shown at once.

    Any thread may call its methods.
    """

    def __init__(self) -> None:
        self._wake = Event()
        self._often_until_s = 0.0

    def wait(self, pause_s: float) -> None:
        """Wait `pause_s` seconds, or `SHORT_S` after a command. `wake` ends the wait."""
        self._wake.wait(SHORT_S if time.monotonic() < self._often_until_s else pause_s)
        self._wake.clear()

    def wake(self) -> None:
        """End the present wait, or the next one."""
        self._wake.set()

    def poll_often(self) -> None:
        """Poll now, and often for the next `OFTEN_S` seconds."""
        self._often_until_s = time.monotonic() + OFTEN_S
        self._wake.set()

    def poll_as_usual(self) -> None:
        """Wait `pause_s` again, because the effect of the command was shown."""
        self._often_until_s = 0.0
