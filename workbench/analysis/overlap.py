"""How much communication was hidden behind computation: interval arithmetic on spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.table import Column, Table, percent, seconds, slept_words
from workbench.trace.kinds import COMMUNICATION_KINDS, COMPUTE_KINDS
from workbench.trace.spans import Spans, step_bounds

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Overlap:
    """The parts of each rank's time, one entry for each rank and step; all arrays have the same length.

    A step of a rank lasts from the start of its first forward to the start of the next step's first forward. The last
    step ends with its last span. Communication of step 3 that runs during step 4 counts in step 4. Evaluation belongs
    to no step.

    Attributes:
        rank, step: the entry's rank and step.
        window_s: the step's length.
        compute_s: time in which forward, backward or apply runs (union of the spans).
        communication_s: time in which communication runs, or encoding, decoding or summing for it (union).
        hidden_s: time in which both run.
        exposed_s: time in which communication runs and computation does not.
        load_s: time in which the rank reads data, and neither of them runs.
        idle_s: the rest of the step.
        slept: whether the ranks slept for their compute.
    """

    rank: Steps
    step: Steps
    window_s: Floats
    compute_s: Floats
    communication_s: Floats
    hidden_s: Floats
    exposed_s: Floats
    load_s: Floats
    idle_s: Floats
    slept: bool = False

    @property
    def num_steps(self) -> int:
        """Number of steps, counted once for every rank that took them."""
        return len(self.step)

    @property
    def fraction(self) -> float | None:
        """Hidden share of all communication, 0 to 1; None without communication."""
        communication_s = float(self.communication_s.sum())
        return float(self.hidden_s.sum()) / communication_s if communication_s > 0 else None

    def per_step(self) -> dict[str, float]:
        """Return means over ranks and steps, in seconds: step, compute, hidden, exposed, reading, idle.

        It is empty without steps.
        """
        if not self.num_steps:
            return {}
        return {name: float(getattr(self, name).mean()) for name in ARRAYS[2:]}

    def of_rank(self, rank: int) -> Overlap:
        """Return one rank's entries."""
        keep = self.rank == rank
        return Overlap(**{name: getattr(self, name)[keep] for name in ARRAYS}, slept=self.slept)

    def table(self) -> Table:
        """Return means over steps: one row for each rank and one for all."""
        rows = []
        for rank in [*np.unique(self.rank).tolist(), None]:
            part = self if rank is None else self.of_rank(rank)
            rows.append(
                {
                    "rank": "all" if rank is None else rank,
                    "overlap": part.fraction,
                    "num_steps": part.num_steps,
                    **part.per_step(),
                }
            )
        caption = (
            f"Seconds a step (mean of steps {self.step.min()} to {self.step.max()})"
            if self.num_steps
            else "Seconds a step"
        )
        return Table(rows, OVERLAP_COLUMNS, caption=caption + slept_words(slept=self.slept))

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__


ARRAYS = ("rank", "step", "window_s", "compute_s", "communication_s", "hidden_s", "exposed_s", "load_s", "idle_s")
OVERLAP_COLUMNS = (
    Column("rank", "rank"),
    Column("window_s", "step", seconds),
    Column("compute_s", "compute", seconds),
    Column("communication_s", "communication", seconds),
    Column("hidden_s", "hidden", seconds),
    Column("exposed_s", "exposed", seconds),
    Column("load_s", "reading data", seconds),
    Column("idle_s", "idle", seconds),
    Column("overlap", "overlap", percent),
)


def overlap(spans: Spans, steps: slice | None = None, ranks: Iterable[int] | None = None) -> Overlap:
    """Return hidden and exposed communication, idle time and computation of each rank and step.

    Args:
        spans: the spans of a run.
        steps: which steps, as slice(first, one after the last); None for all.
        ranks: which ranks; None for all.

    Example:
        >>> rows = [("forward", "compute", 0.0, 4.0, 0, -1, 0, -1), ("all_reduce", "comm", 3.0, 5.0, 0, -1, 800, -1)]
        >>> found = overlap(Spans.from_rows(0, rows))
        >>> float(found.hidden_s[0]), float(found.exposed_s[0]), found.fraction
        (1.0, 1.0, 0.5)
    """
    parts = [_of_rank(spans.of_rank(rank)) for rank in (spans.ranks if ranks is None else ranks)]
    columns = [
        np.concatenate([part[position] for part in parts]) if parts else np.zeros(0) for position in range(len(ARRAYS))
    ]
    if steps is not None:
        first, last = step_bounds(steps)
        keep = (columns[1] >= first) & (columns[1] < last)
        columns = [column[keep] for column in columns]
    found: dict[str, Any] = dict(zip(ARRAYS, columns, strict=True))
    found |= {name: found[name].astype(np.int64) for name in ("rank", "step")}
    return Overlap(**found, slept=spans.slept)


