"""The minutes that a study may take, and lines that say how many are left."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import final

LINE_S = 2.0  # seconds between two lines of progress


@final
@dataclass(slots=True)
class Budget:
    """A limit of seconds, counted from now."""

    seconds: float
    quiet: bool = False
    _begin_s: float = field(default_factory=time.monotonic)
    _said_s: float = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.seconds - self.spent_s)

    def report(self, words: str, *, now: bool = False) -> None:
        """Print what is done now, with the time left; at most one line every two seconds unless `now`."""
        if self.quiet or (not now and self.spent_s - self._said_s < LINE_S):
            return
        self._said_s = self.spent_s
        minutes, seconds = divmod(round(self.left_s), 60)
        print(f"study: {words}, at most {minutes}:{seconds:02d} min left", file=sys.stderr, flush=True)
