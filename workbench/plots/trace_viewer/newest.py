"""The newest steps of a run that trains, from the ends of its ranks' traces."""

from __future__ import annotations

import numpy as np

from workbench.analysis.overlap import step_windows
from workbench.trace.run import Run

NUM_STEPS = 20  # a viewer shows the last five of them at first
MAX_SPANS = 5000  # with more, fewer steps are sent, but at least one
MAX_TAIL_BYTES = 8 * 1024 * 1024  # largest tail of a rank's trace to read, for steps with many spans


def newest_steps(run: Run, num_steps: int = NUM_STEPS, max_spans: int = MAX_SPANS) -> slice | None:
    """Return the last steps that all ranks have ended, as many as fit; None before the first complete step.

    Args:
        run: a run, or the end of one (`trace.tail.read_tail`).
        num_steps, max_spans: largest number of steps, and of their spans.
    """
    spans, first, last = run.spans, 0, None
    for rank in spans.ranks:
        numbers, _ = step_windows(spans.of_rank(rank))
        if len(numbers) < 2:
            return None
        first = max(first, int(numbers[1] if numbers[0] else 0))  # the first step may be cut
        # the last step is still running: it is left out
        last = int(numbers.max()) if last is None else min(last, int(numbers.max()))
    if last is None or last <= first:
        return None
    steps = spans.table["step"]
    begin = last - 1
    while begin > max(first, last - num_steps) and np.count_nonzero((steps >= begin - 1) & (steps < last)) <= max_spans:
        begin -= 1
    return slice(begin, last)
