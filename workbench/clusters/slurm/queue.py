"""What Slurm says: jobs submitted, looked at and cancelled, by its own commands."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from workbench.errors import LaunchError

TOOL_S = 30.0
SOONEST_S, LATEST_S = 0.5, 5.0  # between two questions to a controller that serves a whole site
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_HOLD", "REQUEUE_FED"})
ALIVE = WAITING | {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"}
UNKNOWN = "UNKNOWN"  # to squeue, and to sacct where there is one
HOST = re.compile(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", re.MULTILINE)


def ask(*command: str, text: str | None = None) -> str:
    """What one of Slurm's commands answers.

    Raises:
        LaunchError: there is no such command, it failed (with what it said), or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise LaunchError(f"there is no `{command[0]}` on this machine: log in where Slurm is, or use launcher='local'")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, input=text or "")
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{command[0]}` gave no answer in {TOOL_S:.0f} s: is Slurm's controller up?") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LaunchError(said)
    return done.stdout


def submit(script: str) -> str:
    """Submit a batch script; the job's number.

    Raises:
        LaunchError: Slurm refused it; says why, and what there is instead.
    """
    try:
        said = ask("sbatch", "--parsable", text=script)
    except LaunchError as error:
        raise LaunchError(f"Slurm did not take the job: {error}{_instead(str(error))}") from None
    return said.strip().partition(";")[0]


def cancel(job: str) -> None:
    """Cancel a job, if it is there."""
    with contextlib.suppress(LaunchError):
        ask("scancel", job)


def _instead(error: str) -> str:
    """What the user may ask for, where something does not exist."""
    with contextlib.suppress(LaunchError):
        low = error.lower()
        if "account" in low:
            accounts = ask("sacctmgr", "-nP", "show", "assoc", f"user={os.environ.get('USER', '')}", "format=account").split()
            return f". Your accounts: {', '.join(sorted(set(accounts)))}" if accounts else ""
        if "qos" in low:
            return f". QOS here: {', '.join(ask('sacctmgr', '-nP', 'show', 'qos', 'format=name').split())}"
        if any(word in low for word in ("partition", "node", "time", "gres", "cpu", "memory")):
            rows = [row.split("|") for row in ask("sinfo", "-h", "-o", "%R|%D|%c|%l|%G").splitlines()]
            kinds = [f"{name} ({nodes} nodes of {cores} CPUs, at most {limit}, {gres})" for name, nodes, cores, limit, gres in rows]
            return f". Partitions here: {'; '.join(kinds)}"
    return ""


@final
@dataclass(frozen=True, slots=True)
class State:
    """A job as Slurm saw it: its state ("RUNNING"), why ("Resources"), and where."""

    name: str
    reason: str = ""
    nodes: str = ""

    @property
    def waits(self) -> str | None:
        """Why it does not run yet: "pending: Resources"."""
        if self.name not in WAITING:
            return None
        return f"{self.name.lower()}: {self.reason}" if self.reason not in ("", "None") else self.name.lower()

    @property
    def alive(self) -> bool:
        """Whether it can run, now or later."""
        return self.name in ALIVE

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.name}{reason}{f' on {self.nodes}' if self.nodes else ''}"


@final
class Watched:
    """A job of ours, asked about seldom enough for a controller that serves a whole site."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._begin = self._asked = time.monotonic()
        self._state = State("PENDING")
        self._fresh = False

    def state(self, *, now: bool = False) -> State:
        """As it was at most some seconds ago; `now` asks. The last known state while the controller does not answer."""
        moment = time.monotonic()
        wait = min(LATEST_S, max(SOONEST_S, (moment - self._begin) / 20))
        if self._fresh and not self._state.alive:
            return self._state
        if now or not self._fresh or moment - self._asked > wait:
            with contextlib.suppress(LaunchError):
                self._state = look(self.job)
                self._fresh = True
            self._asked = time.monotonic()
        return self._state


def look(job: str) -> State:
    """A job's state: squeue's, or, of a job that it has forgotten, sacct's.

    Raises:
        LaunchError: Slurm does not answer.
    """
    try:
        rows = ask("squeue", "-h", "--states=all", "-j", job, "-o", "%T|%r|%N").splitlines()
    except LaunchError as error:
        if "invalid job id" not in str(error).lower():
            raise
        rows = []
    if rows:
        return State(*rows[0].split("|"))
    with contextlib.suppress(LaunchError):
        rows = ask("sacct", "-nXP", "-j", job, "-o", "State,Reason,NodeList").splitlines()
        if rows:
            name, *rest = rows[-1].split("|")
            return State(name.split()[0], *rest)
    return State(UNKNOWN, "Slurm has forgotten it")


def address_for_nodes() -> str:
    """This machine's address, as Slurm's own controller sees it: its nodes reach that.

    Raises:
        LaunchError: Slurm does not answer, or knows this machine by its loopback only.
    """
    found = HOST.search(ask("scontrol", "show", "config"))
    candidates = [name for name in (found[2], found[1]) if name] if found else []
    for name in [*candidates, socket.gethostname()]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    raise LaunchError(
        "the job's nodes could not reach a controller here: this machine has no address but its loopback; "
        "let the controller live in the job, with 'slurm:controller=job'"
    )


@final
@dataclass(frozen=True, slots=True)
class Allocation:
    """The job that this process is in."""

    job: str
    num_ranks: int
    nodes: tuple[int, ...]  # CPUs of each

    @classmethod
    def here(cls) -> Allocation | None:
        """None outside of one."""
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
        if not job:
            return None
        nodes = tuple(counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1")))
        places = int(os.environ.get("SLURM_NTASKS") or sum(counts(os.environ.get("SLURM_TASKS_PER_NODE", "1"))))
        return cls(job, places, nodes)


def counts(words: str) -> list[int]:
    """Slurm's numbers of each node.

    >>> counts("4(x2),1")
    [4, 4, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", words)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def tail(path: Path, num_bytes: int = 20_000) -> str:
    """The end of a text file; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
