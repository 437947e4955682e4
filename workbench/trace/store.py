"""The run store: a folder of run folders, each with a `run.json` that is always complete.

A writer may be killed at any moment, and the disk may fill. So `run.json` is replaced atomically, and rows are only
appended. A running run keeps 32 KiB in reserve, so that its end can be recorded on a full disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from workbench.config import value_of
from workbench.errors import ConfigError, RunNotFound, WorkbenchError
from workbench.naming import did_you_mean
from workbench.trace.files.append import cannot_write
from workbench.trace.files.atomic import write_atomic
from workbench.trace.files.lock import locked
from workbench.trace.index import Index
from workbench.trace.index import state_of as file_state
from workbench.trace.info import FORMAT as FORMAT
from workbench.trace.info import read_info as read_info
from workbench.trace.processes import ENDED as ENDED
from workbench.trace.processes import this_process, with_true_status
from workbench.trace.recorder import metrics_name

INDEX_NAME = ".index.jsonl"
RESERVE_NAME, RESERVE_BYTES = ".reserve", 32 * 1024  # space for a `run.json` on a full disk
DRAFT_LIFETIME_S = 3600.0  # an older draft was left by a killed writer
SWEEP_VARIABLE = "WORKBENCH_SWEEP"  # names the cell of a sweep that a process runs, as a JSON object


@final
@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's folder and its `run.json`."""

    folder: Path
    info: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.info.get("id", self.folder.name))

    @property
    def status(self) -> str:
        return str(self.info.get("status", "unknown"))


@final
@dataclass(frozen=True, slots=True)
class RunListing:
    """Runs, oldest first, and the folders that could not be read, each with its reason."""

    runs: tuple[StoredRun, ...]
    damaged: tuple[str, ...]

    def __iter__(self) -> Iterator[StoredRun]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)


def runs_root() -> Path:
    """Return the folder of the run store: $WORKBENCH_RUNS, that of `workbench config`, or `runs` in the current folder."""
    return Path(value_of("runs") or "runs")


def new_run(info: dict[str, Any], root: Path | None = None) -> Path:
    """Make a folder for a run, named after time, algorithm and problem. Folder and `run.json` appear at the same time.

    Args:
        info: entries of `run.json`. `format`, `id`, `created` and `status` are added.
        root: the store; None for `runs_root()`.

    Raises:
        ConfigError: the store cannot be written.
    """
    root = Path(root) if root is not None else runs_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_drafts(root)
        draft = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    except OSError as error:
        raise ConfigError(
            f"runs cannot be written to {root} ({error.strerror}): name another folder in WORKBENCH_RUNS"
        ) from error
    cell = json.loads(os.environ.get(SWEEP_VARIABLE) or "{}")
    note = cell.pop("runs_file", None)  # the sweep reads the names of the cell's runs from this file
    info = {**info, "sweep": cell} if cell else info
    try:
        folder = _named(draft, {"format": FORMAT, "status": "starting", "process": this_process(), **info}, root)
        if note:
            with open(note, "a") as names:
                names.write(f"{folder.name}\n")
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        cause = error.__cause__ if isinstance(error, WorkbenchError) else error
        if isinstance(cause, OSError):
            raise cannot_write(root, cause) from cause
        raise
    return folder


def _named(draft: Path, info: dict[str, Any], root: Path) -> Path:
    """Rename a draft to a unique name."""
    now = datetime.now(UTC)
    words = ((info.get("algorithm") or {}).get("name") or "run", (info.get("problem") or {}).get("name") or "")
    stem = "-".join([now.strftime("%Y%m%d-%H%M%S"), *filter(None, map(_slug, words))])
    draft.chmod(0o755)
    with suppress(OSError), (draft / RESERVE_NAME).open("wb") as file:
        file.write(secrets.token_bytes(RESERVE_BYTES))  # no zeros: some file systems do not store them
    while True:
        folder = root / f"{stem}-{secrets.token_hex(2)}"
        if folder.exists():
            continue
        write_info(draft, {**info, "id": folder.name, "created": now.isoformat()})
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            continue  # another process took the name in between
        return folder


