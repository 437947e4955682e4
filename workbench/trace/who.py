"""Which process of which machine wrote a record, and whether it is still there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of this start of the machine, on Linux


def this_process() -> dict[str, Any]:
    """Entries of a record that tell this process from any other, also from a later one with its number."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time(), **when_begun()}


def when_begun(pid: int | None = None) -> dict[str, Any]:
    """When a process began (None: this one), on a clock that nobody sets: which start of the machine, and seconds since then.

    Its time since 1970 is reckoned from the present time of day, and so another after that was set. Nothing where the system does not tell.
    """
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path(f"/proc/{pid or os.getpid()}/stat").read_text().rpartition(")")[2].split()[19])
        return {"process_begun": [BOOT_ID.read_text().strip(), ticks / os.sysconf("SC_CLK_TCK")]}
    return {}


def is_there(record: Mapping[str, Any]) -> bool:
    """Whether the process of a record lives, on this machine; False if the record does not tell."""
    try:
        process = psutil.Process(record["pid"])
        if (begun := record.get("process_begun")) and (now := when_begun(process.pid)):
            same = now["process_begun"] == begun
        else:
            same = abs(process.create_time() - record["process_started"]) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False


def was_there(header: Mapping[str, Any]) -> bool:
    """Whether the process lives that wrote a trace's header: one that began later has taken its number."""
    if "process_begun" in header:
        return is_there(header)
    try:
        process = psutil.Process(header["pid"])
        return bool(process.create_time() < header["unix_s"] + 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False
