"""How the steps of two runs differ: the parts of their time, with intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.table import Column, Table, seconds
from workbench.trace.spans import Spans

LEVEL = 0.95  # of the intervals
PARTS = {  # part of a step -> the columns of `Overlap` that it adds
    "step": (("window_s", 1),),
    "computation alone": (("compute_s", 1), ("hidden_s", -1)),
    "hidden communication": (("hidden_s", 1),),
    "exposed communication": (("exposed_s", 1),),
    "reading data": (("load_s", 1),),
    "waiting (idle)": (("idle_s", 1),),
}
NOTE = (
    "Means over ranks and steps. The interval (95 %, Welch) is over the steps of these two runs: it does not contain the "
    "difference between repetitions of a run."
)

Floats = NDArray[np.float64]


def step_difference(
    first: Spans,
    second: Spans,
    steps: tuple[slice | None, slice | None] = (None, None),
    names: tuple[str, str] = ("A", "B"),
) -> Table:
    """Return the parts of a step of two runs, and their differences.

    Args:
        first, second: the spans of the runs.
        steps: which steps of each run; None for all.
        names: titles of the runs.

    Returns:
        A row for each part: `part`, `first_s` and `second_s` (means over ranks and steps), `difference_s` (second minus
        first), and `low_s` and `high_s`, its interval; None for fewer than two steps.

    Example:
        >>> rows = [("forward", "compute", float(step), step + 0.5, step, -1, 0, -1) for step in range(4)]
        >>> later = [("forward", "compute", 2.0 * step, 2 * step + 1.5, step, -1, 0, -1) for step in range(4)]
        >>> table = step_difference(Spans.from_rows(0, rows), Spans.from_rows(0, later))
        >>> table[1]["part"], table[1]["difference_s"]
        ('computation alone', 1.0)
    """
    found = [overlap(spans, chosen) for spans, chosen in zip((first, second), steps, strict=True)]
    rows = list[dict[str, Any]]()
    for part in PARTS:
        one, other = (_by_step(each, part) for each in found)
        if not one.any() and not other.any():
            continue
        low_s, high_s = _interval(one, other)
        mean_s = float(one.mean()), float(other.mean())
        rows.append(
            {
                "part": part,
                "first_s": mean_s[0],
                "second_s": mean_s[1],
                "difference_s": mean_s[1] - mean_s[0],
                "low_s": low_s,
                "high_s": high_s,
                "interval": None if low_s is None or high_s is None else f"{signed(low_s)} to {signed(high_s)}",
            }
        )
    columns = (
        Column("part", "part of a step"),
        Column("first_s", names[0], seconds),
        Column("second_s", names[1], seconds),
        Column("difference_s", "difference", signed),
        Column("interval", "95 % interval"),
    )
    counts = [len(np.unique(each.step)) for each in found]
    caption = f"{names[1]} minus {names[0]}: {counts[1]} and {counts[0]} steps"
    return Table(rows, columns, caption=caption, footnotes=(NOTE,))


def signed(value_s: float) -> str:
    """Format a difference of seconds.

    >>> signed(0.0012), signed(-2.5), signed(0.0)
    ('+1.20 ms', '\N{MINUS SIGN}2.50 s', '0 s')
    """
    text = seconds(abs(value_s))
    return text if not value_s else f"{'+' if value_s > 0 else chr(0x2212)}{text}"


def _by_step(found: Overlap, part: str) -> Floats:
    """Return a part's mean over ranks for each step, shape (S,)."""
    lengths_s = sum((sign * getattr(found, name) for name, sign in PARTS[part]), np.zeros(len(found.step)))
    _, place, counts = np.unique(found.step, return_inverse=True, return_counts=True)
    return np.asarray(np.bincount(place.reshape(-1), lengths_s, len(counts)) / counts, np.float64)


def _interval(first: Floats, second: Floats) -> tuple[float | None, float | None]:
    """Return Welch's interval of the difference of two means; None for fewer than two values."""
    from scipy.special import stdtrit  # not above: every live view imports this module, and must not wait for SciPy

    if min(len(first), len(second)) < 2:
        return None, None
    errors = [float(values.var(ddof=1)) / len(values) for values in (first, second)]
    difference, total = float(second.mean() - first.mean()), sum(errors)
    if total == 0:
        return difference, difference
    freedom = total**2 / sum(
        error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True)
    )
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * total**0.5
    return difference - half, difference + half
