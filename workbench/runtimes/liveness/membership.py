"""Runs that go on without some of their ranks: who has left, said once for all, and texts that all who remain gather.

That a rank is gone is found out by `detector`, beside the library that carries messages, which may tell nobody of a death. Whoever
finds it out first writes so in the run's folder, and what is written counts for all: a rank that was given up wrongly finds its own
name there, and must not go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from workbench.errors import PeerFailed, RunNotFound
from workbench.runtimes.liveness.failure_detector import FailureDetector, heartbeat_name
from workbench.trace.atomic import write_atomic
from workbench.trace.store import read_info, update_run

if TYPE_CHECKING:  # who looks whether a run goes on need not import torch
    from workbench.runtimes.liveness.deadline import Deadline

LOOK_S = 0.1  # how often ranks are looked for
LEAVE_S = 5.0  # how long rank 0 waits for the others before it clears up
FOLDER = "members"
ENDS_ALONE = "async_mpi_finalize"  # of Open MPI: a rank's MPI_Finalize waits for no other, which it else may do for ever when one is gone
FAULT_TOLERANT = ("--with-ft", "ulfm", "--mca", ENDS_ALONE, "1")  # what its mpiexec is told, so that ranks outlive one that is killed
LEFT_TEXT = "\0left"  # in place of the text of a rank that has left


def left_name(rank: int, num_taken: int) -> str:
    """File that says that a rank has left, whose place another process had taken so often before."""
    return f"left-{rank:05d}-{num_taken}.json" if num_taken else f"left-{rank:05d}.json"


@final
@dataclass(frozen=True, slots=True)
class Departure:
    """A rank that has left.

    Attributes:
        why: how that was found out.
        unix_s: when, by the time of day.
        seconds: since whoever found it out was there, which is since the run began.
        seen_by: the rank that found it out.
    """

    rank: int
    why: str
    unix_s: float
    seen_by: int
    seconds: float = 0.0


@final
class Membership:
    """One rank's view of who is there. Every rank of a run makes one before the first of them needs it.

    Args:
        presence: the rank's; from here on a rank that is gone is no failure that it announces.
        goes_on_without: rank -> whether the run can go on when it has left.

    Attributes:
        shrinks: where it cannot, those that remain go on as fewer (`runtimes.elastic.shrink`).
    """

    def __init__(self, detector: FailureDetector, goes_on_without: Callable[[int], bool], *, shrinks: bool = False) -> None:
        self.rank, self.num_ranks, self.shrinks = detector.rank, detector.num_ranks, shrinks
        self.losable = [goes_on_without(other) and other != 0 for other in range(self.num_ranks)]
        self.detector, detector.announce = detector, None
        self.folder = detector.folder / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remain: set[int] | None = None  # where a run has shrunk
        self.gone: list[Departure] = []  # in the order in which this rank heard of them
        self._before: list[Departure] = []  # of those whose place was taken
        self.num_taken = [0] * self.num_ranks  # how often another process has taken a rank's place
        self.num_texts = 0
        self.num_shrinks = 0  # how often those that remained have met
        self._looked_s, self._began_s = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def _left_path(self, rank: int) -> Path:
        return self.folder / left_name(rank, self.num_taken[rank])

    # -- who is there ------------------------------------------------------------------------------------------

    def departures(self, *, now: bool = False) -> list[Departure]:
        """Who has left; looks at the files, unless that was a moment ago and `now` is not asked for."""
        if (now or time.monotonic() - self._looked_s > LOOK_S) and self._lock.acquire(blocking=now):
            try:
                known = {departure.rank for departure in self.gone}
                for rank in range(self.num_ranks):
                    if rank not in known and (found := self._departure(rank)) is not None:
                        self.gone.append(found)
                self._looked_s = time.monotonic()
            finally:
                self._lock.release()
        return self.gone

    def has_left(self, rank: int) -> bool:
        """Whether that rank has left."""
        return any(departure.rank == rank for departure in self.departures())

    def failure(self) -> str | None:
        """Why this run cannot go on; None where it can."""
        for departure in self.departures():
            if departure.rank == self.rank:
                return f"rank {self.rank} itself was given up ({departure.why}) and the others went on without it: it cannot come back"
            done_without = self._remain is not None and departure.rank not in self._remain
            if not self.losable[departure.rank] and not done_without:
                return f"rank {departure.rank} has left ({departure.why}), and nobody can take its place: resume from the last checkpoint"
        return None

    def missing(self) -> list[int]:
        """Who has left of those with whom the run goes on: what only such a rank holds is nowhere."""
        return [departure.rank for departure in self.departures() if self._remain is None or departure.rank in self._remain]

    def accept(self, remain: list[int]) -> None:
        """The run goes on with these."""
        self._remain = set(remain)
        self.detector.ignored = frozenset(range(self.num_ranks)) - self._remain

    def readmit(self, rank: int) -> None:
        """Another process has the place of a rank that had left; every rank says so at the same place of the run."""
        with self._lock:
            self._before += [departure for departure in self.gone if departure.rank == rank]
            self.gone = [departure for departure in self.gone if departure.rank != rank]
            self.num_taken[rank] += 1
            self.detector.forget(rank)

    def adopt_history(self, rows: list[dict[str, Any]], seconds: float) -> None:
        """Who had left before this rank came, as another has recorded it; and since when the run has been under way."""
        self._before = [Departure(**row) for row in rows]
        self._began_s -= seconds

    def _departure(self, rank: int) -> Departure | None:
        path = self._left_path(rank)
        if not path.exists():
            why = None if rank == self.rank else self.detector.end_of(rank)
            if why is None:
                return None
            draft = path.with_suffix(f".{self.rank}")
            seconds = round(time.monotonic() - self._began_s, 3)
            draft.write_text(json.dumps({"rank": rank, "why": why, "unix_s": time.time(), "seen_by": self.rank, "seconds": seconds}))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # whole, and by the first alone
            draft.unlink()
        return Departure(**json.loads(path.read_text()))

    # -- where all meet ----------------------------------------------------------------------------------------

    def gather_texts(self, text: str, deadline: Deadline, place: str = "") -> list[str]:
        """Every rank's text in order of rank, `LEFT_TEXT` for who left before it gave one; all that remain get the same.

        Args:
            place: where ranks come to it out of different work, a name for what they meet for; once.
        """
        number: int | str = place or self.num_texts
        self.num_texts += not place
        self.put(number, text)
        found = [LEFT_TEXT] * self.num_ranks
        waiting = set(range(self.num_ranks))
        while waiting:
            gone = {departure.rank for departure in self.departures()}  # before its text is looked for: a text that comes is there by then
            for rank in sorted(waiting):
                if (said := self.text(number, rank)) is not None:
                    found[rank] = said
                    waiting.discard(rank)
                elif rank in gone:
                    waiting.discard(rank)
            if waiting:
                deadline.pause()
        if isinstance(number, int):
            self._text_path(number - 2, self.rank).unlink(missing_ok=True)  # whoever is here has read it
        return found

    def text(self, number: int | str, rank: int) -> str | None:
        """What a rank has said there, so far."""
        path = self._text_path(number, rank)
        return path.read_text() if path.exists() else None

    def put(self, number: int | str, text: str) -> None:
        """Say this rank's text there."""
        write_atomic(self._text_path(number, self.rank), text)

    def _text_path(self, number: int | str, rank: int) -> Path:
        return self.folder / f"text-{number}-{rank:05d}"

    # -- the end -----------------------------------------------------------------------------------------------

    def record(self) -> list[dict[str, Any]]:
        """Who left and when, for `run.json`; seconds since the run began."""
        known = dict.fromkeys([*self._before, *self.departures(now=True)])  # who came later may know of one in both ways
        return [asdict(row) for row in sorted(known, key=lambda departure: departure.seconds)]

    def leave(self) -> None:
        """In order; the first of those that remain clears up behind the last."""
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
    """What `gather_texts` gave, where nobody may be missing.

    Raises:
        PeerFailed: somebody has left.
    """
    if LEFT_TEXT in texts:
        raise PeerFailed(f"rank {texts.index(LEFT_TEXT)} has left, and {what} takes all ranks: start again")
    return texts


def tolerates_loss(folder: Path, *, over: bool) -> bool:
    """Whether the end of a rank's process need be no failure of that run: the others find it out, and go on; where it is over, they did."""
    if not over and (folder / FOLDER).is_dir():
        return True
    with contextlib.suppress(RunNotFound):
        return bool(read_info(folder).get("departures"))
    return False


def note_departures(folder: Path, members: Membership) -> None:
    """Into the run's `run.json`, once it is over: who left, and when."""
    info = read_info(folder)
    rows = members.record()
    if rows:
        words = [f"rank {row['rank']} left ({row['why']}), and the others went on without it" for row in rows]
        for line in words:
            warnings.warn(line, RuntimeWarning, stacklevel=2)
        update_run(folder, departures=rows, notes=[*info.get("notes", []), *words])
