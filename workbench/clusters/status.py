"""A table of a cluster's ranks that answers while they train: from what they leave in the run's folder, and asked where they are idle."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from workbench.analysis.table import Column, Table, ago, num_bytes
from workbench.clusters.engines import remote
from workbench.clusters.engines.engines import Engines
from workbench.clusters.launchers.base import ended_here
from workbench.clusters.supervision import registry as register
from workbench.clusters.supervision.heartbeat import end_name, standing
from workbench.errors import RunNotFound
from workbench.runtimes.liveness.failure_detector import read_heartbeat
from workbench.trace.recorder import metrics_name, trace_name
from workbench.trace.store import OVER, read_info
from workbench.trace.tail import last_step_row

ASK_S = 1.0  # an idle engine answers in milliseconds


COLUMNS = (
    Column("rank", "rank"),
    Column("host", "host"),
    Column("pid", "process"),
    Column("state", "state"),
    Column("device", "device"),
    Column("step", "step"),
    Column("beat_s", "last beat", ago),
    Column("memory_bytes", "memory", num_bytes),
    Column("bytes_sent", "bytes sent", num_bytes),
)


def status_table(engines: Engines, ranks: list[dict[str, Any]], run: Path | None, caption: str) -> Table:
    """One row a rank: host, process, state, device, last step, seconds since its last beat, memory, bytes sent.

    Args:
        ranks: who they are.
        run: folder of the training that runs, or of the last one.
    """
    if engines.detached:
        return look(register.find(engines.id))
    there = engines.client is not None and (engines.alive or not engines.launcher.is_mpi)  # a world of MPI ends as one
    present = set(engines.client.ids) if there else set()
    begun = {rank: _of_run(run, rank) for rank in range(len(ranks))} if run is not None else {}
    training = run is not None and not _is_over(run) and any("ended" not in begun[rank] for rank in begun) and bool(present)
    asked = {} if training else _ask(engines, present)
    rows = []
    for rank, who in enumerate(ranks):
        found = {key: value for key, value in begun.get(rank, {}).items() if key != "ended"}
        ended = "ended" in begun.get(rank, {}) or not training
        if ended:
            found.pop("beat_s", None)
        row = {"rank": rank, "host": who["host"], "pid": who["pid"], **found, **asked.get(rank, {})}
        row["state"] = (
            "gone"
            if rank not in present
            else found.get("state", "training")
            if not ended
            else "ready"
            if training or rank in asked
            else "busy"
        )
        if row["state"] != "gone" and rank not in asked and (ended or "memory_bytes" not in row):
            row["memory_bytes"] = _memory_here(who)
        rows.append(row)
    return Table(rows, COLUMNS, caption)


def look(entry: register.Entry) -> Table:
    """The same of a cluster that another process holds, or nobody: nothing is asked of the engines, only looked at."""
    ranks = (entry.detached or entry.record).get("ranks") or []
    run = Path(entry.record["run"]) if entry.record.get("run") else None
    over = run is None or _is_over(run)
    rows = []
    for rank, who in enumerate(ranks):
        found = _of_run(run, rank) if run is not None else {}
        ended = found.pop("ended", False) or over
        gone = ended_here(who)
        state = "gone" if gone else "ready" if ended else found.get("state", "training")
        row = {"rank": rank, "host": who["host"], "pid": who["pid"], **found, "state": state}
        if ended and not gone:
            row["memory_bytes"] = _memory_here(who)
        rows.append(row)
    return Table(rows, COLUMNS, f"{entry.id}: {entry.record['title']}, {entry.state}")


def _ask(engines: Engines, present: set[int]) -> dict[int, dict[str, Any]]:
    """What idle engines say now; one that runs a cell of the user's does not answer in time."""
    pending = {rank: engines.client[rank].apply_async(remote.vitals) for rank in present}
    deadline = time.monotonic() + ASK_S
    answers = {}
    for rank, answer in pending.items():
        answer.wait(max(0.0, deadline - time.monotonic()))
        if answer.done():
            with contextlib.suppress(Exception):  # whatever a broken engine says, the table is of what is known
                answers[rank] = {**answer.result(0), "beat_s": 0.0}
    return answers


def _is_over(run: Path) -> bool:
    """Whether nobody trains in it any more, whatever word its ranks left: those of a killed one are new."""
    try:
        return read_info(run).get("status") in OVER
    except RunNotFound:
        return True


def _of_run(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has left in the run's folder so far."""
    found: dict[str, Any] = {}
    if (beat := read_heartbeat(folder, rank)) is not None:
        found |= {"beat_s": beat["silent_s"], "memory_bytes": beat["memory_bytes"]}
    with contextlib.suppress(OSError, ValueError), (folder / trace_name(rank)).open() as file:
        found["device"] = json.loads(file.readline())["device"]
    if (row := last_step_row(folder / metrics_name(rank))) is not None:
        found |= {"step": row["step"], "bytes_sent": row.get("bytes_sent")}
    state = standing(folder, rank)
    if state is not None:
        found["state"] = state  # of a rank that trains
    if (folder / end_name(rank)).exists():
        found["ended"] = True
    return found


def _memory_here(who: dict[str, Any]) -> int | None:
    """Of a process of this machine that does not answer."""
    if who["host"] == socket.gethostname():
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(who["pid"]).memory_info().rss)
    return None
