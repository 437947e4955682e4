"""Append-only files of whole lines, and the error for a folder that cannot be written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from workbench.errors import ConfigError, WorkbenchError

BLOCK_BYTES = 64 * 1024


def cannot_write(folder: Path, error: OSError) -> WorkbenchError:
    """Return the error for a run or store that cannot be written."""
    why = error.strerror or str(error)
    fix = "free some space there, or name another run store in WORKBENCH_RUNS"
    return WorkbenchError(f"{folder} cannot be written ({why}): {fix}. What was written before is complete")


def create(path: Path) -> int:
    """Create an append-only file. Returns its descriptor.

    Raises:
        ConfigError: the file exists.
        OSError: it cannot be created.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already: give every run a separate folder (workbench.trace.new_run makes one)"
        ) from None


def open_append(path: Path) -> int:
    """Open an append-only file, or create it. Returns its descriptor.

    If a killed writer left an incomplete last line, the line is removed.

    Raises:
        OSError: it cannot be opened.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        if (found := os.pread(file, end - start, start).rfind(b"\n")) >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return file


def append(file: int, lines: list[str]) -> None:
    """Append whole lines in one write, so that readers see whole lines.

    If the disk is full, a partly written line is removed again.
    """
    data, done = "".join(lines).encode(), 0
    try:
        while done < len(data):
            done += os.write(file, data[done:])
    except OSError:
        part = done - (data.rfind(b"\n", 0, done) + 1)
        if part:
            with suppress(OSError):
                os.ftruncate(file, os.fstat(file).st_size - part)
        raise
