"""A batch job: `Scheduler` submits, watches and cancels it by the scheduler's own commands."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from workbench.errors import LaunchError

TOOL_S = 30.0
SOONEST_S, LATEST_S = 0.5, 5.0  # time between two queries: a scheduler serves a whole site
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_HOLD", "REQUEUE_FED"})
ALIVE = WAITING | {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"}
UNKNOWN = "UNKNOWN"  # state of a job that its scheduler does not know any more


@final
@dataclass(frozen=True, slots=True)
class State:
    """A job's state in Slurm's words: its name ("RUNNING"), the reason ("Resources"), and the nodes."""

    name: str
    reason: str = ""
    nodes: str = ""

    @property
    def waits(self) -> str | None:
        """Why the job does not run yet: "pending: Resources"; None if it does not wait."""
        if self.name not in WAITING:
            return None
        return f"{self.name.lower()}: {self.reason}" if self.reason not in ("", "None") else self.name.lower()

    @property
    def alive(self) -> bool:
        """Return True if the job runs or may still run."""
        return self.name in ALIVE

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.name}{reason}{f' on {self.nodes}' if self.nodes else ''}"


class Scheduler(ABC):
    """The commands of a scheduler, for the launchers of jobs."""

    name: str  # as in messages: "Slurm"

    @abstractmethod
    def submit(self, script: str) -> str:
        """Submit a batch script. Return the job's number.

        Raises:
            LaunchError: the scheduler refused it; the message says why.
        """

    @abstractmethod
    def state(self, job: str) -> State:
        """Return a job's state.

        Raises:
            LaunchError: the scheduler does not answer.
        """

    @abstractmethod
    def cancel_command(self, job: str) -> list[str]:
        """Return the command that cancels a job."""

    def cancel(self, job: str) -> None:
        """Cancel a job, if it exists."""
        with contextlib.suppress(LaunchError):
            run_command(self.name, self.cancel_command(job))


@final
class Watched:
    """The state of a job, queried rarely, because a scheduler serves a whole site.

    Args:
        query: returns the state; raises LaunchError if the scheduler does not answer.
    """

    def __init__(self, query: Callable[[], State]) -> None:
        self._query = query
        self._begin = self._asked = time.monotonic()
        self._state = State("PENDING")
        self._fresh = False

    def state(self, *, now: bool = False) -> State:
        """Return the state, at most LATEST_S seconds old; the last known state if the scheduler does not answer.

        Args:
            now: query the scheduler in any case.
        """
        time_s = time.monotonic()
        interval_s = min(LATEST_S, max(SOONEST_S, (time_s - self._begin) / 20))
        if self._fresh and not self._state.alive:
            return self._state
        if now or not self._fresh or time_s - self._asked > interval_s:
            with contextlib.suppress(LaunchError):
                self._state = self._query()
                self._fresh = True
            self._asked = time.monotonic()
        return self._state


def run_command(scheduler: str, command: Iterable[str], text: str | None = None) -> str:
    """Run one of a scheduler's commands and return its output.

    Args:
        scheduler: its name, for messages.
        command: the command line.
        text: its standard input.

    Raises:
        LaunchError: there is no such command, it failed (the message has its output), or it does not answer.
    """
    words = list(command)
    if shutil.which(words[0]) is None:
        raise LaunchError(
            f"there is no `{words[0]}` on this machine: log in where {scheduler} is, or use launcher='local'"
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_S, input=text or "")
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{words[0]}` gave no answer in {TOOL_S:.0f} s: is {scheduler}'s controller up?") from None
    if done.returncode != 0:
        raise LaunchError(" ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}")
    return done.stdout


def address_on_route(hosts: Iterable[str], fix: str) -> str:
    """Return the address of this machine on the route to the first of the hosts that does not lead to loopback.

    Args:
        hosts: names or addresses. Nothing is sent to them.
        fix: what to do if there is no such address, for the message.

    Raises:
        LaunchError: this machine has only its loopback address on these routes.
    """
    for name in hosts:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    raise LaunchError(
        "the job's nodes cannot reach a controller here: this machine has only its loopback address; " + fix
    )


def end_of_file(path: Path, num_bytes: int = 20_000) -> str:
    """Return the end of a text file; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
