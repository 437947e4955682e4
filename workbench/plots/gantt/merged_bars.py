"""Fewer bars than spans.

Where a lane's column is too narrow to show single spans, each kind has one bar, as high as its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.trace.kinds import KINDS

COLUMNS = 1 << 10  # largest number of columns in the window: about one for each pixel
WIDENING = 1.2  # columns are widened by this factor until there are few enough bars
# a span above this multiple of its kind's median and this share of the window is drawn alone,
LONG, VISIBLE = 3.0, 1e-3
LONG_SHARE = 0.25  # up to this share of the bars, the longest first
ROUNDING = 1e-6  # of a row, or a column
SHORTEST_S = 1e-12  # of a window: in a simulation without times, all spans are at one time

IntArray = NDArray[np.int64]
Floats = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedBars:
    """Bars, and the spans that each bar merges.

    Attributes:
        table: (B,) span table. A bar of several spans has the bytes of all, and the step of the first span that begins
            in it.
        counts: (B,) how many spans begin in each bar; 0 if all began in an earlier column.
        spans_s: (B,) total time of its spans within the bar.
        last_step: (B,) step of the last span that begins in it.
        low, high: (B,) its place in the height of its lane, from 0 at the bottom to 1. `high - low` is `spans_s`,
            divided by the bar's length and by `rows`. They are 0 and 1 if each bar is one span in its own row.
        rows: (B,) number of rows of its lane: the mean number of concurrent spans in the fullest column of any rank.
        place: (N,) the bar in which each span begins.
    """

    table: NDArray[Any]
    counts: IntArray
    spans_s: Floats
    last_step: IntArray
    low: Floats
    high: Floats
    rows: IntArray
    place: IntArray


def merge_bars(table: NDArray[Any], most: int, length_s: float) -> MergedBars:
    """Join spans into at most `most` bars, if that is possible with one bar for each kind of a lane.

    The time of each lane is cut into columns of equal width. In each column every kind has one bar as wide as the
    column. Its height is the share of its spans, so its area is their time. In a lane without concurrent spans, a span
    that is much longer than others of its kind is drawn alone. It cuts its column in two.

    Args:
        table: (N,) span table, with times since the window's begin.
        most: largest number of bars; with at most this many spans, each is a bar.
        length_s: length of the window.
    """
    if len(table) <= most:
        return _as_they_are(table)
    length_s = max(length_s, SHORTEST_S)
    _, rank = np.unique(table["rank"], return_inverse=True)
    lane = rank.reshape(-1) * (int(table["lane"].max()) + 1) + table["lane"]
    order = np.lexsort((table["start_s"], lane))
    lane, kind = lane[order], table["kind"][order].astype(np.int64)
    start_s, end_s = table["start_s"][order], table["end_s"][order]
    crowded = lane[1:][(np.diff(lane) == 0) & (start_s[1:] < end_s[:-1])]
    long = _long(kind, end_s - start_s, ~np.isin(lane, crowded), int(most * LONG_SHARE), length_s)
    columns = _num_columns(lane, kind, start_s, end_s, most, length_s)
    while True:
        parts = list(_lanes(lane, kind, start_s, end_s, long, np.linspace(0.0, length_s, columns + 1)))
        if sum(len(part.kind) for part in parts) <= most or columns == 1:
            break
        columns = max(1, int(columns / WIDENING))
    begin_s, until_s, spans_s, first, last, begun = (
        np.concatenate(column) for column in zip(*(part.columns for part in parts), strict=True)
    )
    made = table[order[first]]
    made["start_s"], made["end_s"] = begin_s, until_s
    made["bytes"] = np.bincount(begun, table["bytes"][order], len(made)).astype(np.int64)
    place = np.empty(len(order), np.int64)
    place[order] = begun
    least_s = ROUNDING * length_s / COLUMNS  # smallest gap between a long span and the next column
    share = np.where(until_s - begin_s > least_s, spans_s / np.maximum(until_s - begin_s, least_s), 0.0)
    cell = np.flatnonzero(np.append(True, (np.diff(lane[first]) != 0) | (np.diff(begin_s) != 0)))
    rows = np.ones(int(table["lane"].max()) + 1)  # equal on all ranks, so that they can be compared
    np.maximum.at(rows, made["lane"][cell], np.ceil(np.add.reduceat(share, cell) - ROUNDING))
    share /= rows[made["lane"]]
    below = np.cumsum(share) - share
    low = below - np.repeat(below[cell], np.diff(np.append(cell, len(made))))
    return MergedBars(
        table=made,
        counts=np.bincount(begun, minlength=len(made)),
        spans_s=spans_s,
        last_step=table["step"][order[last]],
        low=np.clip(low, 0.0, 1.0),
        high=np.clip(low + share, 0.0, 1.0),
        rows=rows[made["lane"]].astype(np.int64),
        place=place,
    )


def _as_they_are(table: NDArray[Any]) -> MergedBars:
    """Return a bar for each span."""
    return MergedBars(
        table=table,
        counts=np.ones(len(table), np.int64),
        spans_s=table["end_s"] - table["start_s"],
        last_step=table["step"],
        low=np.zeros(len(table)),
        high=np.ones(len(table)),
        rows=np.ones(len(table), np.int64),
        place=np.arange(len(table)),
    )


def _long(kind: IntArray, lengths_s: Floats, alone: NDArray[np.bool_], most: int, length_s: float) -> NDArray[np.bool_]:
    """Return which spans of lanes without concurrent spans are unusually long, shape (N,)."""
    usual_s = np.zeros(len(KINDS))
    for code in np.unique(kind).tolist():
        usual_s[code] = np.median(lengths_s[kind == code])
    chosen = np.flatnonzero(alone & (lengths_s > np.maximum(LONG * usual_s, VISIBLE * length_s)[kind]))
    found = np.zeros(len(kind), bool)
    found[chosen[np.argsort(-lengths_s[chosen], kind="stable")[:most]]] = True
    return found


def _num_columns(lane: IntArray, kind: IntArray, start_s: Floats, end_s: Floats, most: int, length_s: float) -> int:
    """Return the largest number of columns that needs at most `most` bars, by the kinds of spans in each column."""
    fine = np.append(start_s, end_s) / length_s * COLUMNS
    cell = np.append(lane, lane) * COLUMNS + np.clip(fine, 0, COLUMNS - 1).astype(np.int64)
    there = np.zeros((int(lane.max()) + 1) * COLUMNS, np.int64)
    for code in np.unique(kind).tolist():
        there[cell[np.append(kind, kind) == code]] |= 1 << code
    kinds = there.reshape(-1, COLUMNS)
    columns = COLUMNS
    while columns > 1:
        begins = np.unique(np.arange(columns) * COLUMNS // columns)
        found = np.bitwise_or.reduceat(kinds, begins, axis=1)
        if sum(int(np.count_nonzero(found & (1 << code))) for code in range(len(KINDS))) <= most:
            break
        columns = int(columns / WIDENING)
    return max(columns, 1)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """The bars of one lane, by column and kind, and the bar in which each of its spans begins, over all lanes."""

    kind: IntArray
    begin_s: Floats
    end_s: Floats
    spans_s: Floats
    first: IntArray
    last: IntArray
    begun: IntArray

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.begin_s, self.end_s, self.spans_s, self.first, self.last, self.begun


def _lanes(
    lane: IntArray, kind: IntArray, start_s: Floats, end_s: Floats, long: NDArray[np.bool_], grid: Floats
) -> Iterator[_Lane]:
    """Yield the bars of each lane; spans are sorted by lane, then by start."""
    begins = np.flatnonzero(np.append(True, np.diff(lane) != 0)).tolist()
    num_bars = 0
    for first, behind in zip(begins, [*begins[1:], len(lane)], strict=True):
        mine = slice(first, behind)
        apart = long[mine]
        edges = np.unique(np.concatenate([grid, start_s[mine][apart], end_s[mine][apart]])) if apart.any() else grid
        left = np.clip(np.searchsorted(edges, start_s[mine], side="right") - 1, 0, len(edges) - 2)
        right = np.clip(np.searchsorted(edges, end_s[mine], side="left") - 1, left, len(edges) - 2)
        right = np.where(apart, left, right)  # one bar, even across columns
        num_parts = right - left + 1
        span = np.repeat(np.arange(len(left)), num_parts)
        begun = np.cumsum(num_parts) - num_parts  # the first part of each span
        column = left[span] + np.arange(len(span)) - begun[span]
        part_s = np.minimum(end_s[mine][span], edges[column + 1]) - np.maximum(start_s[mine][span], edges[column])
        part_s = np.where(apart[span], (end_s[mine] - start_s[mine])[span], part_s)
        # a span of length 0 may begin with a long one
        key = (2 * column + apart[span]) * len(KINDS) + kind[mine][span]
        there = np.asarray(np.flatnonzero(np.bincount(key)), np.int64)
        bar = np.searchsorted(there, key)
        spans_s = np.asarray(np.bincount(bar, part_s, len(there)), np.float64)
        one, other = np.zeros(len(there), np.int64), np.zeros(len(there), np.int64)
        other[bar], one[bar[::-1]] = span, span[::-1]  # for repeated places the last one wins
        end_of = np.where(apart[one], end_s[mine][one], edges[there // len(KINDS) // 2 + 1])
        yield _Lane(
            there % len(KINDS),
            edges[there // len(KINDS) // 2],
            end_of,
            spans_s,
            one + first,
            other + first,
            bar[begun] + num_bars,
        )
        num_bars += len(there)
