"""Ends a cluster's processes, whatever became of the process that started them.

Everything a cluster starts carries a mark, the name of a variable in its environment, which every descendant inherits:
engines that mpiexec put into process groups of their own, nannies in sessions of their own, data loaders, children
whose parent is gone. So they are found by that mark and not by a tree that a kill has torn.

Run as a script, this file is the warden: a process of its own session that waits for its parent to be gone, even by
SIGKILL, and then ends what carries the mark. It imports nothing of the package, to be small and quick to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import psutil

POLL_S = 0.5
GRACE_S = 2.0
AT_END = "at-end.json"  # in the cluster's folder: a command to run when its owner is gone, such as one that cancels its job
COMMAND_S = 60.0
ROUNDS = 20  # a process may be born while the others are being ended


def marked(mark: str) -> list[psutil.Process]:
    """Processes, other than this one, that were started with that variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone, a zombie, or somebody else's
            if process.pid != os.getpid() and mark in process.environ():
                found.append(process)
    return found


def end_marked(mark: str, grace_s: float = GRACE_S) -> int:
    """End those processes: SIGTERM, so that mpiexec clears up behind itself, then SIGKILL. Returns how many there were."""
    processes = marked(mark)
    num_found = len(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _wait_for(processes, grace_s)
    for _ in range(ROUNDS):
        processes = marked(mark)
        if not processes:
            break
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_for(processes, 1.0)
    return num_found


def _wait_for(processes: list[psutil.Process], timeout_s: float) -> None:
    """Until all have ended, or the time is over. A zombie has ended: in a container its new parent may never collect it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(map(_runs, processes)):
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def start_warden(mark: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the warden of the calling process: when that is gone, what is marked ends and `folder` is removed."""
    command = [sys.executable, "-P", __file__, str(os.getpid()), mark, folder]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, cwd=os.sep, start_new_session=True)


def main(parent: str, mark: str, folder: str) -> None:
    """Wait for the parent to be gone, then clear up."""
    while os.getppid() == int(parent):  # its number, taken again by another process, cannot deceive: that one is not our parent
        time.sleep(POLL_S)
    end_marked(mark)
    run_last(folder)
    shutil.rmtree(folder, ignore_errors=True)


def run_last(folder: str) -> None:
    """Run the command that the folder keeps for the end, if there is one."""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired), open(os.path.join(folder, AT_END)) as file:
        null = subprocess.DEVNULL
        subprocess.run(json.load(file), stdin=null, stdout=null, stderr=null, timeout=COMMAND_S, check=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
