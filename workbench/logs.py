"""The logger `workbench`: messages of the library, and how the command line shows them.

A program that configures logging gets them there. Otherwise only warnings are printed, on standard error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

LOG = logging.getLogger("workbench")


@final
class UnconfiguredHandler(logging.NullHandler):
    """Does nothing if the program has configured logging. Otherwise it prints warnings, as Python does for loggers
    without a handler: a checkpoint that cannot be written must not be silent.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Print a warning on standard error, unless another handler gets it."""
        others = [one for one in (*LOG.handlers, *logging.getLogger().handlers) if one is not self]
        if not others and logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
        return True


LOG.addHandler(UnconfiguredHandler())


@final
class _TerminalHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Prints messages above a progress line that is shown at the time. Warnings begin with `workbench:`."""

    def emit(self, record: logging.LogRecord) -> None:
        if "tqdm" not in sys.modules:
            return super().emit(record)
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"workbench: {text}" if record.levelno >= logging.WARNING else text


def is_quiet() -> bool:
    """Return True if no progress is to be shown: `--quiet`, or the program has set a level above INFO."""
    return LOG.level > logging.INFO


@contextmanager
def shown_on_stderr(level: int) -> Iterator[None]:
    """Within the block, print the logger's messages from this level on, and nothing twice."""
    before = LOG.handlers[:], LOG.level, LOG.propagate
    LOG.handlers[:], LOG.propagate = [_TerminalHandler(sys.stderr)], False
    LOG.setLevel(level)
    try:
        yield
    finally:
        LOG.handlers[:], level, LOG.propagate = before
        LOG.setLevel(level)
