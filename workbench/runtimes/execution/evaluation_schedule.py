"""When evaluations of an algorithm with servers are due: counted in the servers' updates, not in any worker's steps.

An evaluation of step s is due when the run has made the updates of s + 1 steps. Each server counts for its own shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import final

from workbench.ops import Apply

ROUNDING = 1e-6  # rounding of a sum of many fractions of a step


@final
class EvaluationSchedule:
    """The steps after which an evaluation is due, in a run from its first step or from a checkpoint.

    Args:
        due: those steps, ascending.
    """

    def __init__(self, due: Sequence[int]) -> None:
        self._due = due

    def count(self, progress: list[float], request: Apply, num_workers: int) -> list[int]:
        """Count an update of a shard's server. Return the due steps that it completes.

        Args:
            progress: shard -> steps that its server's updates have completed. One number changes.
            num_workers: number of workers that compute now.
        """
        shard = 0 if request.gradient.bucket is None else request.gradient.bucket
        before = progress[shard]
        num_gradients = max(1, len(request.of)) + len(request.dropped)
        progress[shard] += num_gradients / max(1, num_workers) if request.completes is None else request.completes
        return list(self._due[self._passed(before) : self._passed(progress[shard])])

    def left(self, progress: float) -> list[int]:
        """Return the due steps that are not completed at that progress."""
        return list(self._due[self._passed(progress) :])

    def _passed(self, progress: float) -> int:
        return bisect_right(self._due, progress - 1 + ROUNDING)
