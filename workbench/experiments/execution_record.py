"""The record of an executed notebook, in a file next to it: its parameters, times, versions, and how it ended."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError
from workbench.trace.files.atomic import write_atomic
from workbench.trace.processes import process_is_alive, this_process

PACKAGES = ("sgd-workbench", "torch", "numpy", "ipyparallel", "mpi4py", "papermill", "plotly")
GIT_S = 10.0


def record_path(output: Path | str) -> Path:
    """Return the path of the record of an executed notebook.

    >>> record_path("runs/tour.ipynb").name
    'tour.record.json'
    """
    return Path(output).with_suffix(".record.json")


def begin_record(output: Path, notebook: str, kernel: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Write the record of a notebook that begins. Return the record."""
    record = {
        "notebook": notebook,
        "output": str(output),
        "kernel": kernel,
        "parameters": parameters,
        "status": "running",
        "started": datetime.now(UTC).isoformat(),
        "ended": None,
        "error": None,
        **this_process(),
        "versions": {"python": platform.python_version(), **versions()},
        "commit": _commit(Path(notebook).parent),
    }
    _write(record_path(output), record)
    return record


def end_record(output: Path, record: dict[str, Any], error: BaseException | None) -> None:
    """Write how a notebook ended: finished, failed, timed out, terminated (SIGTERM) or interrupted (Ctrl-C)."""
    end = {"status": _status(error), "error": _describe(error), "ended": datetime.now(UTC).isoformat()}
    _write(record_path(output), {**record, **end})


def read_record(output: Path | str) -> dict[str, Any]:
    """Return the record of an executed notebook.

    The status is "killed" if the record says "running" but its process is gone.

    Raises:
        ConfigError: there is no record.
    """
    path = record_path(output)
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): `workbench notebook run` and papermill --engine workbench write it"
        ) from None
    if record.get("status") == "running" and record.get("host") == socket.gethostname():
        return record if process_is_alive(record) else {**record, "status": "killed"}
    return record


def _status(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    named = {"CellTimeoutError": "timed out", "SystemExit": "terminated", "KeyboardInterrupt": "interrupted"}
    return named.get(type(error).__name__, "failed")


def _describe(error: BaseException | None) -> str | None:
    if error is None:
        return None
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    return f"{name}: {value}"[:2000]


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _commit(folder: Path) -> dict[str, Any] | None:
    """Return the git commit of the notebook's folder, and whether files differ from it; None without a repository."""
    answers = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder or None, capture_output=True, text=True, timeout=GIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        answers.append(done.stdout.strip())
    return {"sha": answers[0], "dirty": bool(answers[1])}


def _write(path: Path, record: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(record, indent=1) + "\n")
