"""Read a rank's files, complete or cut off by a crash, and convert their times to rank 0's clock."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from workbench.trace.columns import read_columns
from workbench.trace.files.text import BLOCK_BYTES, LINE_BYTES, open_file, parse_json, read_json, whole_lines
from workbench.trace.recorder import SpanRow
from workbench.trace.row_checks import is_event, is_metrics_row, is_trace_row
from workbench.trace.spans import Spans


@final
@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One rank's trace as recorded: header, spans on the rank's clock, clock measurements (at_s, offset_s), bad lines.

    Spans are rows in memory, or columns if they were read from a complete file.
    """

    header: dict[str, Any]
    spans: tuple[SpanRow, ...] | Spans
    clocks: tuple[tuple[float, float], ...]
    damaged: tuple[str, ...] = ()


def align(rank: int, trace: Trace) -> Spans:
    """Convert the trace's spans to rank 0's clock; offsets are interpolated between measurements."""
    spans = trace.spans
    spans = Spans(spans.table.copy(), spans.lanes) if isinstance(spans, Spans) else Spans.from_rows(rank, spans)
    if trace.clocks:
        at_s, offset_s = np.array(sorted(trace.clocks)).T
        for column in ("start_s", "end_s"):
            spans.table[column] += np.interp(spans.table[column], at_s, offset_s)
    return spans


def trace_paths(folder: Path) -> dict[int, Path]:
    """Return rank -> trace file."""
    return _paths(folder, "trace-%.jsonl")


def metrics_paths(folder: Path) -> dict[int, Path]:
    """Return rank -> metrics file."""
    return _paths(folder, "metrics-%.jsonl")


def read_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """Return rank -> failure record: rank, error, traceback. Empty if the folder was removed."""
    found = {}
    with suppress(FileNotFoundError):
        for rank, path in _paths(folder, "failed-%.json").items():
            with suppress(OSError, ValueError):
                found[rank] = read_json(path)
    return {rank: failure for rank, failure in found.items() if isinstance(failure, dict)}


def read_trace(path: Path, rank: int) -> Trace:
    """Read one rank's trace: by columns if `FileRecorder` wrote all its lines, otherwise line by line."""
    with suppress(MemoryError):  # reading line by line may need less memory
        with open_file(path) as file:
            noted, recorded = _parted(file.read())
        notes = [_parse(line) for line in noted.decode(errors="replace").split("\n")[:-1]]
        spans = read_columns(rank, recorded) if all(map(is_trace_row, notes)) else None
        if spans is not None:
            return _trace(notes, spans)
    noted = recorded = b""
    rows, damaged = read_lines(path, is_trace_row)
    notes = [row for row in rows if isinstance(row, dict)]
    return _trace(notes, tuple(tuple(row) for row in rows if isinstance(row, list)), damaged)


def _trace(notes: list[dict[str, Any]], spans: tuple[SpanRow, ...] | Spans, damaged: tuple[str, ...] = ()) -> Trace:
    header = next((note for note in notes if "clock" not in note), {})
    clocks = [note["clock"] for note in notes if "clock" in note]
    return Trace(header, spans, tuple((clock["at_s"], clock["offset_s"]) for clock in clocks), damaged)


def _parted(text: bytes) -> tuple[bytes, bytes]:
    """Split a trace into the lines that are JSON objects (header, clocks) and the others, each in order."""
    end, at = text.rfind(b"\n") + 1, 0
    notes, others = list[bytes](), list[bytes]()
    while at < end:
        first = at if text.startswith(b"{", at) else text.find(b"\n{", at, end) + 1 or end
        if first == end:
            break
        behind = text.index(b"\n", first) + 1
        others.append(text[at:first])
        notes.append(text[first:behind])
        at = behind
    return b"".join(notes), b"".join([*others, text[at:end]])


def read_events(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return rank -> events, for ranks that recorded any. Older runs name an event's task `strand`."""
    return {
        rank: [{**row, "task": row.pop("strand")} if "strand" in row else row for row in read_lines(path, is_event)[0]]
        for rank, path in _paths(folder, "events-%.jsonl").items()
    }


def read_metrics(folder: Path) -> tuple[dict[int, list[dict[str, Any]]], tuple[str, ...]]:
    """Return rank -> rows of metrics, and the lines that could not be read."""
    metrics: dict[int, list[dict[str, Any]]] = {}
    damaged: list[str] = []
    for rank, path in metrics_paths(folder).items():
        metrics[rank], bad = read_lines(path, is_metrics_row)
        damaged.extend(bad)
    return metrics, tuple(damaged)


def read_lines(path: Path, is_row: Callable[[Any], bool]) -> tuple[list[Any], tuple[str, ...]]:
    """Return the valid JSON values of a file's lines, and "file, line n" of the invalid ones.

    An incomplete last line is skipped silently: a crash leaves one, and so does a write in progress.
    """
    rows, damaged, before = [], list[str](), 0
    for lines in whole_lines(path):
        found, numbers = parse_lines([line or "" for line in lines], is_row)
        rows += found
        damaged += [f"{path.name}, line {before + number}" for number in numbers]
        before += len(lines)
    return rows, tuple(damaged)


def next_metrics_rows(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a rank's metrics in the next `BLOCK_BYTES` of a file that is being written.

    Args:
        path: the file.
        offset: where to begin, in bytes.

    Returns:
        The valid rows, and where to begin the next time: after the last complete line.
    """
    with open_file(path) as file:
        file.seek(offset)
        block = file.read(BLOCK_BYTES)
    whole = block[: block.rfind(b"\n") + 1]
    if not whole and len(block) > LINE_BYTES:
        whole = block  # no valid line is this long
    rows, _ = parse_lines(whole.decode(errors="replace").split("\n")[:-1], is_metrics_row)
    return rows, offset + len(whole)


def parse_lines(lines: list[str], is_row: Callable[[Any], bool]) -> tuple[list[Any], list[int]]:
    """Return the valid JSON values, and the numbers (from 1) of the invalid lines."""
    try:  # one parse of all lines is five times as fast as one for each line
        rows = json.loads(f"[{','.join(lines)}]")
        if len(rows) == len(lines) and all(map(is_row, rows)):
            return rows, []
    except (ValueError, RecursionError):
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
    """Return the line's JSON value; None for a damaged line."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def _paths(folder: Path, pattern: str) -> dict[int, Path]:
    """Return rank -> path of the files that match a pattern, with % in the place of the rank."""
    name = re.compile(re.escape(pattern).replace("%", r"([0-9]{1,9})"))
    with os.scandir(folder) as entries:
        found = {
            int(match[1]): folder / entry.name
            for entry in entries
            if (match := name.fullmatch(entry.name)) and entry.is_file()
        }
    return dict(sorted(found.items()))
