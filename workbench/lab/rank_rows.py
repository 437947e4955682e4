"""The ranks of a run or a cluster as rows: what each one does and uses, and which one delays the others.

A rank that trains writes a heartbeat into the run's folder each second, so this works for ranks on other machines that
share the folder. An idle rank of a cluster writes none: its process is looked up, if it is on this machine.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, final

import psutil

from workbench.clusters.supervision.rank_output import end_name, state_of_rank
from workbench.clusters.supervision.registry import Entry
from workbench.errors import RunNotFound
from workbench.runtimes.liveness.failure_detector import read_heartbeat
from workbench.runtimes.liveness.watchdog import describe_place
from workbench.trace.files.text import open_file, parse_json
from workbench.trace.kinds import COMPUTE_KINDS
from workbench.trace.processes import OVER, with_true_status
from workbench.trace.read import parse_lines
from workbench.trace.recorder import metrics_name, trace_name
from workbench.trace.row_checks import is_metrics_row, is_span
from workbench.trace.store import read_info

METRICS_BYTES, TRACE_BYTES = 8 * 1024, 64 * 1024  # from the end of a rank's files: tens of steps
HEAD_BYTES = 4096
MIN_BEHIND, SHARE_BEHIND = 10, 0.05  # steps behind the median, and as a share of it, that are more than chance
SLOW_RATIO = 1.25  # of a rank's computation to the median of the others
OLD_STEPS = 200  # a trace that ended longer ago says nothing about now
STALLED_S = 3.0  # a rank that wrote no step for this long, and three steps, sends nothing

FIELDS = (
    "rank host pid device state does step beat_s cpu_cores memory_bytes sent_bytes_per_s gpu compute_s waits straggler"
)
EMPTY: dict[str, Any] = dict.fromkeys(FIELDS.split())


@final
class RankRows:
    """Rows of ranks. It keeps the processes of idle ranks, because a share of a core is measured between two calls."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._processes: dict[int, psutil.Process] = {}

    def of_run(self, folder: Path) -> dict[str, Any]:
        """Return {"ranks": rows, "run": name, "status": the run's}.

        Raises:
            RunNotFound: there is no such run.
        """
        info = with_true_status(folder, read_info(folder))
        over = info.get("status") in OVER
        rows = [_row_of_rank(folder, rank, over=over) for rank in range(int(info.get("num_workers") or 0))]
        _mark_stragglers(rows, live=info.get("status") == "running")
        return {"ranks": rows, "run": folder.name, "status": info.get("status")}

    def of_cluster(self, entry: Entry) -> dict[str, Any]:
        """Return {"ranks": rows, "run": name of the training or None, "status": the training's or None}."""
        ranks = (entry.detached or entry.record).get("ranks") or []
        found: dict[str, Any] = {"ranks": [], "run": None, "status": None}
        if entry.record.get("run"):
            with suppress(RunNotFound):
                found = self.of_run(Path(entry.record["run"]))
        training = found["status"] not in (None, *OVER)
        rows = []
        for rank, process in enumerate(ranks):
            trained = found["ranks"][rank] if rank < len(found["ranks"]) else {}
            busy = training and trained.get("state") not in (None, "ended")
            rows.append(trained if busy else {**EMPTY, "rank": rank, **self._idle(process)})
        return {**found, "ranks": rows}

    def _idle(self, process: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an idle rank uses; only its host and process if that is on another machine."""
        row: dict[str, Any] = {"host": process["host"], "pid": process["pid"]}
        if process["host"] != socket.gethostname():
            return {**row, "state": "idle"}
        try:
            with self._lock:
                known = self._processes.setdefault(process["pid"], psutil.Process(process["pid"]))
                if not known.is_running():  # another process has its number, or none
                    raise psutil.NoSuchProcess(process["pid"])
                share = known.cpu_percent()
                held = known.memory_info().rss
            return {**row, "state": "idle", "cpu_cores": share / 100, "memory_bytes": int(held)}
        except psutil.Error:
            self._processes.pop(process["pid"], None)
            return {**row, "state": "gone"}


def _row_of_rank(folder: Path, rank: int, *, over: bool) -> dict[str, Any]:
    """Return what a rank has written into the run's folder."""
    row: dict[str, Any] = {**EMPTY, "rank": rank, **_header(folder / trace_name(rank))}
    steps, age_s = _newest_steps(folder / metrics_name(rank))
    if steps:
        row["step"] = steps[-1]["step"] + 1
    beat = read_heartbeat(folder, rank)
    if over or beat is None or (folder / end_name(rank)).exists():
        row["state"] = "ended" if over or steps else "starting"
        return row
    row |= {name: beat[name] for name in ("host", "pid", "cpu_cores", "memory_bytes", "gpu", "waits")}
    row |= {
        "state": state_of_rank(folder, rank) or "training",
        "does": describe_place(beat),
        "beat_s": beat["silent_s"],
    }
    row["sent_bytes_per_s"] = _sent_per_s(steps, age_s)
    row["compute_s"] = _compute_s(folder / trace_name(rank), row["step"] or 0)
    return row


def _header(path: Path) -> dict[str, Any]:
    """Return host, process and device from the first line of a rank's trace."""
    with suppress(OSError, ValueError), open_file(path) as file:
        header = parse_json(file.read(HEAD_BYTES).partition(b"\n")[0])
        if isinstance(header, dict):
            return {name: header.get(name) for name in ("host", "pid", "device")}
    return {}


def _tail(path: Path, num_bytes: int) -> list[str]:
    """Return the complete lines in the last bytes of a file; none if it cannot be read."""
    with suppress(OSError), open_file(path) as file:
        begin = max(0, file.seek(0, 2) - num_bytes)
        file.seek(begin)
        lines: list[str] = file.read(num_bytes).decode(errors="replace").split("\n")
        return lines[1 if begin else 0 : -1]
    return []


def _newest_steps(path: Path) -> tuple[list[dict[str, Any]], float]:
    """Return the newest step rows of a rank's metrics, and the seconds since the file was written."""
    rows, _ = parse_lines(_tail(path, METRICS_BYTES), is_metrics_row)
    age_s = 0.0
    with suppress(OSError):
        age_s = time.time() - path.stat().st_mtime
    return [row for row in rows if "evaluation" not in row], age_s


def _sent_per_s(steps: Sequence[Mapping[str, Any]], age_s: float) -> float | None:
    """Return the bytes per second that a rank sent in its newest steps; None before its second step."""
    if len(steps) < 2 or steps[-1]["seconds"] <= steps[0]["seconds"]:
        return None
    duration_s = steps[-1]["seconds"] - steps[0]["seconds"]
    if age_s > STALLED_S + 3 * duration_s / (len(steps) - 1):
        return 0.0
    return float((steps[-1]["bytes_sent"] - steps[0]["bytes_sent"]) / duration_s)


def _compute_s(path: Path, step: int) -> float | None:
    """Return the median seconds of computation in the newest traced steps; None if they are not of now."""
    rows, _ = parse_lines(_tail(path, TRACE_BYTES), lambda row: isinstance(row, list | dict))
    seconds: dict[int, float] = {}
    for kind, _lane, start_s, end_s, at, *_ in filter(is_span, rows):
        if kind in COMPUTE_KINDS:
            seconds[at] = seconds.get(at, 0.0) + end_s - start_s
    if not seconds or max(seconds) < step - OLD_STEPS:
        return None
    # The first step of the tail may be cut, and the last one may not have ended.
    whole = [seconds[at] for at in sorted(seconds)[1:-1]] or list(seconds.values())
    return statistics.median(whole)


def _mark_stragglers(rows: Sequence[dict[str, Any]], *, live: bool) -> None:
    if live:
        for rank, reason in stragglers(rows).items():
            rows[rank]["straggler"] = reason


def stragglers(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the ranks that delay the others, each with its reason.

    Args:
        rows: in order of rank; of each, `state`, `step`, `compute_s` and `waits` are read.

    >>> rows = [{"state": "training", "step": 90, "compute_s": seconds, "waits": None} for seconds in (0.1, 0.1, 0.16)]
    >>> stragglers(rows)
    {2: 'its computation takes 1.6 times as long as the median of the others'}
    """
    found: dict[int, str] = {}
    here = [rank for rank, row in enumerate(rows) if row["state"] not in ("ended", "gone", "starting", "idle")]
    for rank in here:
        row, others = rows[rank], [rows[other] for other in here if other != rank]
        if not others:
            break
        steps = [other["step"] for other in others if other["step"] is not None]
        times = [other["compute_s"] for other in others if other["compute_s"]]
        if row["waits"] is None and all(other["waits"] is not None for other in others):
            found[rank] = "all other ranks wait, and it does not"
        elif row["compute_s"] and times and row["compute_s"] > SLOW_RATIO * statistics.median(times):
            ratio = row["compute_s"] / statistics.median(times)
            found[rank] = f"its computation takes {ratio:.1f} times as long as the median of the others"
        elif row["step"] is not None and steps:
            behind = statistics.median(steps) - row["step"]
            if behind > max(MIN_BEHIND, SHARE_BEHIND * statistics.median(steps)):
                found[rank] = f"it is {behind:.0f} steps behind the median of the others"
    return found
