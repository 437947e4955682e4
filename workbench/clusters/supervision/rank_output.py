"""What a rank of a cluster writes into the run's folder in addition to its record: its output, and how it ended.

An engine that trains answers no request, and a closed notebook receives no answer. Files in the run's folder can be
read at any time, on every host that shares the folder. The heartbeat itself is written by
`runtimes.liveness.failure_detector`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any, Literal, TextIO, final

from workbench.runtimes.liveness.failure_detector import read_heartbeat, state_of, step_under_way
from workbench.trace.files.atomic import write_atomic

SILENT_S = 5.0  # a rank without a heartbeat for this long does not run, or its host cannot be reached
ROUTINE = "Handling apply_request"  # an engine logs this line for every request
RANK = re.compile(r"\[\d+\] ")
TAIL_LINES = 20  # of a log, for an error message


def output_name(rank: int) -> str:
    """Name of the file with a rank's output."""
    return f"output-{rank:05d}.log"


def end_name(rank: int) -> str:
    """Name of the file of a rank's end: its result, or its error."""
    return f"ended-{rank:05d}.json"


def first_line(training: str) -> str:
    """Line that a rank writes into the engines' log when it begins to train."""
    return f"training {training} begins"


def lines_since(lines: list[str], training: str, *, of_ranks: bool) -> list[str]:
    """Return the engines' log since a training began, without routine lines; for "", since the engines' start.

    >>> lines_since(["[0] old", "[0] training a begins", "[0] new", "[1] old", "[1] training a begins"], "a", of_ranks=True)
    ['[0] new']

    Args:
        of_ranks: whether each line begins with its rank.
    """
    begun: set[str] = set()
    kept = []
    for line in lines:
        found = RANK.match(line) if of_ranks else None
        whose = found[0] if found else ""
        if training and line.endswith(first_line(training)):
            begun.add(whose)
        elif (whose in begun or not training) and line.removeprefix(whose).strip() and ROUTINE not in line:
            kept.append(line)
    return kept


def last_lines(lines: list[str], *, of_ranks: bool) -> list[str]:
    """Return the last lines of a log. If each line begins with its rank, they are shared among the ranks.

    >>> last_lines(["[0] the cause", *(f"[1] {number}" for number in range(100))], of_ranks=True)[:2]
    ['[0] the cause', '[1] 90']
    """
    if not of_ranks:
        return lines[-TAIL_LINES:]
    found: dict[str, list[str]] = {}
    for line in lines:
        match = RANK.match(line)
        found.setdefault(match[0] if match else "", []).append(line)
    each = max(1, TAIL_LINES // max(1, len(found)))
    return [line for mine in found.values() for line in mine[-each:]]


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_atomic(path, json.dumps(content, indent=1))


def state_of_rank(folder: Path, rank: int) -> Literal["training", "stopped", "silent", "gone"] | None:
    """State of a rank, from its process on this machine or its heartbeat elsewhere; None if it is not in the run."""
    row = read_heartbeat(folder, rank)
    if row is None:
        return None
    state = state_of(row)
    if state in ("stopped", "gone"):
        return state
    return "silent" if row["silent_s"] > SILENT_S else "training"


def describe_ranks(folder: Path, num_ranks: int) -> str:
    """States of all ranks, as text.

    "rank 1 is stopped (SIGSTOP: kill -CONT 4711 on h continues it) at step 17; rank 0 is alive at step 17".
    """
    parts = []
    for rank in range(num_ranks):
        state, row = state_of_rank(folder, rank), read_heartbeat(folder, rank)
        if row is None:
            continue
        words = {
            "stopped": f"stopped (SIGSTOP: kill -CONT {row['pid']} on {row['host']} continues it)",
            "gone": "gone",
            "silent": f"without a heartbeat for {row['silent_s']:.0f} s",
        }.get(state or "", "alive")
        parts.append((words == "alive", f"rank {rank} is {words} at step {step_under_way(folder, rank)}"))
    return "; ".join(words for _, words in sorted(parts))


@final
class CapturedOutput:
    """Write a rank's output to a file while it trains, then record its end. The caller sets `summary`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.summary: dict[str, Any] = {}
        self._output: TextIO | None = None
        self._streams = (sys.stdout, sys.stderr)

    def __enter__(self) -> CapturedOutput:
        self._output = (self._folder / output_name(self._rank)).open("a", buffering=1, errors="replace")
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = self._output
        with contextlib.suppress(OSError):
            os.write(2, f"{first_line(self._folder.name)}\n".encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        sys.stdout, sys.stderr = self._streams
        if self._output is not None:
            self._output.close()
        end: dict[str, Any] = {"summary": self.summary}
        if kind is not None:
            said = "".join(traceback.format_exception(error))
            end = {"ename": kind.__name__, "evalue": str(error), "traceback": said}
        with contextlib.suppress(OSError):  # the folder was removed
            write_whole(self._folder / end_name(self._rank), end)
