"""How much of the communication was hidden behind computation: interval arithmetic on spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.table import Column, Table, percent, seconds
from workbench.trace.kinds import COMMUNICATION_KINDS, COMPUTE_KINDS
from workbench.trace.spans import Spans, step_bounds

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Overlap:
    """Where each rank's time went, one entry a rank and step; all arrays have one length.

    A step of a rank is the time from the start of its first forward of that step to that of the next (the last step ends with
    its last span), whatever the spans in it are labelled: communication of step 3 that runs during step 4 counts there.
    Time spent evaluating belongs to no step.

    Attributes:
        rank, step: whose, and when.
        window_s: the step's length.
        compute_s: forward, backward or apply was running (union of the spans).
        communication_s: communication was running, or its encoding, decoding or summing (union).
        hidden_s: both at once.
        exposed_s: communication but no computation.
        idle_s: neither.
    """

    rank: Steps
    step: Steps
    window_s: Floats
    compute_s: Floats
    communication_s: Floats
    hidden_s: Floats
    exposed_s: Floats
    idle_s: Floats

    @property
    def num_steps(self) -> int:
        """Steps, counted once for every rank that took them."""
        return len(self.step)

    @property
    def fraction(self) -> float | None:
        """Hidden share of all communication, 0 to 1; None when there was none."""
        communication_s = float(self.communication_s.sum())
        return float(self.hidden_s.sum()) / communication_s if communication_s > 0 else None

    def per_step(self) -> dict[str, float]:
        """Means over ranks and steps, in seconds: step, compute, hidden, exposed, idle; empty without steps."""
        if not self.num_steps:
            return {}
        names = ("window_s", "compute_s", "communication_s", "hidden_s", "exposed_s", "idle_s")
        return {name: float(getattr(self, name).mean()) for name in names}

    def of_rank(self, rank: int) -> Overlap:
        """One rank's entries."""
        keep = self.rank == rank
        return Overlap(**{name: getattr(self, name)[keep] for name in self.__slots__})

    def table(self) -> Table:
        """Means a step, one row a rank and one for all."""
        rows = []
        for rank in [*np.unique(self.rank).tolist(), None]:
            part = self if rank is None else self.of_rank(rank)
            rows.append({"rank": "all" if rank is None else rank, "overlap": part.fraction, "num_steps": part.num_steps, **part.per_step()})
        caption = f"Seconds a step (mean of steps {self.step.min()} to {self.step.max()})" if self.num_steps else "Seconds a step"
        return Table(rows, OVERLAP_COLUMNS, caption=caption)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__


OVERLAP_COLUMNS = (
    Column("rank", "rank"),
    Column("window_s", "step", seconds),
    Column("compute_s", "compute", seconds),
    Column("communication_s", "communication", seconds),
    Column("hidden_s", "hidden", seconds),
    Column("exposed_s", "exposed", seconds),
    Column("idle_s", "idle", seconds),
    Column("overlap", "overlap", percent),
)


def overlap(spans: Spans, steps: slice | None = None, ranks: Iterable[int] | None = None) -> Overlap:
    """Hidden and exposed communication, idle time and computation of each rank and step.

    Args:
        spans: of a run.
        steps: which steps, as slice(first, one after the last); None for all.
        ranks: whose; None for all.

    Example:
        >>> rows = [("forward", "compute", 0.0, 4.0, 0, -1, 0, -1), ("all_reduce", "comm", 3.0, 5.0, 0, -1, 800, -1)]
        >>> found = overlap(Spans.from_rows(0, rows))
        >>> float(found.hidden_s[0]), float(found.exposed_s[0]), found.fraction
        (1.0, 1.0, 0.5)
    """
    parts = [_of_rank(spans.of_rank(rank)) for rank in (spans.ranks if ranks is None else ranks)]
    columns = [np.concatenate([part[position] for part in parts]) if parts else np.zeros(0) for position in range(8)]
    if steps is not None:
        first, last = step_bounds(steps)
        keep = (columns[1] >= first) & (columns[1] < last)
        columns = [column[keep] for column in columns]
    rank, step, window_s, compute_s, communication_s, hidden_s, exposed_s, idle_s = columns
    return Overlap(
        rank=rank.astype(np.int64),
        step=step.astype(np.int64),
        window_s=window_s,
        compute_s=compute_s,
        communication_s=communication_s,
        hidden_s=hidden_s,
        exposed_s=exposed_s,
        idle_s=idle_s,
    )


