"""A cache of values read from many small files, in one file. Listing thousands of runs then opens one file.

A cached value is valid while its files are unchanged (modification time, size, inode). A value is not cached if its
file changed a moment ago, or if the value may still change. Any reader may write the cache. A reader replaces the whole
cache file by renaming, so other readers see the old or the new file. A lost value is read again from its files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from workbench.trace.files.atomic import write_atomic
from workbench.trace.files.text import parse_json, whole_lines

FORMAT = 2  # increased with the format of `run.json`: lines of another format are ignored
YOUNG_S = 5.0  # a file may change again within the resolution of its time stamp
Signature = list[list[int]]


@final
class Index:
    """Values by name, each with the state of its files.

    Args:
        path: the cache file. A missing or damaged file is an empty cache.
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
        """Return the value of a name if its files are still in this state; otherwise None."""
        found = self._lines.get(name)
        return found[1] if found is not None and found[0] == signature else None

    def put(self, name: str, signature: Signature, value: Any) -> None:
        """Store a value, unless its files are too new to detect a further change."""
        newest = max((state[0] for state in signature), default=0) / 1e9
        if abs(time.time() - newest) > YOUNG_S:
            self._lines[name] = (signature, value)
            self._changed += 1

    def save(self, names: Iterable[str]) -> None:
        """Write the cache with these names only.

        Does nothing if nothing changed, or if the file cannot be written.
        """
        kept = set(names) & set(self._lines)
        if not self._changed and not self.damaged and len(kept) == len(self._lines):
            return
        with suppress(OSError):
            write_atomic(
                self._path, "".join(json.dumps([FORMAT, name, *self._lines[name]]) + "\n" for name in sorted(kept))
            )
        self._changed = 0


def state_of(path: Path) -> list[int] | None:
    """Return modification time in nanoseconds, size and inode of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size, found.st_ino]
