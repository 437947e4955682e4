"""A cache of what was read from many small files, in one file: listing thousands of runs opens one of them and not thousands.

A line is believed only while the files it was made from are as they were (time of change, size, file number), and none is kept
of a file that changed a moment ago, or of one that says it is not final. Whoever lists may write it, whole and by renaming, so that a
reader sees one or the other; what is lost between two writers, or by removing the file, is read again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from workbench.trace.atomic import write_atomic
from workbench.trace.text import parse_json, whole_lines

FORMAT = 1
YOUNG_S = 5.0  # a file may change again within the grain of its time stamp
Signature = list[list[int]]


@final
class Index:
    """Values by name, each with the state of the files that it was made from.

    Args:
        path: the file; one that is not there, or damaged, is empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, tuple[Signature, Any]] = {}
        self._changed = 0
        self.damaged = 0  # lines that could not be read
        with suppress(OSError):
            for lines in whole_lines(path):
                self._read(lines)

    def _read(self, lines: list[str | None]) -> None:
        for line in lines:
            try:
                version, name, signature, value = parse_json(line or "")
                if version == FORMAT:
                    self._lines[name] = (signature, value)
            except (ValueError, TypeError):
                self.damaged += 1

    def get(self, name: str, signature: Signature) -> Any:
        """The value of that name, if it was made from files in this state; None otherwise."""
        found = self._lines.get(name)
        return found[1] if found is not None and found[0] == signature else None

    def put(self, name: str, signature: Signature, value: Any) -> None:
        """Keep a value, unless its files are too young to be told apart from the next state of them."""
        newest = max((state[0] for state in signature), default=0) / 1e9
        if abs(time.time() - newest) > YOUNG_S:
            self._lines[name] = (signature, value)
            self._changed += 1

    def save(self, names: Iterable[str]) -> None:
        """Write it, without what is of none of these names; nothing is written where nothing changed or nothing can be written."""
        kept = set(names) & set(self._lines)
        if not self._changed and not self.damaged and len(kept) == len(self._lines):
            return
        with suppress(OSError):
            write_atomic(self._path, "".join(json.dumps([FORMAT, name, *self._lines[name]]) + "\n" for name in sorted(kept)))
        self._changed = 0


def state_of(path: Path) -> list[int] | None:
    """Time of change in nanoseconds, size and number of a file; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]
