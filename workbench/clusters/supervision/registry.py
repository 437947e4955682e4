"""The registry of clusters on this machine: a folder for each, with its kind and the process that owns it.

A detached cluster has no reaper and no owner. Its folder says which process detached it and when.
`workbench cluster list` names it until a process attaches to it or ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import psutil

from workbench.clusters.supervision.rank_output import write_whole
from workbench.clusters.supervision.reaper import AT_END, end_marked, marked, run_last
from workbench.errors import ConfigError, LaunchError

RECORD, LAUNCHER, DETACHED = "cluster.json", "launcher.pickle", "detached.json"


def state_folder(kind: Literal["clusters", "jobs"] = "clusters") -> Path:
    """Folder of records of clusters, or of scripts and output of submitted jobs: under $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench" / kind


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """A cluster's folder and its record, as they were when they were read."""

    folder: Path
    record: dict[str, Any]
    detached: dict[str, Any] | None

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def is_here(self) -> bool:
        """Return True if its controller was started on this machine."""
        return bool(self.record["host"] == socket.gethostname())

    @property
    def owner(self) -> int | None:
        """Process id of the owner, if it is alive."""
        if self.detached is not None or not self.is_here:
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.record["owner"])
            if abs(process.create_time() - self.record["owner_created_s"]) < 1:
                return int(process.pid)
        return None

    def processes(self) -> list[psutil.Process]:
        """Its processes on this machine."""
        return marked(self.record["mark"]) if self.is_here else []

    @property
    def in_job(self) -> bool:
        """Return True if its ranks are in a batch job; then processes here do not show whether they are alive."""
        return (self.folder / AT_END).exists()

    @property
    def state(self) -> str:
        """ "owned by process 12", "detached", "lost" (its processes ended), "left over" (no owner), or "on host x"."""
        if not self.is_here:
            return f"on host {self.record['host']}"
        if self.owner is not None:
            return f"owned by process {self.owner}"
        if not self.processes() and not self.in_job:
            return "lost"
        return "left over" if self.detached is None else "detached"

    def clear(self) -> int:
        """End its processes on this machine and remove its folder. Return how many processes there were."""
        num_ended = end_marked(self.record["mark"])
        run_last(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        return num_ended


def this_owner() -> dict[str, Any]:
    """Return the part of a record that names this process as the owner."""
    process = psutil.Process()
    return {"owner": process.pid, "owner_created_s": process.create_time(), "host": socket.gethostname()}


def change_record(folder: Path, **changes: Any) -> None:
    """Change entries of a cluster's record. Only its owner may call this."""
    write_whole(folder / RECORD, {**json.loads((folder / RECORD).read_text()), **changes})


def entries() -> list[Entry]:
    """Return all clusters of this user that have a record, oldest first."""
    found = []
    root = state_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):  # the folder is being made or removed
            record = json.loads((folder / RECORD).read_text())
            detached = json.loads((folder / DETACHED).read_text()) if (folder / DETACHED).exists() else None
            found.append(Entry(folder, record, detached))
    return sorted(found, key=lambda entry: float(entry.record["started_s"]))


def find_entry(name: str) -> Entry:
    """Return a cluster by its id, or by the beginning of the id; "" is the only cluster.

    Raises:
        ConfigError: no cluster or several match; the message names those that exist.
    """
    known = entries()
    exact = [entry for entry in known if entry.id == name]
    found = exact or [entry for entry in known if entry.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{entry.id} ({entry.state})" for entry in (found or known)) or "none"
    if not name:
        raise ConfigError(f"give the name of a cluster, such as attach('NAME'): there are {names}")
    raise ConfigError(f"{len(found) or 'no'} clusters are called {name!r}: there are {names}")


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user can read and write, whatever the umask is: `check_trusted` then accepts it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # the file may exist, with other rights
        file.write(content)


def check_trusted(path: Path) -> Path:
    """Return the path, if only this user can have written the file. Reading the file executes its content.

    Raises:
        LaunchError: other users can write there.
    """
    for checked in (path, path.parent):
        found = checked.stat()
        if found.st_uid != os.geteuid():
            raise LaunchError(
                f"{checked} belongs to another user: only the user who started a cluster can attach to it"
            )
        if found.st_mode & 0o022:
            raise LaunchError(
                f"{checked} is not trusted, because others can write there: chmod go-w {checked}, if you trust its "
                "content"
            )
    return path


def mark_detached(folder: Path, **facts: Any) -> None:
    """Record that the owner leaves the cluster running. From now on, the cluster does not end with a process.

    Args:
        folder: the cluster's folder.
        facts: what the process that attaches needs.
    """
    write_whole(folder / DETACHED, {"by": os.getpid(), "at_s": time.time(), **facts})


def take_ownership(entry: Entry) -> None:
    """Become the owner of a detached cluster. If two processes try at once, one succeeds.

    Raises:
        LaunchError: the cluster has an owner, or it was not detached.
    """
    if entry.detached is None:
        if entry.owner:
            reason = f"process {entry.owner} owns it: detach() it there"
        else:
            reason = "it was not detached: its owner was killed"
        raise LaunchError(f"cannot attach to cluster {entry.id}: {reason}. `workbench cluster stop {entry.id}` ends it")
    try:
        (entry.folder / DETACHED).rename(entry.folder / f".{DETACHED}-{secrets.token_hex(4)}")
    except OSError:
        raise LaunchError(f"another process attached to cluster {entry.id} at this moment") from None
    change_record(entry.folder, **this_owner())
