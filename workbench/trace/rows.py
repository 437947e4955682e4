"""Assign rows of a figure to overlapping spans of one lane."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sublanes(table: NDArray[Any]) -> NDArray[np.int64]:
    """Return, for each span of a table, the number of its row within its rank and lane, shape (N,).

    A span takes the lowest row that is free at its start. So a lane has as many rows as
    the largest number of spans that overlap at one time.
    """
    rows = np.zeros(len(table), np.int64)
    order = np.lexsort((table["start_s"], table["lane"], table["rank"]))
    ordered = table[order]
    starts, ends = ordered["start_s"], ordered["end_s"]
    same = (np.diff(ordered["rank"]) == 0) & (np.diff(ordered["lane"]) == 0)
    breaks = np.flatnonzero(~same) + 1
    firsts = [0, *breaks.tolist()] if len(table) else []
    lasts = [*breaks.tolist(), len(table)] if len(table) else []
    for first, last in zip(firsts, lasts, strict=True):
        if np.all(starts[first + 1 : last] >= ends[first : last - 1]):
            continue  # the common case: no span overlaps another
        free: list[int] = []
        busy: list[tuple[float, int]] = []  # (end, row)
        for position in range(first, last):
            while busy and busy[0][0] <= starts[position]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            row = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (ends[position], row))
            rows[order[position]] = row
    return rows
