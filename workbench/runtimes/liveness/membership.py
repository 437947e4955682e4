"""Membership of a run that continues without some ranks: which have left, and texts gathered from those that remain.

The failure detector decides that a rank is gone, because a communication library may report no death. The first rank
that detects it writes a file into the run's folder, and this file is valid for all ranks. A rank that was removed by
mistake finds its own number there and must not continue.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from workbench.errors import PeerFailed, RunNotFound, WorkbenchError
from workbench.logs import LOG
from workbench.runtimes.liveness.failure_detector import FailureDetector, heartbeat_name
from workbench.trace.files.atomic import write_atomic
from workbench.trace.info import format_departures
from workbench.trace.store import read_info, update_run

if TYPE_CHECKING:  # `tolerates_loss` must not import torch
    from workbench.runtimes.liveness.deadline import Deadline

POLL_S = 0.1  # between two reads of the files
LEAVE_S = 5.0  # how long the lowest rank waits for the others before it removes the files
FOLDER = "members"
ENDS_ALONE = "async_mpi_finalize"  # Open MPI: MPI_Finalize does not wait for other ranks, which may be dead
FAULT_TOLERANT = ("--with-ft", "ulfm", "--mca", ENDS_ALONE, "1")  # mpiexec options: ranks survive a killed one
SPARES_VARIABLE = "WORKBENCH_SPARES"  # number of spare processes of a run on MPI, started with its ranks
LEFT_TEXT = "\0left"  # in place of the text of a rank that has left


def left_name(rank: int, num_taken: int) -> str:
    """Name of the file that reports the departure of a rank; `num_taken` processes had taken its place before."""
    return f"left-{rank:05d}-{num_taken}.json" if num_taken else f"left-{rank:05d}.json"


def num_spares() -> int:
    """Return the number of spare processes in this process's world. They have the highest numbers."""
    return int(os.environ.get(SPARES_VARIABLE, 0))


@final
@dataclass(frozen=True, slots=True)
class Departure:
    """A rank that has left.

    Attributes:
        why: how that was detected.
        unix_s: when, in seconds since 1970.
        seconds: when, in seconds since the run began.
        seen_by: the rank that detected it.
        step: the step in which the rank was.
    """

    rank: int
    why: str
    unix_s: float
    seen_by: int
    seconds: float = 0.0
    step: int = 0


