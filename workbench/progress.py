"""`progress_line`: how far a long computation is, and how long it still takes."""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from typing import Any, final

from workbench.logs import LOG, is_quiet

LINE_S = 30.0  # seconds between two lines of a log
LOG_LINE = "{n_fmt} of {total_fmt}{unit} after {elapsed}, {remaining} left{postfix}"
WITHOUT_TOTAL = "{n_fmt}{unit} after {elapsed}{postfix}"


@final
class _LogFile:
    """A file for tqdm whose lines are messages of the logger."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        """Log a line."""
        if line := text.strip("\r\n "):
            LOG.info("%s", line)

    def flush(self) -> None:
        """Nothing to do."""


def progress_line(total: int | None, what: str, *, done: int = 0, shown: bool = True) -> Any:
    """Return a progress line of tqdm: call its `update`, and use it as a context manager or `close` it.

    On a terminal one line is updated, and removed at the end. Elsewhere a line is logged every 30 seconds.

    Args:
        total: how many there are; None if it is not known.
        what: what is counted, in the plural, such as "steps".
        done: how many of them were done before.
        shown: False: print nothing, as with `--quiet`.
    """
    from tqdm import tqdm

    about: dict[str, Any] = {"total": total, "unit": f" {what}", "initial": done, "leave": False, "miniters": 1}
    about["disable"] = not shown or is_quiet()
    if sys.stderr.isatty():
        return tqdm(**about, file=sys.stderr, ncols=get_terminal_size().columns)
    text = WITHOUT_TOTAL if total is None else LOG_LINE
    return tqdm(**about, file=_LogFile(), mininterval=LINE_S, delay=LINE_S, bar_format=text)


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds.

    >>> clock(75), clock(3725.4)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
