"""Failure detector: each rank writes a heartbeat file into the run's folder every second, and its peers read it.

A killed rank cannot report its end. Its peers see a closed connection (its own, or that of a rank that left because of
it), or nothing at all. So only this module decides whether a rank is gone. On one machine it looks up the process (a
stopped process is not gone). For ranks on other machines it reads the time of the last heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, final

from workbench.runtimes.liveness.usage import Usage
from workbench.runtimes.liveness.watchdog import Watchdog, describe_place
from workbench.trace.files.atomic import write_atomic
from workbench.trace.files.text import read_json
from workbench.trace.processes import pid_namespace, start_of, state_of_process
from workbench.trace.recorder import metrics_name

HEARTBEAT_S = 1.0
LOST_S = 60.0  # without a heartbeat from another host: longer than network file systems cache
SILENT_S = 3.0  # a rank without a heartbeat for this long does not run, or its host cannot be reached
DIAGNOSIS_S = 4.0  # how long a rank that lost a connection looks for the rank that is gone
NUM_WATCHED = 4  # each rank watches this many next ranks, so the first of several that are gone has a watcher
LEFT_PREFIX = "left-"  # prefix of files of ranks that left before the end
MAX_NAMED, TAIL_BYTES = 4, 8192
KINDS: dict[str, Any] = {
    "host": str,
    "place": str,
    "pid": int,
    "started_s": float,
    "waits": str | None,
    "does": str,
    "step": int,
    "memory_bytes": int,
    "cpu_cores": float | None,
    "gpu": dict | None,
}
# Entries that heartbeats of earlier versions lack
UNKNOWN: dict[str, Any] = {
    "waits": None,
    "does": "",
    "step": -1,
    "memory_bytes": 0,
    "cpu_cores": None,
    "gpu": None,
}
# Errors after a peer's death: of gloo, of torch.distributed's store, and of a fault-tolerant MPI.
CONNECTION = re.compile(
    r"(?i)Connection (reset|closed|refused|was lost)|Broken pipe|Socket (Timeout|closed)|pair closure|failed to "
    r"(recv|send)|got 0 bytes"
    r"|ERR_PROC_FAILED"
)


def heartbeat_name(rank: int) -> str:
    """Name of the heartbeat file of a rank. The file exists while the rank takes part in the run."""
    return f"present-{rank:05d}.json"


def lost_connection(error: BaseException) -> bool:
    """Return True if a library's error only reports that a peer is gone."""
    ours = type(error).__module__.partition(".")[0] == "workbench"
    return isinstance(error, RuntimeError) and not ours and bool(CONNECTION.search(str(error)))


def step_under_way(folder: Path, rank: int) -> int:
    """The step that a rank is in, or was in when it ended: the one after the last of its record."""
    try:
        with (folder / metrics_name(rank)).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        # The first line may be cut, or the last one of a killed rank.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)["step"]) + 1
    return 0


def read_heartbeat(folder: Path, rank: int) -> dict[str, Any] | None:
    """A rank's heartbeat, with its age `silent_s` in seconds. None if the rank takes no part in the run."""
    path = folder / heartbeat_name(rank)
    try:
        row = read_json(path)
        silent_s = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return None
    row = {**UNKNOWN, **row, "silent_s": max(0.0, silent_s)} if isinstance(row, dict) else {}
    return row if all(isinstance(row.get(name), kind) for name, kind in KINDS.items()) else None


def state_of(row: dict[str, Any]) -> Literal["alive", "stopped", "gone"] | None:
    """State of the process that wrote this row; None for one of another machine."""
    return state_of_process(row["pid"], row["started_s"]) if row["place"] == pid_namespace() else None


