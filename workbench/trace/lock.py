"""One writer at a time, as far as the file system can say so."""

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

LOCK_S = 5.0  # who holds a lock longer was stopped in the midst of it, and must not stop others


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone among those that ask so for this folder; a process that ends, however it ends, holds nothing any more.

    Where the file system knows no locks, or the other one does not come back, not alone.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield  # who writes there will say why not
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
