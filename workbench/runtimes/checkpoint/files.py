"""Checkpoint files in a run's folder: for each rank a rank file, and a record with the file's checksum.

A rank file is written atomically, and its record is written after it. So a rank file with a record is complete, even if
the process is killed later. A checkpoint is complete when the records of all its ranks exist. To check that, no rank
has to wait for another.

    checkpoint-00001.pt, checkpoints/stop-rank-00001.json   of rank 1, written by a stop
    checkpoints/step-00000004-rank-00001.pt, .json          of rank 1, written after step 4 while the run continued (where ranks are
                                                            at different steps: after the step that all have reached)
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from workbench.errors import ConfigError
from workbench.trace.files.atomic import atomic_file
from workbench.trace.files.text import read_json
from workbench.trace.store import find_run

FORMAT = 8  # of a record and its rank file; other formats are refused
BLOCK = 1 << 20  # bytes read at a time
FOLDER = "checkpoints"
RECORD = re.compile(r"step-(\d{8,18})-rank-(\d{5,18})\.json")


class CorruptFile(Exception):
    """A rank file differs from what was written. The message names the file and the damage."""


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: the step after which it was written. None: a stop wrote it, so it is the newest.
        num_ranks: how many rank files it has.
    """

    folder: Path
    step: int | None
    num_ranks: int

    def __str__(self) -> str:
        return "that of the stop" if self.step is None else f"that of step {self.step}"

    @property
    def num_steps(self) -> int:
        """Number of steps that a run which continues from it has behind it; -1 if its record cannot be read."""
        if self.step is not None:
            return self.step + 1
        record = _read(record_path(self.rank_file(0))) or {}
        return int(record.get("step", -2)) + 1

    def rank_file(self, rank: int) -> Path:
        """Path of a rank's file."""
        return rank_file_path(self.folder, self.step, rank)


def split_source(source: str) -> tuple[str, int | None]:
    """Return the run of a `resume=`, and the number of steps of the checkpoint to use; None for the newest one.

    >>> split_source("runs/first@200"), split_source("first")
    (('runs/first', 200), ('first', None))
    """
    run, sign, num_steps = source.rpartition("@")
    # isdecimal also accepts other scripts' digits
    if sign and run and num_steps.isascii() and num_steps.isdecimal() and not Path(source).is_dir():
        return run, int(num_steps)
    return source, None


def choose_checkpoint(places: list[list[Any]], name: str, num_steps: int | None) -> list[list[Any]]:
    """Return those of the complete checkpoints that have this number of steps; all of them for None.

    Args:
        places: step, number of ranks and number of steps of each complete checkpoint, the newest first.
        name: of the run, for the message.

    Raises:
        ConfigError: no checkpoint has this number of steps; the message names those that exist.
    """
    chosen = [place for place in places if num_steps in (None, place[2])]
    if places and not chosen:
        found = ", ".join(map(str, sorted({place[2] for place in places})))
        raise ConfigError(f"{name} has no checkpoint after {num_steps} steps: there are those after {found} steps")
    return chosen


def places_of(folder: Path) -> list[list[Any]]:
    """Return step, number of ranks and number of steps of each complete checkpoint, the newest first."""
    return [[one.step, one.num_ranks, one.num_steps] for one in complete_checkpoints(folder)]


def find_source(name: str) -> str:
    """Return the folder of a `resume=`, as `folder@200` if it names a checkpoint.

    Args:
        name: what `find_run` accepts, or `name@200` for the checkpoint after 200 steps.

    Raises:
        RunNotFound: there is no such run.
        ConfigError: it has checkpoints, but none after this number of steps.
    """
    run, num_steps = split_source(name)
    folder = Path(find_run(run)).resolve()
    choose_checkpoint(places_of(folder), folder.name, num_steps)
    return str(folder) if num_steps is None else f"{folder}@{num_steps}"


def rank_file_path(folder: Path, step: int | None, rank: int) -> Path:
    """Path of a rank's file."""
    if step is None:
        return folder / f"checkpoint-{rank:05d}.pt"
    return folder / FOLDER / f"step-{step:08d}-rank-{rank:05d}.pt"


def record_path(part: Path) -> Path:
    """Path of the record of a rank file."""
    stop = part.name.startswith("checkpoint-")
    return part.parent / FOLDER / f"stop-rank-{part.stem.split('-')[1]}.json" if stop else part.with_suffix(".json")