@final
class Membership:
    """One rank's view of the members of the run. Every rank makes one before any rank needs it.

    Args:
        detector: this rank's. Its announcements of ranks that are gone are switched off.
        can_lose: rank -> whether the run can continue when that rank has left.

    Attributes:
        shrinks: if `can_lose` is False, the remaining ranks continue as fewer (`runtimes.elastic.shrink`).
    """

    def __init__(self, detector: FailureDetector, can_lose: Callable[[int], bool], *, shrinks: bool = False) -> None:
        self.rank, self.num_ranks, self.shrinks = detector.rank, detector.num_ranks, shrinks
        self.losable = [can_lose(other) and other != 0 for other in range(self.num_ranks)]
        self.detector, detector.announce = detector, None
        self.folder = detector.folder / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remain: set[int] | None = None  # the remaining ranks, after a run has shrunk
        self.gone: list[Departure] = []  # in the order in which this rank detected them
        self._before: list[Departure] = []  # of ranks whose place was taken
        self.num_taken = [0] * self.num_ranks  # rank -> number of processes that have taken its place
        self.num_texts = 0
        self.num_shrinks = 0  # number of times that the run has shrunk
        self._num_reported = 0  # departures in the run's record
        self._looked_s, self._began_s = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def _left_path(self, rank: int) -> Path:
        return self.folder / left_name(rank, self.num_taken[rank])

    # -- members -----------------------------------------------------------------------------------------------

    def departures(self, *, now: bool = False) -> list[Departure]:
        """The ranks that have left. Reads the files at most every `POLL_S`, unless `now`."""
        if (now or time.monotonic() - self._looked_s > POLL_S) and self._lock.acquire(blocking=now):
            try:
                known = {departure.rank for departure in self.gone}
                for rank in range(self.num_ranks):
                    if rank not in known and (found := self._departure(rank)) is not None:
                        self.gone.append(found)
                self._looked_s = time.monotonic()
                self._report()
            finally:
                self._lock.release()
        return self.gone

    def _report(self) -> None:
        """On the lowest remaining rank: record new departures at once, and log them. `departures` calls it."""
        gone = {departure.rank for departure in self.gone}
        num_known = len(self._before) + len(self.gone)
        lowest = min(set(range(self.num_ranks)) - gone, default=-1)
        if num_known == self._num_reported or self.rank != lowest:
            return
        self._num_reported = num_known
        if not self.shrinks and not all(self.losable[rank] for rank in gone):
            return  # the run ends, with an error that names the rank
        with contextlib.suppress(WorkbenchError):  # the folder was removed
            if summary := format_departures(update_run(self.detector.folder, departures=self._rows())):
                LOG.warning("the run continues with %s", summary)

    def has_left(self, rank: int) -> bool:
        """Return True if that rank has left."""
        return any(departure.rank == rank for departure in self.departures())

    def failure(self) -> str | None:
        """Why this run cannot continue; None if it can."""
        for departure in self.departures():
            if departure.rank == self.rank:
                return (
                    f"the others removed rank {self.rank} ({departure.why}), and continued without it: it cannot return"
                )
            done_without = self._remain is not None and departure.rank not in self._remain
            if not self.losable[departure.rank] and not done_without:
                return (
                    f"rank {departure.rank} has left ({departure.why}), and no process can take its place: resume "
                    "from a checkpoint"
                )
        return None

    def missing(self) -> list[int]:
        """Return the ranks that have left since the run last shrank. State that only they had is lost."""
        return [
            departure.rank for departure in self.departures() if self._remain is None or departure.rank in self._remain
        ]

    def accept(self, remain: list[int]) -> None:
        """Note that the run continues with these ranks only."""
        self._remain = set(remain)
        self.detector.ignored = frozenset(range(self.num_ranks)) - self._remain

    def readmit(self, rank: int) -> None:
        """Note that another process takes the place of a rank that had left.

        Every rank calls this at the same point of the run.
        """
        with self._lock:
            self._before += [departure for departure in self.gone if departure.rank == rank]
            self.gone = [departure for departure in self.gone if departure.rank != rank]
            self.num_taken[rank] += 1
            self.detector.forget(rank)

    def adopt_history(self, rows: list[dict[str, Any]], seconds: float) -> None:
        """Take over what another rank recorded before this one joined: departures, and the run's age in seconds."""
        self._before = [Departure(**row) for row in rows]
        self._began_s -= seconds

    def _departure(self, rank: int) -> Departure | None:
        path = self._left_path(rank)
        if not path.exists():
            why = None if rank == self.rank else self.detector.end_of(rank)
            if why is None:
                return None
            draft = path.with_suffix(f".{self.rank}")
            found = Departure(
                rank=rank,
                why=why,
                unix_s=time.time(),
                seen_by=self.rank,
                seconds=round(time.monotonic() - self._began_s, 3),
                step=self.detector.step_of(rank),
            )
            draft.write_text(json.dumps(asdict(found)))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # atomic, and only the first rank succeeds
            draft.unlink()
        return Departure(**json.loads(path.read_text()))

    # -- texts of all ranks ------------------------------------------------------------------------------------

    def gather_texts(self, text: str, deadline: Deadline, place: str = "") -> list[str]:
        """Return every rank's text in order of rank; `LEFT_TEXT` for a rank that left without one.

        All remaining ranks get the same texts.

        Args:
            place: a name for this gather alone, for ranks that have not counted the same gathers.
        """
        number: int | str = place or self.num_texts
        self.num_texts += not place
        self.put(number, text)
        found = [LEFT_TEXT] * self.num_ranks
        waiting = set(range(self.num_ranks))
        while waiting:
            # Before the texts: a rank writes its text before it leaves.
            gone = {departure.rank for departure in self.departures()}
            for rank in sorted(waiting):
                if (said := self.text(number, rank)) is not None:
                    found[rank] = said
                    waiting.discard(rank)
                elif rank in gone:
                    waiting.discard(rank)
            if waiting:
                deadline.pause()
        if isinstance(number, int):
            self._text_path(number - 2, self.rank).unlink(missing_ok=True)  # every rank that is here has read it
        return found

    def text(self, number: int | str, rank: int) -> str | None:
        """A rank's text of that gather; None before it is written."""
        path = self._text_path(number, rank)
        return path.read_text() if path.exists() else None

    def put(self, number: int | str, text: str) -> None:
        """Write this rank's text of that gather."""
        write_atomic(self._text_path(number, self.rank), text)

    def _text_path(self, number: int | str, rank: int) -> Path:
        return self.folder / f"text-{number}-{rank:05d}"

    # -- the end -----------------------------------------------------------------------------------------------

    def record(self) -> list[dict[str, Any]]:
        """Departures for `run.json`, with seconds since the run began."""
        self.departures(now=True)
        return self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        # A rank that joined later may have the same departure in both lists.
        known = dict.fromkeys([*self._before, *self.gone])
        return [asdict(row) for row in sorted(known, key=lambda departure: departure.seconds)]

    def leave(self) -> None:
        """Leave the run. The lowest remaining rank waits for the others and removes the files."""
        self.detector.leave()
        if self.rank != min(self._remain or (0,)):
            return
        deadline = time.monotonic() + LEAVE_S
        gone = {row.rank for row in self.gone}
        others = [self.detector.folder / heartbeat_name(rank) for rank in range(self.num_ranks) if rank not in gone]
        while any(path.exists() for path in others) and time.monotonic() < deadline:
            time.sleep(0.002)
        shutil.rmtree(self.folder, ignore_errors=True)


def require_all(texts: list[str], what: str) -> list[str]:
    """Return the texts of `gather_texts`, which must be those of all ranks.

    Raises:
        PeerFailed: a rank has left.
    """
    if LEFT_TEXT in texts:
        raise PeerFailed(f"rank {texts.index(LEFT_TEXT)} has left, and {what} needs all ranks: start again")
    return texts


def tolerates_loss(folder: Path, *, over: bool) -> bool:
    """Return True if the run tolerates the loss of a rank.

    Args:
        over: whether the run has ended. Then return whether it lost a rank and reached its end or a stop.
    """
    if not over and (folder / FOLDER).is_dir():
        return True
    with contextlib.suppress(RunNotFound):
        info = read_info(folder)
        return bool(info.get("departures")) and info.get("status") != "failed"
    return False


def note_departures(folder: Path, members: Membership) -> None:
    """Write the departures into `run.json` at the end of the run."""
    info = read_info(folder)
    rows = members.record()
    if rows:
        notes = [f"rank {row['rank']} left ({row['why']}), and the others continued without it" for row in rows]
        update_run(folder, departures=rows, notes=[*info.get("notes", []), *notes])
