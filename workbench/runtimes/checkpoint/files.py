"""Checkpoints as they lie in a run's folder: a part for each rank, and beside it a record that makes it whole.

A part is written to another name, brought to the disk and renamed; its record, with the part's checksum, is written last and
in the same way. So whatever a process is killed in, a part with a record is a whole one. A checkpoint is complete when all of
its ranks' records are there; nobody waits for anybody to find out.

    checkpoint-00001.pt, checkpoints/stop-rank-00001.json   left by a stop, of rank 1
    checkpoints/step-00000004-rank-00001.pt, .json          kept while it ran, behind step 4 (where ranks are at steps of
                                                            their own: behind the one that all have come to)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from workbench.errors import ConfigError
from workbench.trace.text import read_json

FORMAT = 5  # of a record and its rank file; 4 and older keep a program's state as a list
SHA_256_UP_TO = 3  # it took as long as all else of writing a part
BLOCK = 1 << 20  # bytes read at a time
FOLDER = "checkpoints"
RECORD = re.compile(r"step-(\d{8,18})-rank-(\d{5,18})\.json")


class Damaged(Exception):
    """A part that is not what was written; its text says which and how."""


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is complete, or of format 1.

    Attributes:
        step: behind which it was kept while the run went on; None for the one that a stop left, which is the newest.
        num_ranks: how many parts it has.
    """

    folder: Path
    step: int | None
    num_ranks: int

    def __str__(self) -> str:
        return "that of the stop" if self.step is None else f"that of step {self.step}"

    def part(self, rank: int) -> Path:
        """A rank's part."""
        return part_of(self.folder, self.step, rank)


def part_of(folder: Path, step: int | None, rank: int) -> Path:
    """Where a rank's part lies."""
    if step is None:
        return folder / f"checkpoint-{rank:05d}.pt"
    return folder / FOLDER / f"step-{step:08d}-rank-{rank:05d}.pt"


def record_of(part: Path) -> Path:
    """Where a part's record lies."""
    stop = part.name.startswith("checkpoint-")
    return part.parent / FOLDER / f"stop-rank-{part.stem.split('-')[1]}.json" if stop else part.with_suffix(".json")


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Those that can be gone on from, the newest first, as far as can be told without reading their parts."""
    found = [Checkpoint(folder, step, num_ranks) for step, num_ranks in _whole_steps(folder).items()]
    found.sort(key=lambda checkpoint: checkpoint.step or 0, reverse=True)
    parts = sorted(folder.glob("checkpoint-*.pt"))
    records = [_read(record_of(path)) for path in parts]
    num_ranks = next((int(record["num_workers"]) for record in records if record), len(parts))
    if parts and len(parts) == num_ranks and (all(records) or not any(record_of(path).exists() for path in parts)):
        found.insert(0, Checkpoint(folder, None, num_ranks))
    return found


def ranks_kept(folder: Path) -> int:
    """How many ranks the newest checkpoint is of; 0 without any."""
    return next((checkpoint.num_ranks for checkpoint in complete_checkpoints(folder)), 0)


def _whole_steps(folder: Path) -> dict[int, int]:
    """step -> number of ranks, of the checkpoints all of whose records are there, and of as many ranks (they may have become fewer)."""
    records: dict[int, dict[int, int | None]] = {}  # step -> rank -> of how many
    for path in sorted((folder / FOLDER).glob("step-*-rank-*.json")):
        if name := RECORD.fullmatch(path.name):
            record = _read(path)
            records.setdefault(int(name[1]), {})[int(name[2])] = record["num_workers"] if record else None
    whole = {}
    for step, ranks in records.items():
        num_ranks = next((number for number in ranks.values() if number), 0)
        if num_ranks and all(rank in ranks and ranks[rank] in (num_ranks, None) for rank in range(num_ranks)):
            whole[step] = num_ranks
    return whole


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("num_workers"), int) else None


def write_part(path: Path, save: Callable[[BinaryIO], None], facts: dict[str, Any]) -> None:
    """Write a part by `save` and then its record: `facts`, and format, size and checksum of the part."""
    record_of(path).parent.mkdir(exist_ok=True)
    record_of(path).unlink(missing_ok=True)
    sink = _write(path, save)
    record = {"format": FORMAT, **facts, "bytes": sink.num_bytes, "crc32": sink.sum}
    _write(record_of(path), lambda file: file.write(json.dumps(record).encode()))


@final
class _Sink:
    """A file that counts and sums up what is written; both without the interpreter's lock where it is much."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum, self.num_bytes = file, 0, 0

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        written = self._file.write(data)
        self.num_bytes += written
        return written

    def flush(self) -> None:
        """As of a file."""
        self._file.flush()


def _write(path: Path, save: Callable[[Any], object]) -> _Sink:
    """All of a file or nothing, on the disk when this returns."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            sink = _Sink(file)
            save(sink)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return sink


def check_part(path: Path) -> str:
    """Read all of a part and compare it with its record; returns a word where there is none to compare it with, else "".

    Raises:
        Damaged: it is another than was written.
        ConfigError: a later version wrote it.
    """
    if not path.is_file():
        raise Damaged(f"{path} is not there, or is no file")
    if not record_of(path).exists():
        return f"{path.name} is of an earlier version of workbench and has no checksum: read as it is"
    record = _read(record_of(path))
    if record is None:
        raise Damaged(f"{record_of(path)} cannot be read")
    number, rank = record.get("format", 0), int(path.stem.rpartition("-")[2])
    if not isinstance(number, int) or record.get("rank", rank) != rank:
        raise Damaged(f"{record_of(path)} is of rank {record.get('rank')} and of format {number!r}: it is another part's")
    if number > FORMAT:
        raise ConfigError(f"{path} has format {number}, this version reads up to {FORMAT}: update workbench")
    size = path.stat().st_size
    if size != record.get("bytes"):
        raise Damaged(f"{path} has {size} bytes, {record.get('bytes')} were written")
    if _sum_of(path, number) != record.get("crc32" if number > SHA_256_UP_TO else "sha256"):
        raise Damaged(f"{path} is not what was written: its checksum is another")
    return ""


def _sum_of(path: Path, number: int) -> int | str:
    """Checksum of a file, as that format has it."""
    with path.open("rb") as file:
        if number <= SHA_256_UP_TO:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = 0
        while data := file.read(BLOCK):
            found = zlib.crc32(data, found)
        return found


def run_of(path: Path) -> str:
    """Name of the run that a part is of; "" where its record does not say."""
    return str((_read(record_of(path)) or {}).get("run", ""))


def remove_old_parts(folder: Path, rank: int, num_ranks: int, keep: int) -> None:
    """Remove a rank's parts that are older than the last `keep` complete checkpoints, complete or not; records first.

    Rank 0 removes those of ranks that are no more, too.
    """
    newest = sorted(_whole_steps(folder), reverse=True)[:keep]
    if len(newest) < keep:
        return
    for suffix in ("json", "pt"):
        for path in (folder / FOLDER).glob(f"step-*-rank-*.{suffix}"):
            name = RECORD.fullmatch(f"{path.stem}.json")
            whose = int(name[2]) if name else -1
            if name and int(name[1]) < newest[-1] and (whose == rank or (rank == 0 and whose >= num_ranks)):
                path.unlink(missing_ok=True)