def lacks_record(part: Path) -> bool:
    """Return True if a rank file has no record."""
    return not record_path(part).exists()


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints, the newest first, judged by their records alone."""
    found = [Checkpoint(folder, step, num_ranks) for step, num_ranks in _whole_steps(folder).items()]
    found.sort(key=lambda checkpoint: checkpoint.step or 0, reverse=True)
    parts = sorted(folder.glob("checkpoint-*.pt"))
    records = [_read(record_path(path)) for path in parts]
    num_ranks = next((int(record["num_workers"]) for record in records if record), 0)
    if parts and len(parts) == num_ranks and all(records):
        found.insert(0, Checkpoint(folder, None, num_ranks))
    return found


def num_ranks_kept(folder: Path) -> int:
    """Number of ranks of the newest checkpoint; 0 without one."""
    return next((checkpoint.num_ranks for checkpoint in complete_checkpoints(folder)), 0)


def _whole_steps(folder: Path) -> dict[int, int]:
    """Return step -> number of ranks, for each checkpoint with the records of all its ranks. A run may shrink."""
    records: dict[int, dict[int, int | None]] = {}  # step -> rank -> number of ranks in the record
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


def write_rank_file(path: Path, save: Callable[[BinaryIO], None], facts: dict[str, Any]) -> None:
    """Write a rank file by `save`, then its record: `facts`, and the file's format, size and checksum."""
    record_path(path).parent.mkdir(exist_ok=True)
    record_path(path).unlink(missing_ok=True)
    with atomic_file(path, durable=True) as file:
        sink = _ChecksumWriter(file)
        save(sink)  # type: ignore[arg-type]  # it writes and flushes, which is all that is used
    record = {"format": FORMAT, **facts, "bytes": sink.num_bytes, "crc32": sink.sum}
    with atomic_file(record_path(path), durable=True) as file:
        file.write(json.dumps(record).encode())


@final
class _ChecksumWriter:
    """A file that counts and checksums the bytes written to it.

    For large writes, both the write and the checksum release the interpreter lock.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sum, self.num_bytes = file, 0, 0

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        written = self._file.write(data)
        self.num_bytes += written
        return written

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def verify_rank_file(path: Path) -> None:
    """Read a rank file and compare it with its record.

    Raises:
        CorruptFile: the file differs from its record.
        ConfigError: another version of workbench wrote it.
    """
    if not path.is_file():
        raise CorruptFile(f"{path} does not exist, or is not a file")
    record = _read(record_path(path))
    if record is None:
        raise CorruptFile(f"{record_path(path)} cannot be read")
    number, rank = record.get("format", 0), int(path.stem.rpartition("-")[2])
    if not isinstance(number, int) or record.get("rank", rank) != rank:
        raise CorruptFile(
            f"{record_path(path)} describes rank {record.get('rank')} in format {number!r}: it is the record of "
            "another rank file"
        )
    if number != FORMAT:
        fix = (
            "update workbench"
            if number > FORMAT
            else "resume with the version that wrote it, or train again from the start"
        )
        raise ConfigError(f"{path} has format {number}, this version reads format {FORMAT}: {fix}")
    size = path.stat().st_size
    if size != record.get("bytes"):
        raise CorruptFile(f"{path} has {size} bytes, {record.get('bytes')} were written")
    if _checksum_of(path) != record.get("crc32"):
        raise CorruptFile(f"{path} was damaged after it was written: its checksum differs")


def _checksum_of(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while data := file.read(BLOCK):
            found = zlib.crc32(data, found)
    return found


def run_name_of(path: Path) -> str:
    """Return the name of the run that wrote a rank file; "" if its record has no name."""
    return str((_read(record_path(path)) or {}).get("run", ""))


def remove_old_rank_files(folder: Path, rank: int, num_ranks: int, keep: int, step: int) -> None:
    """Remove a rank's files that are older than the last `keep` complete checkpoints, records first.

    Rank 0 also removes those of ranks that have left.

    Args:
        step: of the checkpoint that this rank has just written. Later ones are damaged ones, or another training's.
    """
    newest = sorted((number for number in _whole_steps(folder) if number <= step), reverse=True)[:keep]
    if len(newest) < keep:
        return
    for suffix in ("json", "pt"):
        for path in (folder / FOLDER).glob(f"step-*-rank-*.{suffix}"):
            name = RECORD.fullmatch(f"{path.stem}.json")
            whose = int(name[2]) if name else -1
            if name and int(name[1]) < newest[-1] and (whose == rank or (rank == 0 and whose >= num_ranks)):
                path.unlink(missing_ok=True)
