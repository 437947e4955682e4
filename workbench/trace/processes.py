"""Find out which processes wrote a record, and whether they are alive: a killed run's record still says "running".

A killed process cannot write that it was killed. A run names the process that made it, and each rank names its own
process in its trace. A run is "killed" if all its processes were on this machine and are gone. Processes of other
machines cannot be looked up: such a run is "lost" if its folder has not changed for a long time. These statuses are not
written to `run.json`, so a run that writes again is "running" again.
"""

from __future__ import annotations

import os
import re
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
SAME_START_S = 1.0  # start times of two processes with the same number differ by more
ENDED = ("finished", "failed", "stopped", "killed")  # statuses of a run without processes
OVER = (*ENDED, "lost")  # nothing more is expected; a lost run may write again
YOUNG_S = 10.0  # a folder that changed more recently is in use: ranks write every second
# What readers write into a run's folder (`workbench timeline`, `export` and `calibrate`): it is no sign of life.
OF_READERS = re.compile(r"\.?(timeline\.html|trace\.json|calibration\.json|chakra\.\d+\.et)(\..+)?")
SILENT_S = 600.0  # a run on other machines is lost after this time without a write
HEAD_BYTES = 4096
NO_REPORT = {
    "killed": "its processes have ended without a report (killed, or out of memory?)",
    "lost": "its folder has not changed for ten minutes or more: its processes are on another machine, or gone",
}


# -- one process -----------------------------------------------------------------------------------------------


def this_process() -> dict[str, Any]:
    """Return record entries that identify this process, also among later processes with the same number."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        **when_begun(),
    }


def when_begun(pid: int | None = None) -> dict[str, Any]:
    """Return when a process began (None: this one): the machine's boot id, and seconds since the boot.

    Empty if the system does not report it. The time since the boot cannot be set. `psutil`'s time since 1970 is
    computed from the time of day, and changes when the time of day is set.
    """
    with suppress(OSError, ValueError, IndexError):
        return {"process_begun": [BOOT_ID.read_text().strip(), _state_and_start(pid or os.getpid())[1]]}
    return {}


def process_is_alive(record: Mapping[str, Any]) -> bool:
    """Return True if the process of a record of `this_process` is alive, on this machine.

    False if the record does not identify a process.
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

    A process with the same number that began later is another process.
    """
    if "process_begun" in header:
        return process_is_alive(header)
    try:
        process = psutil.Process(header["pid"])
        return process.create_time() < header["unix_s"] + SAME_START_S and is_running(process)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def state_of_process(pid: int, started_s: float) -> Literal["alive", "stopped", "gone"] | None:
    """Return the state of a process of this machine, by its number and `start_of`; None if it is not reported."""
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
    """Return when a process began, for `state_of_process`."""
    return _state_and_start(pid)[1]


def _state_and_start(pid: int) -> tuple[str, float]:
    """Return the letter of a process's state, and its begin in seconds since the boot if known, else since 1970."""
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
    """Return a name for the scope in which process numbers are unique: this boot of the machine, and this container."""
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


# -- the processes of a run ------------------------------------------------------------------------------------


def with_true_status(folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """Return `run.json`, with status "killed" or "lost" and the reason if it says "running" but the run is not."""
    if info.get("status") in ENDED:
        return info
    status = status_by_processes(folder, info)
    return info if status is None else {**info, "status": status, "error": info.get("error") or NO_REPORT[status]}


def status_by_processes(folder: Path, info: dict[str, Any]) -> Literal["killed", "lost"] | None:
    """Return the status of a run that did not record its end; None while one of its processes may be alive."""
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
    """Return the seconds since the run changed a file of its folder; below 0 if the clock was set back since then."""
    newest = 0.0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if OF_READERS.fullmatch(entry.name):
                continue
            with suppress(OSError):
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return time.time() - newest


def _headers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the header of each rank's trace, which names the process that writes the trace."""
    with suppress(OSError):
        for path in folder.glob("trace-*.jsonl"):
            with suppress(OSError, ValueError), open_file(path) as file:
                header = parse_json(file.read(HEAD_BYTES).partition(b"\n")[0])
                if isinstance(header, dict) and "pid" in header:
                    yield header
