"""How far a training is, and how long it still takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from workbench.trace.run import Run

RECENT = 50  # steps whose mean time gives the time left


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """Steps taken, steps in all, and seconds left; None if it is not known. A run that does not train has no time left."""

    taken: int
    total: int | None
    left_s: float | None


def progress_of(run: Run) -> Progress:
    """Return the progress of a run by the rank that is furthest.

    The time left is the number of steps left, times the mean duration of the last `RECENT` steps.

    >>> rows = [{"step": step, "seconds": 0.5 * step, "loss": 1.0} for step in range(4)]
    >>> progress_of(Run({"status": "running", "num_steps": 10}, {0: rows}))
    Progress(taken=4, total=10, left_s=3.0)
    """
    # Of a rank, each step has one row and at most one evaluation.
    newest = ([row for row in rows[-2 * RECENT - 2 :] if "evaluation" not in row] for rows in run.metrics.values())
    rows = max(newest, key=lambda rows: rows[-1]["step"] if rows else -1, default=[])
    total = run.info.get("num_steps")
    if not rows:
        return Progress(0, total, None)
    first, last = rows[-min(RECENT + 1, len(rows))], rows[-1]
    left_s = None
    if total is not None and last["step"] > first["step"] and run.info.get("status") == "running":
        step_s = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
        left_s = max(0, total - last["step"] - 1) * step_s
    return Progress(last["step"] + 1, total, left_s)
