"""What became of a run that says it goes on: a process that is killed cannot write that it was.

A run names the process that made it, and each rank names its own in its trace. Where all of them were on this machine and
are gone, the run was killed. Of processes elsewhere only the files tell: a run in whose folder nobody has written for long is
lost. Nothing of this is written down, so a run that is heard of again is running again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from workbench.trace.text import open_file, parse_json
from workbench.trace.who import is_there, was_there

OVER = ("finished", "failed", "stopped", "killed")  # what is said of a run that no process is at any more
YOUNG_S = 10.0  # ranks beat every second, and processes need a while from one another's end to their own
SILENT_S = 600.0  # of ranks on other machines
HEAD_BYTES = 4096
WORDS = {
    "killed": "its processes are gone without a word (killed, or out of memory?)",
    "lost": "nobody has written in its folder for ten minutes or more: its processes are on another machine, or gone",
}


def with_fate(folder: Path, info: dict[str, Any]) -> dict[str, Any]:
    """`run.json` with the status "killed" or "lost", and with why as its error, where the file still says that the run goes on."""
    if info.get("status") in OVER:
        return info
    word = fate(folder, info)
    return info if word is None else {**info, "status": word, "error": info.get("error") or WORDS[word]}


def fate(folder: Path, info: dict[str, Any]) -> Literal["killed", "lost"] | None:
    """What became of a run that is not over; None while somebody may be at it."""
    here, owner = socket.gethostname(), info.get("process")
    owner = owner if isinstance(owner, dict) else None
    if owner is not None and owner.get("host") == here and is_there(owner):
        return None
    silent_s = _silent_s(folder)
    if abs(silent_s) < YOUNG_S:
        return None
    seen, elsewhere = owner is not None, owner is not None and owner.get("host") != here
    for header in _headers(folder):
        seen = True
        if header.get("host") != here:
            elsewhere = True
        elif was_there(header):
            return None
    if seen and not elsewhere:
        return "killed"
    return "lost" if silent_s > SILENT_S else None


def _silent_s(folder: Path) -> float:
    """Seconds since a file of the folder was changed; below 0 where the clock was set back meanwhile."""
    newest = 0.0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return time.time() - newest


def _headers(folder: Path) -> Iterator[dict[str, Any]]:
    """What each rank's trace says of the process that writes it."""
    with suppress(OSError):
        for path in folder.glob("trace-*.jsonl"):
            with suppress(OSError, ValueError), open_file(path) as file:
                header = parse_json(file.read(HEAD_BYTES).partition(b"\n")[0])
                if isinstance(header, dict) and "pid" in header:
                    yield header
