"""What a caller's wait says: for what, once that has lasted; one line, which moves where somebody looks at it, and goes with the wait."""

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
from workbench.clusters.supervision.start_progress import Line, in_notebook
from workbench.errors import LaunchError
from workbench.runtimes.liveness.failure_detector import read_heartbeat

SHOWN_S = 1.0  # how often a line moves
POLL_S = 0.05
SILENT_S = 5.0  # a rank that trains leaves its beat every second
SIGNAL_S = 10.0  # how long an engine's nanny may take to pass an interrupt on


@final
class Waiting:
    """The line of one wait. In a notebook and on a terminal it is replaced; elsewhere it comes again when the time has doubled.

    Args:
        what: for what; asked whenever it is said.
        silent: say nothing.

    Example:
        with Waiting("the ranks to start") as waiting:
            while not there():
                waiting.look()
                time.sleep(0.05)
    """

    def __init__(self, what: str | Callable[[], str], *, silent: bool = False) -> None:
        self._what, self._silent = what, silent
        self._begin = time.monotonic()
        self._next_s = units.SAYS_S
        self._display: Any = None
        self._width = 0  # of the line on the terminal

    def look(self) -> None:
        """To be called now and then by who waits."""
        waited = time.monotonic() - self._begin
        if waited >= self._next_s and not self._silent:
            moves = in_notebook() or sys.stderr.isatty()
            while self._next_s <= waited:
                self._next_s = waited + SHOWN_S if moves else 2 * self._next_s
            self._show(f"waiting {waited:.0f} s for {self._what if isinstance(self._what, str) else self._what()}")

    def until(self, there: Callable[[float], Any], timeout_s: float | None = None) -> bool:
        """Until `there`, which waits for so long at most, says so; whether it did in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = POLL_S if deadline is None else min(POLL_S, deadline - time.monotonic())
            if there(max(0.0, left)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self.look()

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
                self._display = show(Line(line), display_id=True)
            else:
                self._display.update(Line(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._draw("")
        elif self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


def silent_ranks(folder: Path, num_ranks: int) -> str:
    """Words for a wait for a training, "; last heard of: rank 1 20 s ago": of the ranks whose beat is old, "" if there are none."""
    ages = {}
    for rank in range(num_ranks):
        if (beat := read_heartbeat(folder, rank)) is not None:
            ages[rank] = beat["silent_s"]
    old = [f"rank {rank} {age_s:.0f} s ago" for rank, age_s in ages.items() if age_s > SILENT_S]
    return f"; last heard of: {', '.join(old[:4])}{', ...' if len(old) > 4 else ''}" if old else ""


def interrupt_ranks(client: Any, ranks: Sequence[int], timeout_s: float = SIGNAL_S) -> None:
    """Send SIGINT to engines through their nannies.

    Raises:
        LaunchError: a nanny did not answer in time: it is gone, or stopped.
    """
    over, errors = threading.Event(), list[BaseException]()

    def send() -> None:
        try:
            client.send_signal(signal.SIGINT, targets=list(ranks), block=True)
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            errors.append(error)
        over.set()

    threading.Thread(target=send, name="workbench-signal", daemon=True).start()  # the client's own wait has no end
    whom = f"ranks {', '.join(map(str, ranks))}"
    with Waiting(f"{whom} to be interrupted") as waiting:
        if not waiting.until(over.wait, timeout_s):
            raise LaunchError(f"the interrupt did not reach all of {whom} in {timeout_s:g} s: heal() the cluster")
    if errors:
        raise errors[0]
