"""`Waiting`: one line that says what a long wait is for.

On a terminal and in a notebook it is updated and then removed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, final

from workbench import units
from workbench.clusters.supervision.start_progress import StatusLine
from workbench.errors import LaunchError
from workbench.machine import in_notebook
from workbench.runtimes.liveness.failure_detector import read_heartbeat

SHOWN_S = 1.0  # time between two updates of a line
POLL_S = 0.05
SILENT_S = 5.0  # a training rank writes its heartbeat every second
SIGNAL_S = 10.0  # how long an engine's nanny may take to forward an interrupt


@final
class Waiting:
    """The line of one wait.

    In a notebook and on a terminal it is updated. Elsewhere it is printed each time the waiting time has doubled.

    Args:
        what: what the wait is for; a function is called each time the line is printed.
        silent: print nothing.

    Example:
        with Waiting("the ranks to start") as waiting:
            while not started():
                waiting.update()
                time.sleep(0.05)
    """

    def __init__(self, what: str | Callable[[], str], *, silent: bool = False) -> None:
        self._what, self._silent = what, silent
        self._begin = time.monotonic()
        self._next_s = units.WAIT_REPORT_S
        self._display: Any = None
        self._width = 0  # width of the line on the terminal

    def update(self) -> None:
        """Print the line if it is due. The caller of a wait calls this repeatedly."""
        waited = time.monotonic() - self._begin
        if waited >= self._next_s and not self._silent:
            replaced = in_notebook() or sys.stderr.isatty()
            while self._next_s <= waited:
                self._next_s = waited + SHOWN_S if replaced else 2 * self._next_s
            self._show(f"waiting {waited:.0f} s for {self._what if isinstance(self._what, str) else self._what()}")

    def until(self, done: Callable[[float], Any], timeout_s: float | None = None) -> bool:
        """Call `done(seconds)` until it returns True.

        Args:
            done: waits at most that many seconds, and returns whether the event has happened.
            timeout_s: limit in seconds; None for no limit.

        Returns:
            Whether the event happened in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if done(max(0.0, left)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self.update()

    def _show(self, line: str) -> None:
        if in_notebook():
            self._draw(line)
        elif sys.stderr.isatty():
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _draw(self, line: str) -> None:
        with contextlib.suppress(Exception):  # a kernel that is ending; a line must not fail a wait
            if self._display is None:
                from IPython import display

                show: Any = display.display
                self._display = show(StatusLine(line), display_id=True)
            else:
                self._display.update(StatusLine(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._draw("")
        elif self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


def silent_ranks(folder: Path, num_ranks: int) -> str:
    """Return the ranks whose heartbeat is old, as "; last heartbeat: rank 1 20 s ago"; "" if there are none."""
    ages = {}
    for rank in range(num_ranks):
        if (beat := read_heartbeat(folder, rank)) is not None:
            ages[rank] = beat["silent_s"]
    old = [f"rank {rank} {age_s:.0f} s ago" for rank, age_s in ages.items() if age_s > SILENT_S]
    return f"; last heartbeat: {', '.join(old[:4])}{', ...' if len(old) > 4 else ''}" if old else ""


def interrupt_ranks(client: Any, ranks: Sequence[int], timeout_s: float = SIGNAL_S) -> None:
    """Send SIGINT to engines through their nannies.

    Args:
        client: the ipyparallel client.
        ranks: which engines.
        timeout_s: limit in seconds.

    Raises:
        LaunchError: a nanny did not answer in time, because it has ended or is stopped.
    """
    over, errors = threading.Event(), list[BaseException]()

    def send() -> None:
        try:
            client.send_signal(signal.SIGINT, targets=list(ranks), block=True)
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            errors.append(error)
        over.set()

    # The client's own wait has no time limit.
    threading.Thread(target=send, name="workbench-signal", daemon=True).start()
    targets = f"ranks {', '.join(map(str, ranks))}"
    with Waiting(f"{targets} to be interrupted") as waiting:
        if not waiting.until(over.wait, timeout_s):
            raise LaunchError(f"the interrupt did not reach all of {targets} in {timeout_s:g} s: heal() the cluster")
    if errors:
        raise errors[0]
