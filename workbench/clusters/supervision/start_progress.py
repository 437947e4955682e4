"""The line that is shown while ranks start. A terminal and a notebook update it; a last line stays."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from typing import Any, final

from workbench.machine import in_notebook, num_cores

SHOWN_S = 0.25  # time between two updates of the line


def count(num_ranks: int) -> str:
    """Return the number with its noun: "1 rank", "4 ranks"."""
    return f"{num_ranks} rank{'s' if num_ranks != 1 else ''}"


@final
class Progress:
    """The line of one start.

    Args:
        num_ranks: number of ranks.
        title: what starts the ranks.
        silent: print nothing.
        background: the cell does not wait. In a notebook, the line is then a separate output, updated after the
            cell's end.
    """

    def __init__(self, num_ranks: int, title: str, *, silent: bool, background: bool = False) -> None:
        self._num_ranks, self._title, self._silent = num_ranks, title, silent
        self._watched = (
            (sys.stdout.isatty() or in_notebook()) and not silent and not os.environ.get("IPP_NONINTERACTIVE")
        )
        self._begin = self._shown = time.monotonic()
        self._display: Any = None
        if background and in_notebook() and not silent:
            from IPython import display

            show: Any = display.display
            self._display = show(StatusLine(f"0 of {num_ranks} ranks ready ({title})"), display_id=True)

    @property
    def shows_line(self) -> bool:
        """Return True if no other line about the start is needed: this one is updated, or nothing may be printed."""
        return self._silent or self._watched or self._display is not None

    def ready(self, number: int, waits: str | None = None) -> None:
        """Show how many ranks are ready.

        Args:
            number: how many.
            waits: why none can be ready yet, such as a job's place in a queue.
        """
        if time.monotonic() - self._shown < SHOWN_S or not (self._watched or self._display):
            return
        self._shown = time.monotonic()
        state = waits or f"{number} of {self._num_ranks} ranks ready"
        self._show(f"{state}, {self._shown - self._begin:.1f} s ({self._title})")

    def finish(self) -> None:
        """Show that all ranks are ready."""
        seconds = time.monotonic() - self._begin
        self._last(f"{count(self._num_ranks)} ready in {seconds:.1f} s ({self._title}, {num_cores()} cores)")

    def fail(self, error: BaseException) -> None:
        """Show that the ranks did not start. A caller that waits gets the error itself."""
        if self._display is not None:
            self._show(f"{count(self._num_ranks)} did not start: {error}")

    def _show(self, line: str) -> None:
        if self._display is not None:
            with contextlib.suppress(Exception):  # a kernel that is ending; a line must not fail a start
                self._display.update(StatusLine(line))
        else:
            print(f"\r{line}", end="", flush=True)

    def _last(self, line: str) -> None:
        if self._silent:
            return
        if self._display is not None:
            self._show(line)
        else:
            print(f"\r{line}" + " " * 12 if self._watched else line, flush=True)


@final
class StatusLine:
    """A line of text as a notebook shows it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>"
