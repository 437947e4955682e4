"""A test that waits for an event returns as soon as it has happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LOOK_S = 0.02


def within(seconds: float, look: Callable[[], Any], good: Callable[[Any], bool] = bool) -> Any:
    """What `look` finds when that is good, or when the time is over."""
    deadline = time.monotonic() + seconds
    while not good(found := look()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return found


def until(look: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    """Wait until `look` is true; raise AssertionError with `what` if the time is over."""
    assert within(seconds, look), f"still not: {what}"
