"""SIGINT at a safe moment: once for a rank that trains, and not while a cluster sends work to its ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BOUND_S = 2.0  # how long an interrupt waits for the end of a call on which peers depend
RETRY_S = 0.01


@contextmanager
def single_interrupt(bound: Callable[[], bool] = lambda: False) -> Iterator[Callable[[], None]]:
    """Within the block the first SIGINT raises `KeyboardInterrupt`, and later ones are ignored.

    Outside the main thread, or if SIGINT is ignored already, nothing changes.

    Args:
        bound: returns True while peers depend on a call of this rank. The interrupt then waits, for `BOUND_S` at most.

    Yields:
        A function that ignores every later SIGINT; to be called when the rank begins to leave.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield lambda: None
        return
    deadline: list[float] = []
    over = threading.Event()

    def again() -> None:
        if not over.wait(RETRY_S):
            os.kill(os.getpid(), signal.SIGINT)

    def leave() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupt(_number: int, _frame: Any) -> None:
        deadline.append(time.monotonic() + BOUND_S)
        if bound() and time.monotonic() < deadline[0]:
            threading.Thread(target=again, name="workbench-interrupt", daemon=True).start()
            return
        leave()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield leave
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)


@contextmanager
def deferred_interrupt(reason: str) -> Iterator[None]:
    """Within the block a SIGINT waits for the block's end and then raises `KeyboardInterrupt(reason)`.

    A second one acts at once. Outside the main thread, or if SIGINT is ignored already, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    heard: list[int] = []

    def interrupt(number: int, _frame: Any) -> None:
        heard.append(number)
        if len(heard) > 1:
            signal.signal(signal.SIGINT, before)
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(heard) == 1:
        if before is signal.default_int_handler:
            raise KeyboardInterrupt(reason)
        signal.raise_signal(signal.SIGINT)
