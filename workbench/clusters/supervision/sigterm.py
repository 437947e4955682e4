"""Convert SIGTERM to an exception, so that `finally` clauses run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@contextmanager
def terminated_as_exit(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise `SystemExit` with the usual exit status at SIGTERM, within the block.

    Args:
        first: called before the exception is raised, at the first SIGTERM only.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return

    received = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        if not received:
            received = True
            first()
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
