"""What the browser gets of runs: columns of spans, links between them, critical paths, as JSON."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.critical import critical_path
from workbench.analysis.labels import distinct_labels
from workbench.analysis.overlap import step_windows
from workbench.analysis.summary import trace_coverage
from workbench.analysis.table import Table
from workbench.errors import ConfigError
from workbench.plots.gantt.layout import (
    MAX_RANKS,
    NUM_STEPS,
    Window,
    computing_lanes,
    in_order,
    shown_ranks,
    step_range,
    step_rank,
    usual_time,
    window,
)
from workbench.plots.style import KIND_COLORS
from workbench.plots.trace_viewer.difference import step_difference
from workbench.trace.kinds import CODES, COMMUNICATION_KINDS, COMPUTE_KINDS, KINDS
from workbench.trace.links import collective_numbers
from workbench.trace.rows import sublanes
from workbench.trace.run import Run, as_runs
from workbench.trace.spans import Spans

MAX_SPANS = 100_000  # in a browser, of all runs together
CLEAR_LINKS = 120  # with more messages, links are off at first

Steps = slice | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What the browser gets.

    Attributes:
        content: JSON values.
        difference: how the steps of two runs differ; None for one run.
    """

    content: dict[str, Any]
    difference: Table | None


def payload(
    runs: Sequence[Run],
    steps: Steps = None,
    ranks: Iterable[int] | None = None,
    *,
    critical: bool = True,
    names: Sequence[str] | None = None,
    max_spans: int = MAX_SPANS,
    newest: bool = False,
) -> Payload:
    """Return the timelines of one or two runs for the browser.

    Args:
        runs: one or two runs with traces.
        steps: slice(first, one after the last); None for those from the middle that fit.
        ranks: which ranks; None for all.
        critical: include the critical path of each step.
        names: titles of the runs; None: their algorithms, and what distinguishes them.
        max_spans: largest number of spans of all runs together. Fewer steps are shown if they have more, but at least one.
        newest: whether the run trains: the viewer follows its newest steps.

    Raises:
        ConfigError: there are no runs or more than two, or a trace holds none of these steps.
    """
    runs = as_runs(runs)
    if not 1 <= len(runs) <= 2:
        raise ConfigError(f"{len(runs)} runs: give one, or two to compare")
    labels = distinct_labels(runs) if names is None else list(names)
    chosen = None if ranks is None else list(ranks)
    windows = [_fitting(run, steps, chosen, max_spans // len(runs)) for run in runs]
    content: dict[str, Any] = {
        "kinds": list(KINDS),
        "colors": [KIND_COLORS[kind] for kind in KINDS],
        "compute": [CODES[kind] for kind in COMPUTE_KINDS],
        "communicate": [CODES[kind] for kind in COMMUNICATION_KINDS],
        "foldedFrom": MAX_RANKS + 1,
        "clearLinks": CLEAR_LINKS,
        "live": newest,
        "runs": [
            _one(run, found, label, critical=critical) for run, found, label in zip(runs, windows, labels, strict=True)
        ],
    }
    table = None
    if len(runs) == 2:
        kept = [run.spans if chosen is None else run.spans.select(ranks=chosen) for run in runs]
        table = step_difference(kept[0], kept[1], (_slice(windows[0]), _slice(windows[1])), (labels[0], labels[1]))
        content["difference"] = {
            "caption": table.caption,
            "titles": [column.title for column in table.columns],
            "cells": table.cells(),
            "notes": list(table.footnotes),
        }
    return Payload(content=content, difference=table)


def _slice(found: Window) -> slice:
    return slice(min(found.bounds), max(found.bounds) + 1)


def _fitting(run: Run, steps: Steps, ranks: Sequence[int] | None, most: int) -> Window:
    """Return the window of as many of these steps as have at most `most` spans, and at least one."""
    shown = shown_ranks(run, ranks)
    numbers, _ = step_windows(run.spans.of_rank(step_rank(run, shown)))
    if steps is None:
        step_range(run.id, numbers, None)  # refuses a run without steps
        first, last = int(numbers.min()), int(numbers.max()) + 1
    else:
        first, last = step_range(run.id, numbers, steps)
        first, last = max(first, int(numbers.min())), min(last, int(numbers.max()) + 1)
    table = run.spans.table
    inside = (table["step"] >= first) & (table["step"] < last) & np.isin(table["rank"], shown)
    counts = np.bincount(table["step"][inside] - first, minlength=last - first)
    if counts.sum() > most:
        if steps is None:  # from the middle, as a figure does
            first = max(first, (first + last) // 2 - max(NUM_STEPS, most // max(1, int(counts.mean()))) // 2)
            counts = counts[first - int(numbers.min()) :]
        fitting = int(np.searchsorted(np.cumsum(counts), most, side="right"))
        last = first + max(1, fitting)
    return window(run, slice(first, last), ranks)


def _one(run: Run, found: Window, label: str, *, critical: bool) -> dict[str, Any]:
    """Return one run's rows, steps and columns."""
    table, spans = found.table, run.spans
    rows, row = _rows(table, spans)
    place = np.full(len(spans), -1, np.int64)  # of each span of the run in the window
    place[found.chosen] = np.arange(len(table))
    sent, received = (place[side] for side in run.messages)
    linked = (sent >= 0) & (received >= 0) & (table["rank"][sent] != table["rank"][received])
    numbers = spans.table["step"][spans.table["step"] >= 0]
    content: dict[str, Any] = {
        "name": label,
        "id": run.id,
        "note": trace_coverage(run) if run.metrics else _recorded_coverage(run),
        "rows": rows,
        "steps": list(found.bounds),
        "begins": list(found.bounds.values()),
        "length": found.length_s,
        **_at_first(found),
        "traced": [int(numbers.min()), int(numbers.max())] if len(numbers) else [],
        "columns": {
            "row": _packed(row, "<u2"),
            "kind": _packed(table["kind"], "<u1"),
            "start": _packed(table["start_s"], "<f8"),
            "end": _packed(table["end_s"], "<f8"),
            "step": _packed(table["step"], "<i4"),
            "bucket": _packed(table["bucket"], "<i4"),
            "bytes": _packed(table["bytes"], "<f8"),
            "peer": _packed(table["peer"], "<i4"),
            "group": _packed(collective_numbers(table), "<i4"),
            "sent": _packed(sent[linked], "<i4"),
            "received": _packed(received[linked], "<i4"),
        },
    }
    if critical:
        shown = np.isin(spans.table["rank"], np.unique(table["rank"]))
        path = critical_path(Spans(spans.table[shown], spans.lanes), _slice(found))
        span = np.where(path.span >= 0, place[np.flatnonzero(shown)[np.maximum(path.span, 0)]], -1)
        cut = (np.clip(times - found.begin_s, 0, found.length_s) for times in (path.start_s, path.end_s))
        columns = dict(
            zip(
                ("step", "rank", "kind", "start", "end", "span"),
                (path.step, path.rank, path.kind, *cut, span),
                strict=True,
            )
        )
        content["path"] = {
            name: _packed(column, "<f8" if name in ("start", "end") else "<i4") for name, column in columns.items()
        }
    return content


def _recorded_coverage(run: Run) -> str:
    """Return what a run that trains has noted, if its trace will not cover all steps: its newest steps may be old."""
    notes = [note for note in run.info.get("notes") or () if isinstance(note, str)]
    return next((note for note in notes if note.startswith("the trace holds the first")), "")


def _rows(table: NDArray[Any], spans: Spans) -> tuple[list[dict[str, Any]], NDArray[np.int64]]:
    """Return the rows from top to bottom, and the row of each span, shape (N,).

    Spans of a lane that overlap are in further rows.
    """
    sub = sublanes(table)
    keys = list(zip(table["rank"].tolist(), table["lane"].tolist(), sub.tolist(), strict=True))
    depth: dict[tuple[int, int], int] = {}
    for rank, lane, number in set(keys):
        depth[rank, lane] = max(depth.get((rank, lane), 0), number + 1)
    computing = computing_lanes(Spans(table, spans.lanes))
    rows, places = list[dict[str, Any]](), dict[tuple[int, int, int], int]()
    for rank, lane in in_order(depth, Spans(table, spans.lanes)):
        for number in range(depth[rank, lane]):
            places[rank, lane, number] = len(rows)
            thin = depth[rank, lane] > 1
            rows.append(
                {"rank": rank, "lane": spans.lanes[lane], "number": number, "computes": lane in computing, "thin": thin}
            )
    return rows, np.array([places[key] for key in keys], np.int64)


def _at_first(found: Window) -> dict[str, Any]:
    """Return the time that is shown at first, and the unusual steps that it avoids."""
    begin_s, end_s, unusual = usual_time(found.bounds, found.length_s)
    begins = [at_s for at_s in found.bounds.values() if begin_s <= at_s < end_s]
    if len(begins) > NUM_STEPS:  # as many as a figure shows
        first = (len(begins) - NUM_STEPS) // 2
        begin_s, end_s = begins[first], begins[first + NUM_STEPS]
    return {"window": [begin_s, end_s], "unusual": [[step, times] for step, times in unusual.items()]}


def _packed(column: NDArray[Any], kind: str) -> str:
    """Return numbers as little-endian bytes, compressed, in base64."""
    return base64.b64encode(gzip.compress(column.astype(kind).tobytes(), 3, mtime=0)).decode()
