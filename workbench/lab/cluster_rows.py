"""The registered clusters as rows, their logs, and how one is stopped, scaled or healed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, final

from workbench.clusters.supervision.rank_output import output_name
from workbench.clusters.supervision.registry import Entry, entries
from workbench.errors import ConfigError, LaunchError, RunNotFound
from workbench.lab.snippets import attach_code
from workbench.machine import is_running
from workbench.trace.files.text import open_file
from workbench.trace.processes import with_true_status
from workbench.trace.store import read_info

YOUNG_S = 1.0
LOG_BYTES = 64 * 1024  # from the end of each file
MAX_LOGS = 16
STOP_S = 90.0
START_S = 180.0


@final
class ClusterRows:
    """Rows of all clusters of this user. To find their processes takes a look at every process of the machine.

    So the rows are read at most every `YOUNG_S`, and this takes at most a tenth of a core.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._rows: list[dict[str, Any]] = []
        self._valid_until_s = float("-inf")

    def rows(self, notebooks: Mapping[int, str]) -> list[dict[str, Any]]:
        """Return the clusters, newest first.

        Args:
            notebooks: process of a kernel -> path of its notebook.
        """
        with self._lock:
            begin_s = time.monotonic()
            if begin_s > self._valid_until_s:
                self._rows = [_row(entry, notebooks) for entry in reversed(entries())]
                now_s = time.monotonic()
                self._valid_until_s = now_s + max(YOUNG_S, 10 * (now_s - begin_s))
            return self._rows

    def change(self, name: str, action: str, *arguments: str) -> str:
        """Scale or heal a detached cluster: see `change_cluster`. The next call of `rows` reads the clusters again."""
        try:
            return change_cluster(name, action, *arguments)
        finally:
            self._valid_until_s = float("-inf")

    def stop(self, name: str) -> str:
        """Stop a cluster: see `stop_cluster`. The next call of `rows` reads the clusters again."""
        try:
            return stop_cluster(name)
        finally:
            self._valid_until_s = float("-inf")


def _row(entry: Entry, notebooks: Mapping[int, str]) -> dict[str, Any]:
    state, owner = entry.state, entry.owner
    if owner is not None and owner in notebooks:
        state = f"owned by {notebooks[owner]}"
    folder = entry.record.get("run")
    attachable = entry.detached is not None and state == "detached"
    if not entry.is_here and entry.detached is not None:
        attachable = bool(entry.record.get("reachable"))
    return {
        "id": entry.id,
        "num_ranks": entry.record.get("num_ranks"),
        "launcher": entry.record.get("title"),
        "host": entry.record.get("host"),
        "state": state,
        "alive": state not in ("lost", "left over"),
        "owned": owner is not None,
        "notebook": notebooks.get(owner) if owner is not None else None,
        "num_gone": sum(map(_has_ended, (entry.detached or entry.record).get("ranks") or ())),
        "since_s": (entry.detached or {}).get("at_s", entry.record["started_s"]),
        "run": Path(folder).name if folder else None,
        "run_status": _status(Path(folder)) if folder else None,
        "attach": attach_code(entry.id) if attachable else None,
    }


def _has_ended(process: Mapping[str, Any]) -> bool:
    """Return True if a rank's process was on this machine and has ended."""
    return process.get("host") == socket.gethostname() and not is_running(int(process["pid"]))


def _status(folder: Path) -> str | None:
    try:
        return str(with_true_status(folder, read_info(folder)).get("status"))
    except RunNotFound:
        return None


def runs_of_clusters() -> list[Path]:
    """Return the folders of the trainings that clusters run, or ran last."""
    return [Path(entry.record["run"]) for entry in entries() if entry.record.get("run")]


def exact_entry(name: str) -> Entry:
    """Return a cluster by its full id.

    Raises:
        ConfigError: no cluster has this id; the message names those that exist.
    """
    known = {entry.id: entry for entry in entries()}
    if name not in known:
        raise ConfigError(f"there is no cluster {name}: it has ended. There are {', '.join(known) or 'none'}")
    return known[name]


def cluster_log(name: str) -> list[dict[str, str]]:
    """Return the ends of a cluster's logs, and of the output of the ranks of its training: name and text.

    Raises:
        ConfigError: no cluster has this id.
    """
    entry = exact_entry(name)
    folder = entry.record.get("run")
    files = [Path(folder) / output_name(rank) for rank in range(int(entry.record["num_ranks"]))] if folder else []
    files += sorted((entry.folder / "log").glob("*.log"), reverse=True)
    found = list[dict[str, str]]()
    for path in files:
        try:
            with open_file(path) as file:
                file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
                text = file.read(LOG_BYTES).decode(errors="replace")
        except OSError:  # the rank printed nothing
            continue
        if text.strip() and len(found) < MAX_LOGS:
            found.append({"name": path.name, "text": text})
    return found


def stop_cluster(name: str) -> str:
    """Stop a cluster as `workbench cluster stop` does, in a process of its own: it may need ipyparallel's event loop.

    The cluster of a notebook ends too, and its training fails.

    Returns:
        What the command printed.

    Raises:
        ConfigError: no cluster has this id.
        LaunchError: it cannot be stopped from here; the message says why.
    """
    entry = exact_entry(name)
    return _workbench("stop", entry.id, *(["--force"] if entry.owner is not None else []), limit_s=STOP_S)


def change_cluster(name: str, action: str, *arguments: str) -> str:
    """Scale or heal a detached cluster as `workbench cluster scale` and `heal` do, in a process of its own.

    Returns:
        What the command printed.

    Raises:
        ConfigError: no cluster has this id, or the change is not possible; the message says why.
        LaunchError: the new ranks did not start.
    """
    return _workbench(action, exact_entry(name).id, *arguments, limit_s=START_S)


def _workbench(action: str, *arguments: str, limit_s: float) -> str:
    # -P: a folder `workbench` in the server's current folder is not the package
    command = [sys.executable, "-P", "-m", "workbench", "cluster", action, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"no answer within {limit_s:.0f} s: `workbench cluster {action} {' '.join(arguments)}`"
        ) from None
    if done.returncode:
        error = done.stderr.strip().removeprefix("workbench: ")
        raise LaunchError(error or f"`workbench cluster {action} {' '.join(arguments)}` failed")
    return done.stdout.strip()
