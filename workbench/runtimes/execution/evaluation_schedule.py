"""When the evaluations of an algorithm with servers are due: by the servers' updates, not by the speed of any worker.

An evaluation of step s is due when the run has made the updates of s + 1 steps. Each server counts for its own shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import final

from workbench.ops import Apply
from workbench.program import Algorithm

ROUNDING = 1e-6  # of a sum of many shares of a step


@final
class EvaluationSchedule:
    """The steps after which an evaluation is due, in a run from its first step or from a checkpoint.

    Args:
        due: those steps, ascending.
    """

    def __init__(self, due: Sequence[int]) -> None:
        self._due = due

    def count(self, progress: list[float], request: Apply, algorithm: Algorithm, num_workers: int) -> list[int]:
        """Count an update of a shard's server. Return the due steps that it completes.

        Args:
            progress: shard -> steps that its server's updates have completed. One number changes.
            num_workers: number of workers that compute now.
        """
        shard = 0 if request.gradient.bucket is None else request.gradient.bucket
        before = progress[shard]
        progress[shard] += algorithm.steps_per_update(max(1, len(request.of)) + len(request.dropped), max(1, num_workers))
        return list(self._due[self._passed(before) : self._passed(progress[shard])])

    def left(self, progress: float) -> list[int]:
        """Return the due steps that are not completed at that progress."""
        return list(self._due[self._passed(progress) :])

    def _passed(self, progress: float) -> int:
        return bisect_right(self._due, progress - 1 + ROUNDING)
