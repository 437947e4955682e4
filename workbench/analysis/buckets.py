"""Times of the buckets of layer-wise runs, from their trace: the input of the recurrences of `theory.layerwise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.summary import num_warm_up
from workbench.errors import ConfigError
from workbench.trace.run import Run

if TYPE_CHECKING:
    from workbench.theory import Schedule
    from workbench.theory.layerwise import Order

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """Medians over steps, in seconds; buckets in the order of backward.

    A step's origin is the mean of its begins on all ranks.

    Attributes:
        forward_s: from the origin until the last rank has ended forward.
        backward_s: from then until the last rank has ended backward.
        begin_s, end_s: begin and end of each bucket's sum, since the origin. A sum begins when the last rank has called
            it and the previous sum has ended.
        communication_s: seconds from begin to end of each bucket's sum.
        update_s: seconds of each bucket's update; the time of one update of all buckets is divided equally.
        step_s: from the origin to the end of the last update, mean over ranks.
    """

    forward_s: float
    backward_s: float
    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]
    communication_s: tuple[float, ...]
    update_s: tuple[float, ...]
    step_s: float

    def recurrences(self, ready_shares: Sequence[float], order: Order) -> Schedule:
        """Evaluate `theory.layerwise` with these seconds.

        `ready_shares`: the share of backward after which each bucket is final, ascending to 1.
        """
        from workbench.theory.layerwise import layerwise  # imported here: it loads torch

        parts = np.diff(np.append(0.0, ready_shares)) * self.backward_s
        return layerwise(self.forward_s, parts.tolist(), self.communication_s, self.update_s, order)


def bucket_times(run: Run) -> BucketTimes:
    """Return the bucket times of a run of `LayerwiseSGD` with the library's all-reduce, without the first steps.

    Raises:
        ConfigError: the run has no trace, or does not sum bucket by bucket.
    """
    spans = run.spans
    sums = spans.select(kinds=["all_reduce"]).table
    sums = sums[sums["bucket"] >= 0]
    if not len(sums):
        raise ConfigError(
            f"run {run.id} has no sums by bucket in its trace: run LayerwiseSGD with the library's all-reduce, and set "
            "trace_steps"
        )
    steps = np.unique(sums["step"])
    steps = steps[num_warm_up(len(steps)) :]
    rows = [_step(run, int(step), sums[sums["step"] == step]) for step in steps]
    phases, begin, end, update = (np.array(column) for column in zip(*rows, strict=True))
    forward_s, backward_s, step_s = np.median(phases, axis=0).tolist()
    return BucketTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        begin_s=tuple(np.median(begin, axis=0).tolist()),
        end_s=tuple(np.median(end, axis=0).tolist()),
        communication_s=tuple(np.median(end - begin, axis=0).tolist()),
        update_s=tuple(np.median(update, axis=0).tolist()),
        step_s=step_s,
    )


def _step(run: Run, step: int, sums: NDArray[np.void]) -> tuple[Floats, Floats, Floats, Floats]:
    """Return (forward, backward, step) of one step, and begin, end and update of each bucket."""
    spans, ranks = run.spans.select(steps=slice(step, step + 1)), np.unique(sums["rank"])
    num_buckets = int(sums["bucket"].max()) + 1
    begin, end = np.full((len(ranks), num_buckets), np.nan), np.full((len(ranks), num_buckets), np.nan)
    update, marks = np.zeros((len(ranks), num_buckets)), np.zeros((len(ranks), 4))
    for row, rank in enumerate(ranks.tolist()):
        mine, of_rank = spans.of_rank(rank), sums[sums["rank"] == rank]
        forward, backward, apply = (mine.select(kinds=[kind]).table for kind in ("forward", "backward", "apply"))
        marks[row] = forward["start_s"].min(), forward["end_s"].max(), backward["end_s"].max(), apply["end_s"].max()
        begin[row, of_rank["bucket"]], end[row, of_rank["bucket"]] = of_rank["start_s"], of_rank["end_s"]
        lengths = apply["end_s"] - apply["start_s"]
        if (apply["bucket"] >= 0).all():
            np.add.at(update[row], apply["bucket"], lengths)
        else:
            update[row] = lengths.sum() / num_buckets
    origin_s, computed_s = marks[:, 0].mean(), marks.max(axis=0)  # all ranks are on one clock
    phases = np.array([computed_s[1] - origin_s, computed_s[2] - computed_s[1], marks[:, 3].mean() - origin_s])
    ends_s = end.mean(axis=0) - origin_s
    begins_s = np.maximum(begin.max(axis=0) - origin_s, np.append(0.0, np.maximum.accumulate(ends_s)[:-1]))
    return phases, begins_s, np.maximum(ends_s, begins_s), update.mean(axis=0)
