"""The states of a sweep's cells, as files.

Each attempt at a cell has a file, and only the process that made it writes to it. The newest attempt is the cell's
state. If a process is gone, another process can take over its cell: it makes the file of the next attempt. Only one
process can make that file. So several processes, on machines that share the folder, can run one sweep.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from workbench.experiments.grid import Cell
from workbench.trace.files.atomic import write_atomic
from workbench.trace.processes import process_is_alive, this_process

State = Literal["open", "running", "finished", "failed", "interrupted"]
SILENT_S = 120.0  # a claim of another machine expires if its file was not touched for this time
NAME = re.compile(r"([0-9a-f]{12})-(\d{3,})\.json")


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a cell: its file, its number, and the file's content."""

    path: Path
    number: int
    record: dict[str, Any]

    @property
    def state(self) -> State:
        """The state in which the attempt ended, or "running"."""
        status = self.record.get("status")
        return status if status in ("finished", "failed", "interrupted") else "running"

    @property
    def log(self) -> Path:
        """File with the output of the cell's processes."""
        return self.path.with_suffix(".log")

    @property
    def runs_file(self) -> Path:
        """File with the names of the attempt's runs, one per line."""
        return self.path.with_suffix(".runs")

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the attempt's runs in the store."""
        try:
            return tuple(self.runs_file.read_text().split())
        except OSError:
            return ()


def read_attempts(folder: Path, key: str = "*") -> dict[str, Attempt]:
    """Return key -> newest attempt, for all cells or for one."""
    newest: dict[str, tuple[int, Path]] = {}
    for path in folder.glob(f"{key}-*.json"):
        match = NAME.fullmatch(path.name)
        if match and int(match[2]) >= newest.get(match[1], (-1, path))[0]:
            newest[match[1]] = (int(match[2]), path)
    return {key: Attempt(path, number, _read(path)) for key, (number, path) in newest.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # the file is being written, or its writer crashed and the claim will expire
    return found if isinstance(found, dict) else {}


def claim(folder: Path, sweep: str, cell: Cell, number: int) -> Attempt | None:
    """Make the file of an attempt. Return None if another process has made it."""
    path = folder / f"{cell.key}-{number:03d}.json"
    record = {
        "sweep": sweep,
        "cell": cell.key,
        "label": cell.label,
        "notebook": cell.notebook,
        "values": cell.values,
        "attempt": number,
        "status": "running",
        **this_process(),
        "started": datetime.now(UTC).isoformat(),
    }
    try:
        with path.open("x") as file:
            file.write(json.dumps(record, indent=1) + "\n")
    except FileExistsError:
        return None
    return Attempt(path, number, record)


def conclude(attempt: Attempt, status: State, **more: Any) -> Attempt:
    """Write how an attempt ended. A reader sees the old file or the new one.

    Args:
        attempt: the attempt.
        status: the state in which the attempt ended.
        more: further entries of the record.
    """
    record = {
        **attempt.record,
        "status": status,
        "ended": datetime.now(UTC).isoformat(),
        "runs": list(attempt.runs),
        **more,
    }
    write_atomic(attempt.path, json.dumps(record, indent=1) + "\n")
    return Attempt(attempt.path, attempt.number, record)


def renew(attempt: Attempt) -> None:
    """Touch the attempt's file, to show that its process is alive."""
    with suppress(OSError):
        os.utime(attempt.path)


def is_alive(attempt: Attempt) -> bool:
    """Return True if an attempt's process is alive, or is on another machine and has touched the file recently."""
    record = attempt.record
    if record.get("host") == socket.gethostname():
        return process_is_alive(record)
    return _age_s(attempt.path) < SILENT_S


def _age_s(path: Path) -> float:
    """Return the seconds since a file was touched, by the file system's clock."""
    probe = path.with_name(f".clock-{secrets.token_hex(4)}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - path.stat().st_mtime
    except OSError:
        return 0.0
