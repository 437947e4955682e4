"""Read the last steps of a run only: for a running training, and for a rank that was replaced by a new process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.trace.read import Trace, parse_lines, trace_paths
from workbench.trace.row_checks import is_metrics_row, is_note, is_span
from workbench.trace.run import Run
from workbench.trace.store import read_info

TAIL_BYTES = 128 * 1024  # of each rank's trace: more than a thousand spans
ROW_BYTES = 8192  # of a rank's metrics, for its newest row: tens of rows
HEAD_BYTES = 4096  # holds the header and the first clock measurement


def read_tail(folder: Path | str, tail_bytes: int = TAIL_BYTES) -> Run:
    """Return the run with the newest spans of each rank that is still in it, without metrics.

    Args:
        folder: the run's folder.
        tail_bytes: bytes to read from the end of each rank's trace. An incomplete first line is skipped.

    Raises:
        RunNotFound: the folder holds no readable run.
    """
    folder = Path(folder)
    info = read_info(folder)
    paths = trace_paths(folder)
    there = Run(info=info, metrics={}).ranks_at(sys.maxsize, set(paths))  # those that left have old spans
    return Run(
        info=info, metrics={}, traces={rank: _tail(path, tail_bytes) for rank, path in paths.items() if rank in there}
    )


def last_step_row(path: Path) -> dict[str, Any] | None:
    """Return the newest step row of a rank's metrics; None if there is none near the end of the file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - ROW_BYTES))
            rows = _rows(file.read(), is_metrics_row)
    except OSError:
        return None
    return next((row for row in reversed(rows) if "evaluation" not in row), None)


def _tail(path: Path, tail_bytes: int) -> Trace:
    with path.open("rb") as file:
        begin = max(0, file.seek(0, 2) - tail_bytes)
        file.seek(0)
        head = file.read(min(HEAD_BYTES, begin))
        file.seek(begin)
        tail = file.read()
    if begin:  # in the middle of a line
        tail = tail[tail.find(b"\n") + 1 :]
    notes = [*_rows(head, is_note), *_rows(tail, is_note)]
    clocks = tuple((note["clock"]["at_s"], note["clock"]["offset_s"]) for note in notes if "clock" in note)
    return Trace(
        next((note for note in notes if "clock" not in note), {}), tuple(map(tuple, _rows(tail, is_span))), clocks
    )


def _rows(text: bytes, is_row: Callable[[Any], bool]) -> list[Any]:
    """Return the rows of one kind in a text; incomplete lines are skipped."""
    rows, _ = parse_lines(text.decode(errors="replace").split("\n")[:-1], lambda row: isinstance(row, dict | list))
    return list(filter(is_row, rows))
