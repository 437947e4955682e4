"""A table of a cluster's ranks. Training ranks are read from the run's folder; idle ranks are asked."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from workbench.analysis.table import Column, Table, format_age, num_bytes
from workbench.clusters.engines import remote
from workbench.clusters.engines.engines import Engines
from workbench.clusters.launchers.base import ended_here
from workbench.clusters.supervision import registry
from workbench.clusters.supervision.rank_output import end_name, state_of_rank
from workbench.errors import RunNotFound
from workbench.runtimes.liveness.failure_detector import read_heartbeat
from workbench.trace.recorder import metrics_name, trace_name
from workbench.trace.store import ENDED, read_info
from workbench.trace.tail import last_step_row

ASK_S = 1.0  # an idle engine answers in milliseconds

COLUMNS = (
    Column("rank", "rank"),
    Column("host", "host"),
    Column("pid", "process"),
    Column("state", "state"),
    Column("device", "device"),
    Column("step", "step"),
    Column("beat_s", "last beat", format_age),
    Column("memory_bytes", "memory", num_bytes),
    Column("bytes_sent", "bytes sent", num_bytes),
)


def status_table(engines: Engines, ranks: list[dict[str, Any]], run: Path | None, caption: str) -> Table:
    """Return a row for each rank: host, process, state, device, last step, seconds since its heartbeat, memory, bytes sent.

    Args:
        engines: the cluster's engines.
        ranks: one mapping per rank, with host and pid.
        run: folder of the training that runs, or of the last one.
        caption: caption of the table.
    """
    if engines.detached:
        return entry_table(registry.find_entry(engines.id))
    # The ranks of an MPI world end together.
    connected = engines.client is not None and engines.why_silent() is None
    connected = connected and (engines.alive or not engines.launcher.is_mpi)
    present = set(engines.client.ids) if connected else set()
    begun = {rank: _of_run(run, rank) for rank in range(len(ranks))} if run is not None else {}
    training = (
        run is not None and not _is_over(run) and any("ended" not in begun[rank] for rank in begun) and bool(present)
    )
    asked = {} if training else _ask(engines, present)
    rows = []
    for rank, process in enumerate(ranks):
        found = {key: value for key, value in begun.get(rank, {}).items() if key != "ended"}
        ended = "ended" in begun.get(rank, {}) or not training
        if ended:
            found.pop("beat_s", None)
        row = {"rank": rank, "host": process["host"], "pid": process["pid"], **found, **asked.get(rank, {})}
        if rank not in present:
            row["state"] = "gone"
        elif not ended:
            row["state"] = found.get("state", "training")
        else:
            row["state"] = "ready" if training or rank in asked else "busy"
        if row["state"] != "gone" and rank not in asked and (ended or "memory_bytes" not in row):
            row["memory_bytes"] = _memory_here(process)
        rows.append(row)
    return Table(rows, COLUMNS, caption)


def entry_table(entry: registry.Entry) -> Table:
    """Return the same table for a cluster that this process does not own. It only reads files and processes."""
    ranks = (entry.detached or entry.record).get("ranks") or []
    run = Path(entry.record["run"]) if entry.record.get("run") else None
    over = run is None or _is_over(run)
    rows = []
    for rank, process in enumerate(ranks):
        found = _of_run(run, rank) if run is not None else {}
        ended = found.pop("ended", False) or over
        gone = ended_here(process)
        state = "gone" if gone else "ready" if ended else found.get("state", "training")
        row = {"rank": rank, "host": process["host"], "pid": process["pid"], **found, "state": state}
        if ended and not gone:
            row["memory_bytes"] = _memory_here(process)
        rows.append(row)
    return Table(rows, COLUMNS, f"{entry.id}: {entry.record['title']}, {entry.state}")


def _ask(engines: Engines, present: set[int]) -> dict[int, dict[str, Any]]:
    """Return rank -> the state of an idle engine. Engines that run a cell do not answer in time and are left out."""
    pending = {rank: engines.client[rank].apply_async(remote.idle_status) for rank in present}
    deadline = time.monotonic() + ASK_S
    answers = {}
    for rank, answer in pending.items():
        answer.wait(max(0.0, deadline - time.monotonic()))
        if answer.done():
            with contextlib.suppress(Exception):  # a broken engine may raise anything; the table shows what is known
                answers[rank] = {**answer.result(0), "beat_s": 0.0}
    return answers


def _is_over(run: Path) -> bool:
    """Return True if the run's record says that it has ended. The ranks' own files may look recent after a kill."""
    try:
        return read_info(run).get("status") in ENDED
    except RunNotFound:
        return True


def _of_run(folder: Path, rank: int) -> dict[str, Any]:
    """Return what a rank has written into the run's folder so far."""
    found: dict[str, Any] = {}
    if (beat := read_heartbeat(folder, rank)) is not None:
        found |= {"beat_s": beat["silent_s"], "memory_bytes": beat["memory_bytes"]}
    with contextlib.suppress(OSError, ValueError), (folder / trace_name(rank)).open() as file:
        found["device"] = json.loads(file.readline())["device"]
    if (row := last_step_row(folder / metrics_name(rank))) is not None:
        found |= {"step": row["step"], "bytes_sent": row.get("bytes_sent")}
    state = state_of_rank(folder, rank)
    if state is not None:
        found["state"] = state  # only a training rank has one
    if (folder / end_name(rank)).exists():
        found["ended"] = True
    return found


def _memory_here(process: dict[str, Any]) -> int | None:
    """Resident memory of a rank's process, in bytes; None if it runs on another machine or has ended."""
    if process["host"] == socket.gethostname():
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(process["pid"]).memory_info().rss)
    return None
