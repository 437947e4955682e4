"""Write a file atomically: a reader sees the old content or the new one, also when the writer is killed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` at the end of the `with` block, and is removed after an error.

    Args:
        durable: wait for the disk: for the content before the file is renamed, and for the new name after.

    Raises:
        OSError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name.removeprefix('.')}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        _sync_folder(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of a file by a text, encoded as UTF-8.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "record.json"
    >>> write_atomic(path, "old")
    >>> write_atomic(path, "new")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('new', 1)

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_file(path) as file:
        file.write(text.encode())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