def step_windows(spans: Spans) -> tuple[Steps, Floats]:
    """Return one rank's steps (S,), ascending in time, and the bounds (S + 1,) of their windows in seconds.

    A step begins when the rank reads its data, or else with its first forward; on a rank without either (a server),
    with its first span.
    """
    keep = (spans.table["step"] >= 0) & ~spans.is_kind(["evaluate"])
    table, begins_step = spans.table[keep], spans.is_kind(["load", "forward"])[keep]
    if not len(table):
        return np.zeros(0, np.int64), np.zeros(0)
    begins = table[begins_step] if begins_step.any() else table
    steps, first = np.unique(begins["step"], return_index=True)  # sorted by start, so each step's first is its earliest
    starts = begins["start_s"][first]
    order = np.argsort(starts, kind="stable")
    return steps[order].astype(np.int64), np.append(starts[order], table["end_s"].max())


def _of_rank(spans: Spans) -> tuple[NDArray[np.generic], ...]:
    """Return one rank's columns of `Overlap`, in the order of its fields."""
    steps, bounds = step_windows(spans)
    if not len(steps):
        return (np.zeros(0),) * len(ARRAYS)

    def seconds_of(*groups: Iterable[str]) -> Floats:
        """Return the seconds of each window in which a span of one of these kinds runs."""
        chosen = spans.table[spans.is_kind([kind for group in groups for kind in group])]
        return np.diff(measure_before(bounds, *union(chosen["start_s"], chosen["end_s"])))

    # With E the evaluation time: |A without E| = |A or E| - |E|, and |A and B| = |A| + |B| - |A or B|.
    evaluation = ("evaluate",)
    evaluate_s = seconds_of(evaluation)
    window_s = np.diff(bounds) - evaluate_s
    compute_s = seconds_of(COMPUTE_KINDS, evaluation) - evaluate_s
    communication_s = seconds_of(COMMUNICATION_KINDS, evaluation) - evaluate_s
    either_s = seconds_of(COMPUTE_KINDS, COMMUNICATION_KINDS, evaluation) - evaluate_s
    any_s = seconds_of(COMPUTE_KINDS, COMMUNICATION_KINDS, ("load",), evaluation) - evaluate_s
    lengths = (
        window_s,
        compute_s,
        communication_s,
        compute_s + communication_s - either_s,
        either_s - compute_s,
        any_s - either_s,
        window_s - any_s,
    )
    # rounding errors of differences: a 0 may become +-1e-13 s, below the resolution of any clock
    return (
        np.full(len(steps), spans.table["rank"][0]),
        steps,
        *(np.where(length > 1e-12, length, 0.0) for length in lengths),
    )


def union(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """Return starts and ends of disjoint ascending intervals that cover the same times as these (N,) intervals.

    >>> union(np.array([0.0, 4.0, 1.0]), np.array([2.0, 5.0, 3.0]))
    (array([0., 4.]), array([3., 5.]))
    """
    order = np.argsort(start_s, kind="stable")
    starts, ends = start_s[order], np.maximum.accumulate(end_s[order])
    new = np.append(True, starts[1:] > ends[:-1])[: len(starts)]
    return starts[new], ends[np.append(new[1:], True)[: len(starts)]]


def measure_before(at_s: Floats, start_s: Floats, end_s: Floats) -> Floats:
    """Return how many seconds of disjoint ascending intervals lie before each of the times, shape (M,).

    >>> measure_before(np.array([0.0, 2.0, 9.0]), np.array([1.0, 4.0]), np.array([3.0, 5.0]))
    array([0., 1., 3.])
    """
    if not len(start_s):
        return np.zeros(len(at_s))
    total = np.append(0.0, np.cumsum(end_s - start_s))
    # number of intervals that have begun; the last may be running
    begun = np.searchsorted(start_s, at_s, side="right")
    running = np.maximum(begun - 1, 0)
    rest = np.where(begun > 0, np.maximum(end_s[running] - at_s, 0.0), 0.0)
    return total[begun] - rest
