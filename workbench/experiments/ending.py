"""SIGTERM leaves through the `finally` clauses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Within it SIGTERM raises `SystemExit` with the usual exit status."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
