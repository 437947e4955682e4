"""SIGTERM leaves through the `finally` clauses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


@contextmanager
def terminated_as_exit(first: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Within it SIGTERM raises `SystemExit` with the usual exit status.

    Args:
        first: called before that, at the first SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return

    heard = False

    def leave(_number: int, _frame: FrameType | None) -> None:
        nonlocal heard
        if not heard:
            heard = True
            first()
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
