"""Layout of a timeline: the spans of a run in a time window, joined if there are too many, in rows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.overlap import step_windows
from workbench.errors import ConfigError
from workbench.plots.gantt.merged_bars import MergedBars, merge_bars
from workbench.trace.kinds import COMPUTE_KINDS, KINDS
from workbench.trace.rows import sublanes
from workbench.trace.run import Run
from workbench.trace.spans import Spans

MAX_BARS = 4_000  # a browser draws and moves this many without delay
FILLED = 0.86  # share of a row's height that its bar fills
USUAL_LANES, MAX_TIMES = 8, 5  # with more lanes than usual, there may be more bars, up to this factor
NUM_STEPS = 5  # default number of steps shown
MAX_RANKS = 8  # with more ranks, each is one row by default
OUTLIER, MIN_JUDGED = 3.0, 3  # an unusual step takes more than this many medians; with fewer steps none is judged
FOLDED_HEIGHT = 0.6  # of a rank in one row; two tracks, computation above all else
MIN_SHOWN_SHARE = 1e-3  # share of the window: a span that reaches into it by less is not shown

Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Vertical places of spans, from top to bottom. The row of a lane without concurrent spans has height 1.

    Attributes:
        center, height: (N,) of each span's row.
        lanes: (center, rank, lane) of each lane.
        ends: lower end of each rank; the last one is the total height.
    """

    center: Floats
    height: Floats
    lanes: tuple[tuple[float, int, str], ...]
    ends: tuple[float, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """The spans of a run within the time of some steps.

    Attributes:
        chosen: (N,) their places in the run's table.
        table: (N,) span table, cut to the window, with times since its begin.
        bounds: step -> its begin on the rank of `step_rank`, since the window's begin.
        begin_s, length_s: begin and length of the window.
    """

    chosen: NDArray[np.int64]
    table: NDArray[Any]
    bounds: dict[int, float]
    begin_s: float
    length_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """One run's part of a timeline.

    Attributes:
        table: (N,) span table, with times since the window's begin.
        merged: the spans of each bar (see `merged_bars`).
        bars: the bar of each span of the run; -1 if it is not shown.
        rows: vertical places.
        bounds: step -> its begin on the rank of `step_rank`, since the window's begin.
        begin_s, length_s: begin and length of the window.
        folded: whether each rank is one row.
    """

    table: NDArray[Any]
    merged: MergedBars
    bars: NDArray[np.int64]
    rows: Rows
    bounds: dict[int, float]
    begin_s: float
    length_s: float
    folded: bool = False

    @property
    def num_spans(self) -> int:
        """Number of spans in the window."""
        return len(self.merged.place)


def panel(
    run: Run,
    steps: slice | None = None,
    ranks: Sequence[int] | None = None,
    max_bars: int = MAX_BARS,
    folded: bool | None = None,
) -> Panel:
    """Lay out the spans of a run within the time of some steps.

    Args:
        run: a run with a trace.
        steps: which steps; None for five from the middle.
        ranks: which ranks; None for all.
        max_bars: about how many bars a browser may draw.
        folded: draw one row for each rank; None: if `ranks` is None and there are more than `MAX_RANKS`.

    Raises:
        ConfigError: the trace holds none of these steps; the message says which it holds.
    """
    spans = run.spans
    found = window(run, steps, ranks)
    if folded is None:
        folded = ranks is None and len(spans.ranks) > MAX_RANKS
    num_ranks = len(shown_ranks(run, ranks))
    most = max_bars * min(max(1, num_ranks * (2 if folded else len(spans.lanes)) // USUAL_LANES), MAX_TIMES)
    table = _in_tracks(found.table, computing_lanes(spans)) if folded else found.table
    merged = merge_bars(table, most, found.length_s)
    bars = np.full(len(spans), -1, np.int64)
    bars[found.chosen] = merged.place
    exact = len(merged.table) == len(table)
    if folded:
        rows = _lay_folded(merged)
    else:
        rows = lay_rows(Spans(table, spans.lanes), sublanes(table)) if exact else _lay_merged(merged, spans.lanes)
    return Panel(
        table=merged.table,
        merged=merged,
        bars=bars,
        rows=rows,
        bounds=found.bounds,
        begin_s=found.begin_s,
        length_s=found.length_s,
        folded=folded,
    )


def shown_ranks(run: Run, ranks: Sequence[int] | None) -> list[int]:
    """Return the ranks to show; None: all that have a trace.

    Raises:
        ConfigError: one of them has no trace; the message says which have.
    """
    available = run.spans.ranks
    if not available:
        raise ConfigError(f"run {run.id} has no trace: was it made with trace_steps=0?")
    shown = list(available if ranks is None else ranks)
    if not shown or not set(shown) <= set(available):
        first, last = available[0], available[-1]
        named = f"{first} to {last}" if len(available) == last - first + 1 else ", ".join(map(str, available))
        raise ConfigError(f"ranks={shown}: run {run.id} has traces of ranks {named}; ask for some of those")
    return shown


def step_rank(run: Run, shown: Sequence[int]) -> int:
    """Return the rank whose steps a timeline names: the first one shown, except ranks that left the run."""
    there = run.ranks_at(sys.maxsize, set(shown))
    return next((rank for rank in shown if rank in there), shown[0])


def window(run: Run, steps: slice | None = None, ranks: Sequence[int] | None = None) -> Window:
    """Return the spans of a run within the time of some steps.

    Raises:
        ConfigError: the trace holds none of these steps or ranks; the message says which it holds.
    """
    spans, shown = run.spans, shown_ranks(run, ranks)
    windows = {rank: step_windows(spans.of_rank(rank)) for rank in shown}
    numbers, bounds = windows[step_rank(run, shown)]
    first, last = step_range(run.id, numbers, steps)
    inside = [
        (bounds_, np.flatnonzero((numbers_ >= first) & (numbers_ < last))) for numbers_, bounds_ in windows.values()
    ]
    begin_s = min(bounds_[found[0]] for bounds_, found in inside if len(found))
    end_s = max(bounds_[found[-1] + 1] for bounds_, found in inside if len(found))
    table = spans.table
    visible_s = np.minimum(table["end_s"], end_s) - np.maximum(table["start_s"], begin_s)
    within = (table["start_s"] >= begin_s) & (table["end_s"] <= end_s)
    chosen = np.flatnonzero(
        np.isin(table["rank"], shown) & (within | (visible_s > MIN_SHOWN_SHARE * (end_s - begin_s)))
    )
    table = table[chosen]
    table["start_s"] = np.maximum(table["start_s"], begin_s) - begin_s
    table["end_s"] = np.minimum(table["end_s"], end_s) - begin_s
    starts = {
        int(step): float(at_s - begin_s) for step, at_s in zip(numbers, bounds, strict=False) if first <= step < last
    }
    return Window(chosen=chosen, table=table, bounds=starts, begin_s=float(begin_s), length_s=float(end_s - begin_s))


def usual_time(bounds: dict[int, float], length_s: float) -> tuple[float, float, dict[int, float]]:
    """Return begin and end of the longest stretch of usual steps, and the others: step -> multiple of the median.

    A step is unusual if it takes more than `OUTLIER` times the median. An axis over all steps would show the usual
    ones too small to read.

    Args:
        bounds: step -> its begin, ascending.
        length_s: end of the last step.

    >>> usual_time({0: 0.0, 1: 9.0, 2: 10.0, 3: 11.0}, 12.0)
    (9.0, 12.0, {0: 9.0})
    """
    begins = np.array(list(bounds.values()))
    ends = np.append(begins[1:], length_s)
    lengths = ends - begins
    median_s = float(np.median(lengths)) if len(lengths) else 0.0
    unusual = lengths > OUTLIER * median_s
    if len(lengths) < MIN_JUDGED or not unusual.any() or median_s <= 0:
        return 0.0, length_s, {}
    edges = np.flatnonzero(np.diff(np.concatenate([[True], unusual, [True]]).astype(np.int8)))
    stretches = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    first, last = max(stretches, key=lambda ends_: ends_[1] - ends_[0])
    others = {
        step: round(float(length / median_s), 1)
        for step, length, far in zip(bounds, lengths, unusual, strict=True)
        if far
    }
    return float(begins[first]), float(ends[last - 1]), others


def step_range(name: str, numbers: NDArray[np.int64], steps: slice | None) -> tuple[int, int]:
    """Return the first step to show and the step after the last, out of a run's steps (S,); None: from the middle.

    Raises:
        ConfigError: the trace holds no step of the slice.
    """
    if not len(numbers):
        raise ConfigError(f"run {name} has no traced step: train with trace_steps=None, or a larger number")
    lowest, highest = int(numbers.min()), int(numbers.max())
    if steps is None:
        first = int(numbers[max(0, min(len(numbers) // 2, len(numbers) - NUM_STEPS))])
        return first, first + NUM_STEPS
    first = steps.start if steps.start is not None else lowest
    last = steps.stop if steps.stop is not None else highest + 1
    if steps.step not in (None, 1) or not np.any((numbers >= first) & (numbers < last)):
        raise ConfigError(
            f"{steps}: run {name} has a trace of steps {lowest} to {highest}; ask for some of those, such as "
            f"slice({lowest}, {highest + 1})"
        )
    return first, last


def lay_rows(spans: Spans, numbers: NDArray[np.int64]) -> Rows:
    """Place ranks from top to bottom, and in each rank the computing lanes first.

    Overlapping spans of a lane get further rows.

    The rows of a lane with several rows are lower than 1.

    Args:
        spans: the spans to place, (N,).
        numbers: number of each span's row within its lane, (N,).
    """
    table = spans.table
    keys = list(zip(table["rank"].tolist(), table["lane"].tolist(), numbers.tolist(), strict=True))
    depth: dict[tuple[int, int], int] = {}
    for rank, lane, number in keys:
        depth[rank, lane] = max(depth.get((rank, lane), 0), number + 1)
    order = in_order(depth, spans)
    places: dict[tuple[int, int, int], tuple[float, float]] = {}
    lanes, ends, top = [], [], 0.0
    for position, (rank, lane) in enumerate(order):
        num_rows = depth[rank, lane]
        height = 1.0 if num_rows == 1 else 0.6 if num_rows <= 3 else 0.4
        for number in range(num_rows):
            places[rank, lane, number] = (top + (number + 0.5) * height, height)
        lanes.append((top + num_rows * height / 2, rank, spans.lanes[lane]))
        top += num_rows * height
        if position + 1 == len(order) or order[position + 1][0] != rank:
            ends.append(top)
    spots = np.array([places[key] for key in keys], float).reshape(-1, 2)
    return Rows(center=spots[:, 0], height=spots[:, 1], lanes=tuple(lanes), ends=tuple(ends))


def computing_lanes(spans: Spans) -> set[int]:
    """Return the numbers of the lanes on which something computes."""
    return set(np.unique(spans.table["lane"][spans.is_kind(COMPUTE_KINDS)]).tolist())


def in_order(keys: Iterable[tuple[int, int]], spans: Spans) -> list[tuple[int, int]]:
    """Return pairs of rank and lane as they are drawn: by rank, computing lanes first, then by name."""
    computing = computing_lanes(spans)

    def by_place(key: tuple[int, int]) -> tuple[Any, ...]:
        words = re.split(r"(\d+)", spans.lanes[key[1]])  # stream 7 before stream 20
        computes = words[0].startswith("compute")
        return (
            key[0],
            not computes,
            key[1] not in computing,
            [(len(word) if word.isdigit() else 0, word) for word in words],
        )

    return sorted(keys, key=by_place)


def _in_tracks(table: NDArray[Any], computing: set[int]) -> NDArray[Any]:
    """Return a copy whose lanes are two tracks: 0 for lanes that compute, 1 for the others."""
    table = table.copy()
    table["lane"] = np.where(np.isin(table["lane"], list(computing)), 0, 1)
    return table


def _lay_folded(merged: MergedBars) -> Rows:
    """Place each rank in one row of two tracks. In a track of exact bars, an inner span is drawn over an outer one."""
    table = merged.table
    ranks, place = np.unique(table["rank"], return_inverse=True)
    track = FOLDED_HEIGHT / 2
    tops = place.reshape(-1) * FOLDED_HEIGHT + table["lane"] * track + track * (1 - FILLED) / 2
    center = tops + track * FILLED * (1 - (merged.low + merged.high) / 2)
    return Rows(
        center=center,
        height=track * (merged.high - merged.low),
        lanes=tuple((FOLDED_HEIGHT * (number + 0.5), int(rank), "") for number, rank in enumerate(ranks)),
        ends=tuple(FOLDED_HEIGHT * (number + 1) for number in range(len(ranks))),
    )


def _lay_merged(merged: MergedBars, names: tuple[str, ...]) -> Rows:
    """Place bars that share the height of their lane; a lane is as high as its rows."""
    table = merged.table
    ranks, rank = np.unique(table["rank"], return_inverse=True)
    lane = rank.reshape(-1) * len(names) + table["lane"]
    _, some = np.unique(lane * len(KINDS) + table["kind"], return_index=True)
    twice = np.append(some, some)  # in the first and in the last row of their lanes
    laid = lay_rows(Spans(table[twice], names), np.append(0 * some, merged.rows[some] - 1))
    top, bottom = np.full(len(ranks) * len(names), np.inf), np.zeros(len(ranks) * len(names))
    np.minimum.at(top, lane[twice], laid.center - laid.height / 2)
    np.maximum.at(bottom, lane[twice], laid.center + laid.height / 2)
    whole = (bottom - top)[lane]
    center = ((top + bottom) / 2)[lane] + whole * FILLED * (0.5 - (merged.low + merged.high) / 2)
    return Rows(center=center, height=whole * (merged.high - merged.low), lanes=laid.lanes, ends=laid.ends)
