"""How often a live figure is drawn, so that it does not slow down the training."""

from __future__ import annotations

import psutil

DRAWING_SHARE = 0.2  # largest share of time for drawing: long curves are drawn less often
BUSY_SHARE = 0.01  # if all cores are busy: drawing takes a core from a rank, and all ranks wait for it
BUSY_PERCENT = 85.0  # load of all cores
LONGEST_S = 3.0  # a longer pause would look like a stopped run
HURRY_S, HURRIED_S = 0.1, 10.0  # between two looks after a button was pressed, and for how long


def pause_after(took_s: float, least_s: float) -> float:
    """Return seconds until the next drawing, after one that took `took_s` of a core."""
    busy = psutil.cpu_percent(interval=None) > BUSY_PERCENT  # load since the last call
    return max(least_s, min(took_s / (BUSY_SHARE if busy else DRAWING_SHARE), LONGEST_S))
