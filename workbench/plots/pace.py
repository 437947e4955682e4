"""How often what moves is drawn, so that whoever looks on does not slow down what is looked at."""

from __future__ import annotations

import psutil

DRAWING_SHARE = 0.2  # of the time, at most, is spent on drawing: curves of long runs are drawn less often
BUSY_SHARE = 0.01  # where the machine's cores are all taken, for what draws takes one from a rank, for which all others wait
BUSY_PERCENT = 85.0  # of all cores
LONGEST_S = 3.0  # whoever looks on should not take what he sees for a stop


def pause_after(took_s: float, least_s: float) -> float:
    """Seconds until the next drawing, of one that took so long."""
    busy = psutil.cpu_percent(interval=None) > BUSY_PERCENT  # since this was asked last
    return max(least_s, min(took_s / (BUSY_SHARE if busy else DRAWING_SHARE), LONGEST_S))
