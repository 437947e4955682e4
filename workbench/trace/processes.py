"""Which processes wrote a record, and whether they are alive: a record that says "running" may be of a killed run.

A killed process cannot write that it was killed. A run names the process that made it, and each rank names its own
process in its trace. A run is "killed" if all its processes were on this machine and are gone. Processes of other
machines cannot be looked up: such a run is "lost" if its folder has not changed for a long time. These statuses are not
written to `run.json`, so a run that is seen again is running again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

from workbench.machine import is_running
from workbench.trace.files.text import open_file, parse_json

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # identifies this start of the machine, on Linux
SAME_START_S = 1.0  # two processes with one number began further apart than this
ENDED = ("finished", "failed", "stopped", "killed")  # statuses of a run without processes
YOUNG_S = 10.0  # a folder that changed more recently is in use: ranks write every second
SILENT_S = 600.0  # without a write of ranks on other machines
HEAD_BYTES = 4096
NO_REPORT = {
    "killed": "its processes have ended without a report (killed, or out of memory?)",
    "lost": "its folder has not changed for ten minutes or more: its processes are on another machine, or gone",
}


# -- one process -----------------------------------------------------------------------------------------------


def this_process() -> dict[str, Any]:
    """Entries of a record that distinguish this process from all others, also from a later one with the same number."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        **when_begun(),
    }


def when_begun(pid: int | None = None) -> dict[str, Any]:
    """When a process began (None: this one): the start of the machine, and seconds since then.

    Empty if the system does not report it. This clock is never set. `psutil`'s time since 1970 is computed from the
    time of day, and changes when that is set.
    """
    with suppress(OSError, ValueError, IndexError):
        return {"process_begun": [BOOT_ID.read_text().strip(), _state_and_start(pid or os.getpid())[1]]}
    return {}


def process_is_alive(record: Mapping[str, Any]) -> bool:
    """Return True if the process of a record of `this_process` is alive, on this machine.

    False if the record does not tell.
    """
    try:
        process = psutil.Process(record["pid"])
        if (begun := record.get("process_begun")) and (now := when_begun(process.pid)):
            same = now["process_begun"] == begun
        else:
            same = abs(process.create_time() - record["process_started"]) < SAME_START_S
        return bool(same) and is_running(process)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def writer_is_alive(header: Mapping[str, Any]) -> bool:
    """Return True if the process that wrote a trace's header is alive.

    A process that began later has taken its number.
    """
    if "process_begun" in header:
        return process_is_alive(header)
    try:
        process = psutil.Process(header["pid"])
        return process.create_time() < header["unix_s"] + SAME_START_S and is_running(process)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def state_of_process(pid: int, started_s: float) -> Literal["alive", "stopped", "gone"] | None:
    """State of the process of this machine with that number and `start_of`; None if the system does not report it."""
    try:
        letter, now_s = _state_and_start(pid)
    except psutil.NoSuchProcess:
        return "gone"
    except (psutil.Error, OSError):
        return None
    if abs(now_s - started_s) > SAME_START_S or letter in "ZX":  # another process has the number; a zombie
        return "gone"
    return "stopped" if letter in "Tt" else "alive"


def start_of(pid: int) -> float:
    """When a process began, for `state_of_process`."""
    return _state_and_start(pid)[1]


def _state_and_start(pid: int) -> tuple[str, float]:
    """The letter of a process's state, and its begin: since the machine's start if known, else since 1970."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            raise psutil.NoSuchProcess(pid) from None
        return fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
    process = psutil.Process(pid)
    letters = {
        psutil.STATUS_ZOMBIE: "Z",
        psutil.STATUS_DEAD: "X",
        psutil.STATUS_STOPPED: "T",
        psutil.STATUS_TRACING_STOP: "t",
    }
    return letters.get(process.status(), "S"), process.create_time()


@cache
def pid_namespace() -> str:
    """Where a process's number is unique: this start of the machine, and this container."""
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


# -- the processes of a run ------------------------------------------------------------------------------------


def with_true_status(folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """`run.json`, with status "killed" or "lost" and the reason, if the file still says that the run is running."""
    if info.get("status") in ENDED:
        return info
    status = status_by_processes(folder, info)
    return info if status is None else {**info, "status": status, "error": info.get("error") or NO_REPORT[status]}


def status_by_processes(folder: Path, info: dict[str, Any]) -> Literal["killed", "lost"] | None:
    """Status of a run that has not ended by itself; None while one of its processes may be alive."""
    host, owner = socket.gethostname(), info.get("process")
    owner = owner if isinstance(owner, dict) else None
    if owner is not None and owner.get("host") == host and process_is_alive(owner):
        return None
    silent_s = _silent_s(folder)
    if abs(silent_s) < YOUNG_S:
        return None
    found, elsewhere = owner is not None, owner is not None and owner.get("host") != host
    for header in _headers(folder):
        found = True
        if header.get("host") != host:
            elsewhere = True
        elif writer_is_alive(header):
            return None
    if found and not elsewhere:
        return "killed"
    return "lost" if silent_s > SILENT_S else None


def _silent_s(folder: Path) -> float:
    """Seconds since a file of the folder was changed; below 0 if the clock was set back since."""
    newest = 0.0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return time.time() - newest


def _headers(folder: Path) -> Iterator[dict[str, Any]]:
    """The header of each rank's trace, which names the process that writes it."""
    with suppress(OSError):
        for path in folder.glob("trace-*.jsonl"):
            with suppress(OSError, ValueError), open_file(path) as file:
                header = parse_json(file.read(HEAD_BYTES).partition(b"\n")[0])
                if isinstance(header, dict) and "pid" in header:
                    yield header
