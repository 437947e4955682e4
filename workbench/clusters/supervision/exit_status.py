"""How a rank's process ended, as who started it tells: its own parent, mpiexec or srun."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from workbench.runtimes.liveness.failure_detector import heartbeat_name, step_under_way

SIGNALS = {"Killed": signal.SIGKILL, "Terminated": signal.SIGTERM, "Aborted": signal.SIGABRT, "Segmentation fault": signal.SIGSEGV}
OPEN_MPI = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
HYDRA = re.compile(r"PID (\d+) RUNNING AT \S+ = EXIT CODE: (\d+)")
SRUN = re.compile(rf"srun: error: \S+: task (\d+): ({'|'.join(SIGNALS)})")


def ends_told(text: str, pids: Mapping[int, int]) -> dict[int, int]:
    """rank -> how its process ended (minus the signal), by the words of mpiexec or srun.

    >>> ends_told("prterun noticed that process rank 1 with PID 77 on node a exited on\\nsignal 9 (Killed).", {})
    {1: -9}

    Args:
        pids: process -> rank, for an mpiexec that only names processes.
    """
    text = " ".join(text.split())
    found = {int(rank): -int(number) for rank, number in OPEN_MPI.findall(text)}
    found |= {pids[int(pid)]: _status(int(code)) for pid, code in HYDRA.findall(text) if int(pid) in pids}
    return found | {int(rank): -int(SIGNALS[name]) for rank, name in SRUN.findall(text)}


def _status(code: int) -> int:
    """MPICH's launcher tells a signal as a small exit status."""
    return -code if code in {int(number) for number in SIGNALS.values()} else code


def signalled(status: int | None) -> int:
    """The signal that ended a process, by its exit status, or that of a shell around it; 0 for none."""
    if status is None:
        return 0
    return -status if status < 0 else status - 128 if 128 < status < 128 + 65 else 0


def end_words(folder: Path, rank: int, status: int) -> str:
    """ "killed by signal 9 (SIGKILL) at step 17 (out of memory?)": how a rank's process ended, of a run in that folder."""
    number = signalled(status)
    if not number:
        return f"it ended with exit status {status} at step {step_under_way(folder, rank)}"
    try:
        name = f" ({signal.Signals(number).name})"
    except ValueError:
        name = ""
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"killed by signal {number}{name} at step {step_under_way(folder, rank)}{hint}"


def pids_of(folder: Path) -> dict[int, int]:
    """process -> rank, of the ranks of a run that did not take their leave."""
    found = {}
    for path in folder.glob(heartbeat_name(0).replace("00000", "*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads(path.read_text())
            found[row["pid"]] = row["rank"]
    return found
