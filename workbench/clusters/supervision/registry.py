"""Which clusters there are on this machine: a folder for each, with a record of what it is and who holds it.

A cluster that was detached has no warden, and nobody's end is its own. So its folder says who let go of it and when, and
`workbench cluster list` names it until somebody takes it up again or ends it.
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

from workbench.clusters.supervision.heartbeat import write_whole
from workbench.clusters.supervision.reaper import AT_END, end_marked, marked, run_last
from workbench.errors import ConfigError, LaunchError

RECORD, LAUNCHER, DETACHED = "cluster.json", "launcher.pickle", "detached.json"


def state_folder(kind: Literal["clusters", "jobs"] = "clusters") -> Path:
    """Folder of records of clusters, or of scripts and output of submitted jobs: under $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench" / kind


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """A cluster's folder and its record, as they were when it was read."""

    folder: Path
    record: dict[str, Any]
    detached: dict[str, Any] | None

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def is_here(self) -> bool:
        """Whether its controller was started on this machine."""
        return bool(self.record["host"] == socket.gethostname())

    @property
    def owner(self) -> int | None:
        """The process that holds it, if that lives."""
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
        """Whether its ranks are in a job, which knows itself whether they live."""
        return (self.folder / AT_END).exists()

    @property
    def state(self) -> str:
        """ "held by process 12", "detached", "lost" (its processes have ended), "left over" (nobody holds it), "on host x"."""
        if not self.is_here:
            return f"on host {self.record['host']}"
        if self.owner is not None:
            return f"held by process {self.owner}"
        if not self.processes() and not self.in_job:
            return "lost"
        return "left over" if self.detached is None else "detached"

    def clear(self) -> int:
        """End its processes on this machine and remove its folder. Returns how many there were."""
        num_ended = end_marked(self.record["mark"])
        run_last(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        return num_ended


def me() -> dict[str, Any]:
    """What a record says of the process that holds a cluster."""
    process = psutil.Process()
    return {"owner": process.pid, "owner_created_s": process.create_time(), "host": socket.gethostname()}


def change_record(folder: Path, **changes: Any) -> None:
    """Change some of what a cluster's record says; only who holds it may."""
    write_whole(folder / RECORD, {**json.loads((folder / RECORD).read_text()), **changes})


def entries() -> list[Entry]:
    """All clusters of this user that have a record, oldest first."""
    found = []
    root = state_folder()
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):  # just made, or just ended
            record = json.loads((folder / RECORD).read_text())
            detached = json.loads((folder / DETACHED).read_text()) if (folder / DETACHED).exists() else None
            found.append(Entry(folder, record, detached))
    return sorted(found, key=lambda entry: float(entry.record["started_s"]))


def find(name: str) -> Entry:
    """A cluster by its id, or by the beginning of one.

    Raises:
        ConfigError: none or several; names those there are.
    """
    there = entries()
    exact = [entry for entry in there if entry.id == name]
    found = exact or [entry for entry in there if entry.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{entry.id} ({entry.state})" for entry in (found or there)) or "none"
    raise ConfigError(f"{len(found) or 'no'} clusters are called {name!r}: there are {names}")


def trusted(path: Path) -> Path:
    """The path, if nobody but this user can have written what is there: it is read in a way that runs it.

    Raises:
        LaunchError: others can write there.
    """
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid != os.geteuid():
            raise LaunchError(f"{place} belongs to another user: a cluster can be attached to by who started it")
        if found.st_mode & 0o022:
            raise LaunchError(f"{place}: others can write there, so it is not believed: chmod go-w {place}, if you trust what it holds")
    return path


def let_go(folder: Path, **words: Any) -> None:
    """Record that the holder leaves the cluster running: from here on, nobody's end is its own."""
    write_whole(folder / DETACHED, {"by": os.getpid(), "at_s": time.time(), **words})


def take_up(entry: Entry) -> None:
    """Become the holder of a cluster that was let go of; of two who try at once, one does.

    Raises:
        LaunchError: somebody holds it, or its processes have ended.
    """
    if entry.detached is None:
        held = f"process {entry.owner} holds it: detach() it there" if entry.owner else "it was not detached: its holder was killed"
        raise LaunchError(f"cluster {entry.id} cannot be attached to: {held}. `workbench cluster stop {entry.id}` ends it")
    try:
        (entry.folder / DETACHED).rename(entry.folder / f".{DETACHED}-{secrets.token_hex(4)}")
    except OSError:
        raise LaunchError(f"cluster {entry.id} was taken up by another process at this moment") from None
    change_record(entry.folder, **me())
