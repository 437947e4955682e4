"""An engine's kernel: ipyparallel's own, which an interrupt reaches only while it runs code of the user."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, final

from ipyparallel.engine.kernel import IPythonParallelKernel

BOUND_S = 2.0  # how long an interrupt waits for code of the user; longer than it takes to prepare a cell or its reply
RETRY_S = 0.01
DEBUGGER = f"{os.sep}debugpy{os.sep}"  # in the paths of its files


@final
class EngineKernel(IPythonParallelKernel):  # type: ignore[misc]  # ipyparallel has no types
    """A kernel whose requests always have a reply.

    ipykernel lets SIGINT raise `KeyboardInterrupt` from a request's arrival to its reply. If it is raised when the cell
    has ended and its reply has not been sent, there is no reply, and the client takes the engine for busy from then
    on. Raised in code of the debugger, it ends the trace of the thread. Here the interrupt waits for code of the user,
    for `BOUND_S` at most; with the reply it is over.
    """

    def pre_handler_hook(self) -> None:
        """Begin a request. ipykernel calls it on the main thread."""
        self._request_over = threading.Event()
        self._interrupted_s: float | None = None
        self._again_s = 0.0  # before then, the interrupts that wait are tried again
        self.saved_sigint_handler = signal.signal(signal.SIGINT, self._interrupt)

    def post_handler_hook(self) -> None:
        """End a request."""
        self._request_over.set()
        signal.signal(signal.SIGINT, self.saved_sigint_handler)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._interrupted_s = now if self._interrupted_s is None else self._interrupted_s
        if now < self._interrupted_s + BOUND_S and not runs_code_of(self.shell.user_ns, frame):
            if now >= self._again_s:  # one retry for all interrupts that wait
                self._again_s = now + RETRY_S
                waiting = threading.Thread(target=self._interrupt_again, args=(self._request_over,), daemon=True)
                waiting.start()
            return
        self._interrupted_s = None
        raise KeyboardInterrupt

    def _interrupt_again(self, request_over: threading.Event) -> None:
        if not request_over.wait(RETRY_S):
            self._again_s = 0.0
            os.kill(os.getpid(), signal.SIGINT)


def runs_code_of(namespace: dict[str, Any], frame: FrameType | None) -> bool:
    """Return whether this frame or a caller of it is code of a namespace, and the debugger does not hold it.

    Args:
        namespace: the globals of the code, such as IPython's `user_ns`.
        frame: the innermost frame.
    """
    runs = False
    while frame is not None:
        if DEBUGGER in frame.f_code.co_filename:
            return False
        runs = runs or frame.f_globals is namespace
        frame = frame.f_back
    return runs
