"""When an interrupt may end a request of an engine; on real engines: tests/notebooks/test_kernel_cells.py."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ipyparallel", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench.clusters.engines import kernel
from workbench.clusters.engines.kernel import EngineKernel, runs_code_of

WAITS = "def call(function):\n    return function()"


def called(namespace: dict[str, Any], function: Callable[[], Any], path: str = "cell") -> Any:
    """The function's result, called by a function of a namespace whose file has this path."""
    exec(compile(WAITS, path, "exec"), namespace)
    return namespace["call"](function)


def test_only_code_of_the_user_that_the_debugger_does_not_hold_is_interrupted() -> None:
    user: dict[str, Any] = {}
    assert not runs_code_of(user, sys._getframe())
    assert called(user, lambda: runs_code_of(user, sys._getframe()))
    assert not called({}, lambda: runs_code_of(user, sys._getframe()))
    held = lambda: runs_code_of(user, sys._getframe())  # noqa: E731
    assert not called(user, lambda: called({}, held, "/site-packages/debugpy/_vendored/pydevd/pydevd.py"))


class Request:
    """A request of a kernel that has no sockets."""

    def __init__(self) -> None:
        self.user: dict[str, Any] = {}
        self.kernel: Any = SimpleNamespace(shell=SimpleNamespace(user_ns=self.user))
        for name in ("_interrupt", "_interrupt_again"):
            setattr(self.kernel, name, getattr(EngineKernel, name).__get__(self.kernel))

    def __enter__(self) -> Request:
        EngineKernel.pre_handler_hook(self.kernel)
        return self

    def __exit__(self, *_: object) -> None:
        EngineKernel.post_handler_hook(self.kernel)


def wait(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.001)


def test_an_interrupt_waits_for_code_of_the_user() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Request() as request:
        signal.raise_signal(signal.SIGINT)
        wait(0.05)  # the kernel prepares the cell
        with pytest.raises(KeyboardInterrupt):
            called(request.user, lambda: wait(20))
    assert signal.getsignal(signal.SIGINT) is before


def test_with_the_reply_an_interrupt_is_over_and_does_not_reach_the_next_request() -> None:
    with Request() as request:
        called(request.user, lambda: None)
        signal.raise_signal(signal.SIGINT)
    with Request() as request:
        called(request.user, lambda: wait(0.1))


def test_code_of_the_kernel_that_does_not_end_is_interrupted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BOUND_S", 0.05)
    with Request():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            wait(20)
