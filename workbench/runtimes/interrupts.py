"""An interrupt of a rank that trains: raised once, and not in the midst of what it does to leave."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heard_once() -> Iterator[Callable[[], None]]:
    """The first SIGINT raises `KeyboardInterrupt`, later ones are ignored until the block is left.

    Outside the main thread, or where SIGINT is ignored anyway, nothing changes.

    Yields:
        To be called when the rank begins to leave: from then on none is heard.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield lambda: None
        return

    def leave() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupt(_number: int, _frame: Any) -> None:
        leave()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield leave
    finally:
        signal.signal(signal.SIGINT, before)
