"""Read JSON from any file. Invalid, too deep or too long content is a `ValueError`, found in little time and memory."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SMALL_BYTES = 32 * 1024 * 1024  # limit of a file with one value, such as `run.json`
LINE_BYTES = 4 * 1024 * 1024  # limit of a line of metrics, spans, events or commands
BLOCK_BYTES = 16 * 1024 * 1024  # bytes of a file that are read at once
MAX_TIMES = 200  # largest compression ratio: a higher one indicates a file that was made to fill the memory
MAX_DIGITS = 300  # of an integer: a longer one does not fit a float


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many nested values for a record") from None


def read_json(path: Path) -> Any:
    """Return the value of a small JSON file.

    Raises:
        OSError: the file cannot be read, or is not a regular file (a pipe may never end).
        ValueError: the file is not JSON, or is larger than `SMALL_BYTES`.
    """
    with open_file(path) as file:
        text = file.read(SMALL_BYTES + 1)
    if len(text) > SMALL_BYTES:
        raise ValueError(f"it has more than {SMALL_BYTES} bytes, the limit for such a file")
    return parse_value(text.decode())


def parse_value(text: str) -> Any:
    """Return the value of a JSON text of `run.json`: like `parse_json`, but refuse integers that are too long.

    Raises:
        ValueError: as for `parse_json`, or an integer is too long.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("too many nested values for a record") from None


def open_file(path: Path) -> Any:
    """Open a file to read bytes.

    Raises:
        OSError: the file does not exist, or is not a regular file.
    """
    # Opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def whole_lines(path: Path) -> Iterator[list[str | None]]:
    """Yield the lines of a file, some megabytes at a time; None in place of a line that is longer than `LINE_BYTES`.

    An incomplete last line is left out: its writer crashed, or is still writing it.
    """
    rest, too_long = b"", False
    with open_file(path) as file:
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            found = [_line(line) for line in lines]
            if too_long and found:
                found[0], too_long = None, False
            if len(rest) > LINE_BYTES:
                rest, too_long = b"", True
            if found:
                yield found


def unpacked(content: bytes) -> bytes:
    """Return the decompressed content of a gzip file.

    Raises:
        ValueError: it is not a gzip file, is truncated, or decompresses to more than `MAX_TIMES` times its size.
    """
    most = MAX_TIMES * len(content) + 1024 * 1024
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        found = reader.decompress(content, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(found) >= most:
        raise ValueError(f"it is compressed by a factor of {MAX_TIMES} or more")
    if not reader.eof:
        raise ValueError("it is truncated")
    return found


def _line(line: bytes) -> str | None:
    return line.decode(errors="replace") if len(line) <= LINE_BYTES else None


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
