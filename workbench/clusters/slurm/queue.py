"""Submits, watches and cancels Slurm jobs by Slurm's own commands."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from typing import final

from workbench.clusters.schedulers.job import UNKNOWN, Scheduler, State, address_on_route, run_command
from workbench.errors import LaunchError
from workbench.machine import parse_counts

HOST = re.compile(r"^SlurmctldHost\[0\]\s*=\s*([^\s(]+)(?:\(([^)]+)\))?", re.MULTILINE)


def run_slurm(*command: str, text: str | None = None) -> str:
    """Run one of Slurm's commands and return its output: see `run_command`."""
    return run_command("Slurm", command, text)


@final
class SlurmQueue(Scheduler):
    """Slurm, for the launchers of jobs."""

    name = "Slurm"

    def submit(self, script: str) -> str:
        return submit(script)

    def state(self, job: str) -> State:
        """Return a job's state by squeue, or by sacct if squeue does not know the job any more."""
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

    def cancel_command(self, job: str) -> list[str]:
        return ["scancel", job]


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


def address_for_nodes() -> str:
    """Return the address of this machine on the route to Slurm's controller; the nodes can reach it.

    Raises:
        LaunchError: Slurm does not answer, or this machine has only its loopback address.
    """
    found = HOST.search(run_slurm("scontrol", "show", "config"))
    candidates = [name for name in (found[2], found[1]) if name] if found else []
    return address_on_route(
        [*candidates, socket.gethostname()], "run the controller in the job, with 'slurm:controller=job'"
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