def step_windows(spans: Spans) -> tuple[Steps, Floats]:
    """One rank's steps (S,), ascending in time, and the bounds (S + 1,) in seconds of their windows.

    A step begins with its first forward; on a rank that runs none (a server), with its first span.
    """
    keep = (spans.table["step"] >= 0) & ~spans.is_kind(["evaluate"])
    table, forward = spans.table[keep], spans.is_kind(["forward"])[keep]
    if not len(table):
        return np.zeros(0, np.int64), np.zeros(0)
    begins = table[forward] if forward.any() else table
    steps, first = np.unique(begins["step"], return_index=True)  # sorted by start, so the first found is the earliest
    starts = begins["start_s"][first]
    order = np.argsort(starts, kind="stable")
    return steps[order].astype(np.int64), np.append(starts[order], table["end_s"].max())


def _of_rank(spans: Spans) -> tuple[NDArray[np.generic], ...]:
    """One rank's columns of `Overlap`, in the order of its fields."""
    steps, bounds = step_windows(spans)
    if not len(steps):
        return (np.zeros(0),) * 8

    def seconds_of(*groups: Iterable[str]) -> Floats:
        """Seconds of each window in which a span of one of these kinds was running."""
        chosen = spans.table[spans.is_kind([kind for group in groups for kind in group])]
        return np.diff(measure_before(bounds, *union(chosen["start_s"], chosen["end_s"])))

    # With E the time spent evaluating: |A without E| = |A or E| - |E|, and |A and B| = |A| + |B| - |A or B|.
    evaluation = ("evaluate",)
    evaluate_s = seconds_of(evaluation)
    window_s = np.diff(bounds) - evaluate_s
    compute_s = seconds_of(COMPUTE_KINDS, evaluation) - evaluate_s
    communication_s = seconds_of(COMMUNICATION_KINDS, evaluation) - evaluate_s
    either_s = seconds_of(COMPUTE_KINDS, COMMUNICATION_KINDS, evaluation) - evaluate_s
    lengths = (window_s, compute_s, communication_s, compute_s + communication_s - either_s, either_s - compute_s, window_s - either_s)
    # differences of sums: what should be 0 comes out as +-1e-13 s, below what any clock tells apart
    return (np.full(len(steps), spans.table["rank"][0]), steps, *(np.where(length > 1e-12, length, 0.0) for length in lengths))


def union(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """Starts and ends of the disjoint intervals, ascending, that cover the same as these (N,) intervals.

    >>> union(np.array([0.0, 4.0, 1.0]), np.array([2.0, 5.0, 3.0]))
    (array([0., 4.]), array([3., 5.]))
    """
    order = np.argsort(start_s, kind="stable")
    starts, ends = start_s[order], np.maximum.accumulate(end_s[order])
    new = np.append(True, starts[1:] > ends[:-1])[: len(starts)]
    return starts[new], ends[np.append(new[1:], True)[: len(starts)]]


def measure_before(at_s: Floats, start_s: Floats, end_s: Floats) -> Floats:
    """(M,) how many seconds of disjoint ascending intervals lie before each of (M,) times.

    >>> measure_before(np.array([0.0, 2.0, 9.0]), np.array([1.0, 4.0]), np.array([3.0, 5.0]))
    array([0., 1., 3.])
    """
    if not len(start_s):
        return np.zeros(len(at_s))
    total = np.append(0.0, np.cumsum(end_s - start_s))
    begun = np.searchsorted(start_s, at_s, side="right")  # intervals that have begun by then; the last may be running
    running = np.maximum(begun - 1, 0)
    rest = np.where(begun > 0, np.maximum(end_s[running] - at_s, 0.0), 0.0)
    return total[begun] - rest
