"""How a rank's process ended, as its parent, mpiexec or srun reports it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from workbench.runtimes.liveness.failure_detector import heartbeat_name, step_under_way

SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
}
OPEN_MPI = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
HYDRA = re.compile(r"PID (\d+) RUNNING AT \S+ = EXIT CODE: (\d+)")
SRUN = re.compile(rf"srun: error: \S+: task (\d+): ({'|'.join(SIGNALS)})")


def parse_exit_statuses(text: str, pids: Mapping[int, int]) -> dict[int, int]:
    """Return rank -> its process's exit status (minus the signal's number), from the messages of mpiexec or srun.

    >>> parse_exit_statuses("prterun noticed that process rank 1 with PID 77 on node a exited on\\nsignal 9 (Killed).", {})
    {1: -9}

    Args:
        text: what mpiexec or srun printed.
        pids: process id -> rank, for an mpiexec that names only processes.
    """
    text = " ".join(text.split())
    found = {int(rank): -int(number) for rank, number in OPEN_MPI.findall(text)}
    found |= {pids[int(pid)]: _status(int(code)) for pid, code in HYDRA.findall(text) if int(pid) in pids}
    return found | {int(rank): -int(SIGNALS[name]) for rank, name in SRUN.findall(text)}


def _status(code: int) -> int:
    """Return the exit status; for a signal, minus its number: MPICH's launcher reports a signal as a small status."""
    return -code if code in {int(number) for number in SIGNALS.values()} else code


def signal_of(status: int | None) -> int:
    """Return the number of the signal that ended a process; 0 if no signal ended it.

    Args:
        status: its exit status: negative for a signal; 128 and more for a signal in a shell; None if unknown.
    """
    if status is None:
        return 0
    if status < 0:
        return -status
    return status - 128 if 128 < status < 128 + 65 else 0


def describe_exit(folder: Path, rank: int, status: int) -> str:
    """Describe how a rank's process ended: "killed by signal 9 (SIGKILL) at step 17 (out of memory?)".

    Args:
        folder: the run's folder, which shows the step.
        rank: the rank.
        status: its exit status, minus the signal's number for a signal.
    """
    number = signal_of(status)
    if not number:
        return f"it ended with exit status {status} at step {step_under_way(folder, rank)}"
    try:
        name = f" ({signal.Signals(number).name})"
    except ValueError:
        name = ""
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"killed by signal {number}{name} at step {step_under_way(folder, rank)}{hint}"


def ranks_by_pid(folder: Path) -> dict[int, int]:
    """Return process id -> rank, for the ranks of a run that did not end normally."""
    found = {}
    for path in folder.glob(heartbeat_name(0).replace("00000", "*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads(path.read_text())
            found[row["pid"]] = row["rank"]
    return found