def _remove_drafts(root: Path) -> None:
    """Remove drafts of killed writers from the store."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in filter(_is_draft, entries):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > DRAFT_LIFETIME_S:
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _is_draft(entry: os.DirEntry[str]) -> bool:
    name = entry.name
    return name.startswith((".new-", ".removed-")) or (name.startswith(".") and name.endswith(".tmp"))


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:40]


def write_info(folder: Path, info: dict[str, Any]) -> None:
    """Replace `run.json` atomically.

    Raises:
        WorkbenchError: the file cannot be written; the old one stays. The message names the reason and the fix.
    """
    folder = Path(folder)
    text = json.dumps(info, indent=1) + "\n"
    try:
        try:
            write_atomic(folder / "run.json", text)
        except OSError:
            if not (folder / RESERVE_NAME).exists():
                raise
            (folder / RESERVE_NAME).unlink()
            write_atomic(folder / "run.json", text)
        if info.get("status") in ENDED:
            (folder / RESERVE_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def update_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change entries of a run's `run.json`, under a lock, so that concurrent changes are not lost.

    Returns the new content.
    """
    with locked(folder):
        info = {**read_info(folder), **changes}
        write_info(folder, info)
    return info


def list_runs(root: Path | None = None) -> RunListing:
    """Return all runs of a store, oldest first. A folder that cannot be read is skipped and named in `damaged`.

    A run whose `run.json` says "running" though its processes are gone has the status "killed" or "lost" (see
    `processes`). `.index.jsonl` caches what was read, and may be removed at any time (see `index`).
    """
    root = Path(root) if root is not None else runs_root()
    names = sorted(name for name in os.listdir(root) if not name.startswith(".")) if root.is_dir() else []
    index = Index(root / INDEX_NAME)
    runs, damaged = [], []
    for name in names:
        folder = root / name
        state = file_state(folder / "run.json")
        if state is None and not (folder / metrics_name(0)).exists():
            continue  # not a run
        info = index.get(name, [state]) if state else None
        try:
            if not isinstance(info, dict):
                info = read_info(folder)
                if state and info.get("status") in ENDED:
                    index.put(name, [state], info)
            runs.append(StoredRun(folder, with_true_status(folder, info)))
        except RunNotFound as error:
            damaged.append(str(error))
    if index.damaged:
        damaged.append(f"{index.damaged} lines of {root / INDEX_NAME}, a cache, which is rebuilt")
    index.save(run.folder.name for run in runs)
    return RunListing(tuple(runs), tuple(damaged))


def remove_run(folder: Path) -> None:
    """Remove a run. The run leaves the store at once, even if the removal of its files takes a while.

    Raises:
        RunNotFound: the folder is not a run's folder, or cannot be removed.
    """
    if not (folder / "run.json").exists() and not (folder / metrics_name(0)).exists():
        raise RunNotFound(f"{folder} is not a run's folder and was not removed: `workbench runs` lists the runs")
    gone = folder.with_name(f".removed-{folder.name}-{secrets.token_hex(2)}")
    try:
        folder.rename(gone)
        shutil.rmtree(gone)
    except OSError as error:
        raise RunNotFound(f"{folder} cannot be removed ({error.strerror or error}): ask its owner to do it") from error


def find_run(name: str | Path, root: Path | None = None) -> Path:
    """Return the folder of a run, by its path, its id, or a unique part of its id; "last" is the newest run.

    Raises:
        RunNotFound: no run or several match. The message names the nearest ones.
    """
    root = Path(root) if root is not None else runs_root()
    if isinstance(name, Path) or os.sep in name:
        read_info(Path(name))
        return Path(name)
    listing = list_runs(root)
    if name in ("last", "latest") and len(listing):
        return max(listing, key=lambda run: str(run.info.get("created", ""))).folder
    runs = {run.folder.name: run.folder for run in listing}
    if name in runs:
        return runs[name]
    matches = (
        [run.folder.name for run in listing if run.id == name]  # its folder was renamed
        or [run for run in runs if name and run.startswith(name)]
        or [run for run in runs if name and name in run]
    )
    if len(matches) == 1:
        return runs[matches[0]]
    if matches:
        raise RunNotFound(f"{len(matches)} runs match {name!r}: {', '.join(matches[-5:])}. Give more of the name")
    if not runs:
        raise RunNotFound(f"no run {name!r}: the run store {root} is empty (WORKBENCH_RUNS says where it is)")
    hint = did_you_mean(name, runs, most=3, cutoff=0.3) or f"the newest are {', '.join(list(runs)[-3:])}"
    raise RunNotFound(f"no run {name!r} in {root}; {hint}")
