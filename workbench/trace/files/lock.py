"""A lock of a folder: one writer at a time, if the file system supports locks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None  # type: ignore[assignment]

LOCK_S = 5.0  # a process that holds a lock longer was suspended, and must not block others


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder within the block. If the process ends, even by a kill, the system releases the lock.

    If the file system has no locks, or another process holds the lock for `LOCK_S`, the block runs without it.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield  # the caller's write raises the error
        return
    try:
        deadline = time.monotonic() + LOCK_S
        while fcntl is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                break
        yield
    finally:
        with suppress(OSError):
            os.close(handle)
