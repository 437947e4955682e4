"""Submits, watches and cancels Slurm jobs by Slurm's own commands."""

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
from workbench.machine import parse_counts

TOOL_S = 30.0
SOONEST_S, LATEST_S = 0.5, 5.0  # time between two queries: the controller serves a whole site
WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESV_DEL_HOLD", "REQUEUE_HOLD", "REQUEUE_FED"})
ALIVE = WAITING | {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"}
UNKNOWN = "UNKNOWN"  # state of a job that neither squeue nor sacct knows
HOST = re.compile(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", re.MULTILINE)


def run_slurm(*command: str, text: str | None = None) -> str:
    """Run one of Slurm's commands and return its output.

    Args:
        command: the command line.
        text: its standard input.

    Raises:
        LaunchError: there is no such command, it failed (the message has its output), or it does not answer.
    """
    if shutil.which(command[0]) is None:
        raise LaunchError(f"there is no `{command[0]}` on this machine: log in where Slurm is, or use launcher='local'")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, input=text or "")
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{command[0]}` gave no answer in {TOOL_S:.0f} s: is Slurm's controller up?") from None
    if done.returncode != 0:
        raise LaunchError(" ".join(done.stderr.split()) or f"exit status {done.returncode}")
    return done.stdout


def submit(script: str) -> str:
    """Submit a batch script. Return the job's number.

    Raises:
        LaunchError: Slurm refused it; the message says why, and what exists instead.
    """
    try:
        answer = run_slurm("sbatch", "--parsable", text=script)
    except LaunchError as error:
        raise LaunchError(f"Slurm refused the job: {error}{_alternatives(str(error))}") from None
    return answer.strip().partition(";")[0]


def cancel(job: str) -> None:
    """Cancel a job, if it exists."""
    with contextlib.suppress(LaunchError):
        run_slurm("scancel", job)


def _alternatives(error: str) -> str:
    """Return the accounts, QOS or partitions that exist, if the error names one that does not exist."""
    with contextlib.suppress(LaunchError):
        low = error.lower()
        if "account" in low:
            user = f"user={os.environ.get('USER', '')}"
            accounts = run_slurm("sacctmgr", "-nP", "show", "assoc", user, "format=account").split()
            return f". Your accounts: {', '.join(sorted(set(accounts)))}" if accounts else ""
        if "qos" in low:
            return f". QOS here: {', '.join(run_slurm('sacctmgr', '-nP', 'show', 'qos', 'format=name').split())}"
        if any(word in low for word in ("partition", "node", "time", "gres", "cpu", "memory")):
            rows = [row.split("|") for row in run_slurm("sinfo", "-h", "-o", "%R|%D|%c|%l|%G").splitlines()]
            partitions = [
                f"{name} ({nodes} nodes of {cores} CPUs, at most {limit}, {gres})"
                for name, nodes, cores, limit, gres in rows
            ]
            return f". Partitions here: {'; '.join(partitions)}"
    return ""


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


@final
class Watched:
    """The state of a job, queried rarely, because the controller serves a whole site."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._begin = self._asked = time.monotonic()
        self._state = State("PENDING")
        self._fresh = False

    def state(self, *, now: bool = False) -> State:
        """Return the state, at most LATEST_S seconds old; the last known state if the controller does not answer.

        Args:
            now: query the controller in any case.
        """
        time_s = time.monotonic()
        interval_s = min(LATEST_S, max(SOONEST_S, (time_s - self._begin) / 20))
        if self._fresh and not self._state.alive:
            return self._state
        if now or not self._fresh or time_s - self._asked > interval_s:
            with contextlib.suppress(LaunchError):
                self._state = job_state(self.job)
                self._fresh = True
            self._asked = time.monotonic()
        return self._state


def job_state(job: str) -> State:
    """Return a job's state by squeue, or by sacct if squeue does not know the job any more.

    Raises:
        LaunchError: Slurm does not answer.
    """
    try:
        rows = run_slurm("squeue", "-h", "--states=all", "-j", job, "-o", "%T|%r|%N").splitlines()
    except LaunchError as error:
        if "invalid job id" not in str(error).lower():
            raise
        rows = []
    if rows:
        return State(*rows[0].split("|"))
    with contextlib.suppress(LaunchError):
        rows = run_slurm("sacct", "-nXP", "-j", job, "-o", "State,Reason,NodeList").splitlines()
        if rows:
            name, *rest = rows[-1].split("|")
            return State(name.split()[0], *rest)
    return State(UNKNOWN, "Slurm does not know it any more")


def address_for_nodes() -> str:
    """Return the address of this machine on the route to Slurm's controller; the nodes can reach it.

    Raises:
        LaunchError: Slurm does not answer, or this machine has only its loopback address.
    """
    found = HOST.search(run_slurm("scontrol", "show", "config"))
    candidates = [name for name in (found[2], found[1]) if name] if found else []
    for name in [*candidates, socket.gethostname()]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    raise LaunchError(
        "the job's nodes cannot reach a controller here: this machine has only its loopback address; "
        "run the controller in the job, with 'slurm:controller=job'"
    )


@final
@dataclass(frozen=True, slots=True)
class Allocation:
    """The job that this process runs in."""

    job: str
    num_ranks: int
    nodes: tuple[int, ...]  # number of CPUs of each node

    @classmethod
    def here(cls) -> Allocation | None:
        """Return this process's job; None outside of a job."""
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOBID")
        if not job:
            return None
        nodes = tuple(parse_counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1")))
        places = int(os.environ.get("SLURM_NTASKS") or sum(parse_counts(os.environ.get("SLURM_TASKS_PER_NODE", "1"))))
        return cls(job, places, nodes)


def end_of_file(path: Path, num_bytes: int = 20_000) -> str:
    """Return the end of a text file; empty if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