@final
class FailureDetector:
    """Writes this rank's heartbeat and watches other ranks. One thread writes, watches, and runs the `Watchdog`.

    Args:
        folder: the run's folder.
        rank, num_ranks: this rank, and the number of ranks.
        announce: called once, with a text about a rank that is gone. None: other ranks are looked up only when asked.
        step: the current step of this rank.
        lost_s: see `LOST_S`.

    Attributes:
        ignored: ranks that the run continues without; they are no longer reported.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        announce: Callable[[str], None] | None = None,
        step: Callable[[], int] = int,
        lost_s: float = LOST_S,
    ) -> None:
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.announce, self.ignored = announce, frozenset[int]()
        self._step, self._lost_s = step, lost_s
        self._here = Watchdog(folder, rank, step)
        self._known: dict[int, dict[str, Any]] = {}  # rank -> its first heartbeat
        # rank -> time of its last heartbeat (the file's clock), when it was seen (ours).
        self._heard: dict[int, tuple[int, float]] = {}
        self._moved = (0, time.monotonic())  # this rank's step, and when it began
        # Reentrant: a garbage collection may call `leave`.
        self._over, self._writing = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._run, name="workbench-heartbeat", daemon=True)
        self._usage = Usage()
        self._mine = {
            "host": socket.gethostname(),
            "place": pid_namespace(),
            "pid": (pid := os.getpid()),
            "started_s": start_of(pid),
        }

    def __enter__(self) -> FailureDetector:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        self._thread.join(HEARTBEAT_S)

    def leave(self, reason: str = "") -> None:
        """End the heartbeat in an orderly way, so that no peer reports this rank as gone.

        Args:
            reason: why it leaves early, for peers that lose a connection.
        """
        with self._writing:
            if reason and not self._over.is_set():
                with contextlib.suppress(OSError):
                    (self.folder / f"{LEFT_PREFIX}{self.rank:05d}.txt").write_text(reason)
            self._over.set()
            self.announce = None
            with contextlib.suppress(OSError):
                self._path(self.rank).unlink()

    def join_thread(self) -> None:
        """Wait for the thread after `leave`, before the process ends."""
        self._thread.join(HEARTBEAT_S)

    def begin_training(
        self,
        step: Callable[[], int],
        bound: Callable[[], float | None],
        timeout_s: float | None,
        activity: Callable[[], str],
    ) -> None:
        """Note that training begins on the calling thread. Arguments: see `Watchdog`."""
        self._here = Watchdog(self.folder, self.rank, step, bound, timeout_s, activity)

    def end_training(self) -> None:
        """Note that training has ended. The heartbeat continues."""
        self._here = Watchdog(self.folder, self.rank, self._step)

    def note_wait(self, what: str) -> None:
        """Note that the calling thread waits for `what`; called a few times a second."""
        self._here.note_wait(what)

    def describe_absent(self, what: str | None) -> str:
        """Describe the ranks that this rank waits for: ": rank 2 has not arrived (alive, in backward of step 3)", or "".

        Args:
            what: what this rank waits for.
        """
        lines, others = [], [rank for rank in range(self.num_ranks) if rank != self.rank and rank not in self.ignored]
        rows = {peer: row for peer in others if (row := read_heartbeat(self.folder, peer)) is not None}
        for peer, row in rows.items():
            state: str = state_of(row) or "alive"
            if state == "alive" and row["silent_s"] > SILENT_S:
                state = f"silent for {row['silent_s']:.0f} s"
            if row["waits"] is None or row["waits"] != what or state != "alive":
                where = describe_place(row)
                lines.append(
                    f"rank {peer} has not arrived ({state}, {where})" if what else f"rank {peer} is {state}, {where}"
                )
        if not lines:
            return (
                ": all ranks have arrived (is the network between them cut, or slow?)"
                if what and len(rows) == len(others) > 0
                else ""
            )
        more = f", and {len(lines) - MAX_NAMED} others" if len(lines) > MAX_NAMED else ""
        return ": " + ", ".join(lines[:MAX_NAMED]) + more

    def leads(self) -> bool:
        """Return True if all lower ranks are gone, so that this rank keeps the run's record."""
        return all(
            (row := read_heartbeat(self.folder, rank)) is not None and state_of(row) == "gone"
            for rank in range(self.rank)
        )

    def forget(self, peer: int) -> None:
        """Forget what is known of a rank: another process takes its place."""
        _ = self._known.pop(peer, None), self._heard.pop(peer, None)

    # -- ranks that are gone -----------------------------------------------------------------------------------

    def end_of(self, peer: int, *, idle: bool = False) -> str | None:
        """Return the evidence that a rank is gone and has not left in an orderly way; None if there is none.

        Args:
            idle: count the silence of another host only while this rank takes no steps either.
        """
        row = self._known.get(peer) or read_heartbeat(self.folder, peer)
        if row is None:
            return None
        self._known[peer] = row
        state = state_of(row)
        if state == "gone":
            return "its process has ended" if self._path(peer).exists() else None  # no file: it has left meanwhile
        if state is not None or not self._silent(peer, idle=idle):
            return None
        there = [
            rank
            for rank in range(self.num_ranks)
            if (one := read_heartbeat(self.folder, rank)) and one["place"] == row["place"]
        ]
        silent = [self._silent(rank, idle=idle) for rank in there]
        if all(silent):  # else the host can be reached: the rank is stopped, or a rank on that host sees its end
            return f"no rank on {row['host']} has reported for {self._lost_s:.0f} s"
        return None

    def find_gone(self) -> str | None:
        """Return a description of the first rank that is gone; None if no rank is gone."""
        return next(
            (
                reason
                for peer in range(self.num_ranks)
                if peer != self.rank and (reason := self._failure_of(peer)) is not None
            ),
            None,
        )

    def departed(self) -> list[int]:
        """Return the ranks that took part and have left in an orderly way, as far as this rank has watched them."""
        return sorted(peer for peer in self._known if not self._path(peer).exists())

    def diagnose(self, announced: Callable[[], str | None]) -> str | None:
        """Return why a connection ended: which rank is gone, or what a peer announced. Waits `DIAGNOSIS_S` for either.

        Args:
            announced: returns the failure that a peer announced, or None.
        """
        deadline = time.monotonic() + DIAGNOSIS_S
        while (reason := self.find_gone()) is None:
            with contextlib.suppress(RuntimeError):  # the process that holds the announcements may be gone too
                reason = announced()
            reason = reason or self._reason_left()
            if reason is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return reason

    def _reason_left(self) -> str | None:
        """Return the reason of the lowest of the ranks that left early."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return next((path.read_text() for path in sorted(self.folder.glob(f"{LEFT_PREFIX}*.txt"))), None)
        return None

    def step_of(self, peer: int) -> int:
        """Return the step that a rank is in, or was in when it ended, by its record and its last heartbeat."""
        row = read_heartbeat(self.folder, peer) or self._known.get(peer)
        return max(step_under_way(self.folder, peer), row["step"] if row is not None else 0)

    def _failure_of(self, peer: int) -> str | None:
        end = self.end_of(peer, idle=True)
        if end is None:
            return None
        row = read_heartbeat(self.folder, peer) or self._known[peer]
        at = f"at step {self.step_of(peer)}"
        if state_of(row) == "gone":
            return (
                f"rank {peer}'s process is gone {at} (process {row['pid']} on {row['host']}): killed, or crashed "
                "in native code"
            )
        return f"rank {peer} is gone {at}: {end}: host or network failed"

    def _silent(self, peer: int, *, idle: bool) -> bool:
        """Return True if a rank has not written for `lost_s`.

        The file's time is of another clock, so only its changes count.
        """
        now = time.monotonic()
        try:
            with self._path(peer).open() as file:  # opening makes a network file system refresh its cache
                touched = os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return False
        if self._heard.get(peer, (0, 0.0))[0] != touched:
            self._heard[peer] = (touched, now)
        since = max(self._heard[peer][1], self._moved[1]) if idle else self._heard[peer][1]
        return now - since > self._lost_s

    # -- the thread --------------------------------------------------------------------------------------------

    def _path(self, rank: int) -> Path:
        return self.folder / heartbeat_name(rank)

    def _write(self) -> None:
        path = self._path(self.rank)
        with self._writing, contextlib.suppress(OSError):  # a full disk, or a removed folder
            if self._over.is_set():
                return
            try:
                row = {
                    "rank": self.rank,
                    **self._mine,
                    **self._here.row(2 * HEARTBEAT_S),
                    **self._usage.row(),
                }
                write_atomic(path, json.dumps(row))
            except OSError:
                os.utime(path)
            if self._over.is_set():
                path.unlink()

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            self._write()
            self._here.watch_library_call(2 * HEARTBEAT_S, self.describe_absent)
            if (step := self._here.step()) != self._moved[0]:
                self._moved = (step, time.monotonic())
            if self.announce is not None:
                self._watch(self.announce)

    def _watch(self, announce: Callable[[str], None]) -> None:
        for distance in range(1, min(NUM_WATCHED, self.num_ranks - 1) + 1):
            reason = self._failure_of((self.rank + distance) % self.num_ranks)
            if reason is not None and not self._over.is_set() and self.announce is not None:
                self.announce = None
                # The process that holds announcements may be the one that is gone.
                with contextlib.suppress(RuntimeError):
                    announce(reason)
                return
