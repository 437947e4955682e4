"""Numbers of a run, from the lines of its record alone: nothing of the analysis under test is used."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any


def rows_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Each rank's rows of metrics."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("metrics-*.jsonl"))
    ]


def accuracy_of(folder: Path) -> float:
    """Of the last evaluation, of which each rank has judged a share."""
    last = [
        [row for row in rows if "evaluation" in row][-1]
        for rows in rows_of(folder)
        if any("evaluation" in row for row in rows)
    ]
    assert len({row["step"] for row in last}) == 1
    return float(sum(row["evaluation"]["correct"] for row in last) / sum(row["evaluation"]["judged"] for row in last))


def step_seconds_of(folder: Path) -> float:
    """The median over ranks and steps, but for a tenth of the steps, at most ten, at the beginning."""
    durations = []
    for rows in rows_of(folder):
        ends = [row["seconds"] for row in rows if "evaluation" not in row]
        first = min(max(1, len(ends) // 10), 10)
        durations += [ends[step] - ends[step - 1] for step in range(first, len(ends))]
    return median(durations)
