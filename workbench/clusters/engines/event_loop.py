"""An event loop in its own thread, for ipyparallel's launchers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, final

from workbench.errors import LaunchError

END_S = 10.0
POLL_S = 0.1


@final
class LoopThread:
    """An event loop in a thread. It works in a script and in a notebook, whose own loop is busy with the cell."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workbench-cluster", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float, ended: threading.Event | None = None) -> Any:
        """Run a coroutine and return its result.

        Args:
            work: the coroutine.
            timeout_s: limit in seconds.
            ended: set when the cluster is stopped.

        Raises:
            TimeoutError: `work` takes longer.
            LaunchError: `ended` was set meanwhile.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(max(0.0, min(POLL_S, deadline - time.monotonic())))
                except TimeoutError:
                    if future.done() or time.monotonic() > deadline:  # raised by the work itself, or by the deadline
                        raise
                if ended is not None and ended.is_set():
                    raise LaunchError("the cluster was stopped while it started")
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)
        if not self._loop.is_running():
            self._loop.close()
