"""Reading a rank's files, whole or cut off by a crash, and bringing its times to rank 0's clock."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from workbench.trace.recorder import SpanRow
from workbench.trace.spans import CODES, Spans


@final
@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One rank's trace as recorded: header, spans on its own clock, (at_s, offset_s) of its clock, unreadable lines."""

    header: dict[str, Any]
    spans: tuple[SpanRow, ...]
    clocks: tuple[tuple[float, float], ...]
    damaged: tuple[str, ...] = ()


def align(rank: int, trace: Trace) -> Spans:
    """The trace's spans with their times on rank 0's clock (offsets interpolated between those measured)."""
    spans = Spans.from_rows(rank, trace.spans)
    if trace.clocks:
        at_s, offset_s = np.array(sorted(trace.clocks)).T
        for column in ("start_s", "end_s"):
            spans.table[column] += np.interp(spans.table[column], at_s, offset_s)
    return spans


def trace_paths(folder: Path) -> dict[int, Path]:
    """rank -> its trace file."""
    return _paths(folder, "trace-%.jsonl")


def metrics_paths(folder: Path) -> dict[int, Path]:
    """rank -> its file of metrics."""
    return _paths(folder, "metrics-%.jsonl")


def read_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """rank -> what it wrote when it failed: rank, error, traceback."""
    found = {rank: _parse(path.read_text(errors="replace")) for rank, path in _paths(folder, "failed-%.json").items()}
    return {rank: failure for rank, failure in found.items() if isinstance(failure, dict)}


def read_trace(path: Path) -> Trace:
    """Read one rank's trace."""
    rows, damaged = read_lines(path, _is_trace_row)
    header = next((row for row in rows if isinstance(row, dict) and "clock" not in row), {})
    clocks = [row["clock"] for row in rows if isinstance(row, dict) and "clock" in row]
    return Trace(
        header,
        tuple(tuple(row) for row in rows if isinstance(row, list)),
        tuple((clock["at_s"], clock["offset_s"]) for clock in clocks),
        damaged,
    )


def read_events(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """rank -> its events, of the ranks that recorded any."""
    return {rank: read_lines(path, lambda row: isinstance(row, dict))[0] for rank, path in _paths(folder, "events-%.jsonl").items()}


def read_metrics(folder: Path) -> tuple[dict[int, list[dict[str, Any]]], tuple[str, ...]]:
    """rank -> rows of metrics, and the lines that could not be read."""
    metrics: dict[int, list[dict[str, Any]]] = {}
    damaged: list[str] = []
    for rank, path in metrics_paths(folder).items():
        metrics[rank], bad = read_lines(path, is_metrics_row)
        damaged.extend(bad)
    return metrics, tuple(damaged)


def read_lines(path: Path, is_row: Callable[[Any], bool]) -> tuple[list[Any], tuple[str, ...]]:
    """The JSON values of a file's lines, and "file, line n" of those that are none of ours.

    A last line without its end is what a crash, or a writer in the middle of its write, leaves: it is left out unsaid.
    """
    lines = path.read_bytes().decode(errors="replace").split("\n")
    lines.pop()  # behind the last line's end: nothing, or a line that was cut off
    rows, damaged = parse_lines(lines, is_row)
    return rows, tuple(f"{path.name}, line {number}" for number in damaged)


def parse_lines(lines: list[str], is_row: Callable[[Any], bool]) -> tuple[list[Any], list[int]]:
    """The lines' JSON values, and the numbers (from 1) of the lines that are none of ours."""
    try:  # one parse of all lines is five times faster than one parse a line
        rows = json.loads(f"[{','.join(lines)}]")
        if len(rows) == len(lines) and all(map(is_row, rows)):
            return rows, []
    except ValueError:
        pass
    rows, damaged = [], list[int]()
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if is_row(row):
            rows.append(row)
        else:
            damaged.append(number)
    return rows, damaged


def _parse(line: str) -> Any:
    """The line's JSON value; None for a damaged line."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def is_metrics_row(row: Any) -> bool:
    """Whether a JSON value is a row of metrics."""
    return isinstance(row, dict) and row.keys() >= {"step", "seconds", "samples", "bytes_sent"}


def _is_trace_row(row: Any) -> bool:
    if isinstance(row, list):
        return len(row) == 8 and row[0] in CODES
    return isinstance(row, dict) and ("clock" in row or "rank" in row)


def _paths(folder: Path, pattern: str) -> dict[int, Path]:
    """rank -> path of the files of that name, where % stands for the rank."""
    name = re.compile(re.escape(pattern).replace("%", r"(\d+)"))
    found = {int(match[1]): path for path in folder.iterdir() if (match := name.fullmatch(path.name))}
    return dict(sorted(found.items()))
