"""Ends a cluster's processes, even when the process that started them was killed.

Every process of a cluster has a mark: a variable in its environment, which all descendants inherit. This includes
engines in process groups of mpiexec, nannies in their own sessions, data loaders, and children whose parent has ended.
So processes are found by their mark. The process tree is not enough, because it loses the children of a killed process.

Run as a script, this file is the reaper: a process in its own session. It waits until its parent has ended, even by
SIGKILL, and then ends all marked processes. Of the package it imports only `machine`: it is small and starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil

from workbench.machine import is_running

POLL_S = 0.5
GRACE_S = 2.0
# In the cluster's folder: a command to run when the cluster's owner has ended, such as one that cancels its job.
AT_END = "at-end.json"
COMMAND_S = 60.0
ROUNDS = 20  # a process may start while the others are being ended


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes, except this one, that have the variable `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended, a zombie, or another user's
            if process.pid != os.getpid() and mark in process.environ():
                found.append(process)
    return found


def end_marked(mark: str, grace_s: float = GRACE_S) -> int:
    """End the marked processes: SIGTERM, so that mpiexec cleans up, and SIGKILL after `grace_s` seconds.

    Returns:
        How many processes there were.
    """
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
    """Wait until all have ended, for at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(map(is_running, processes)):
        time.sleep(0.02)


def start_reaper(mark: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the reaper of the calling process.

    When the calling process has ended, the reaper ends all marked processes and removes `folder`.
    """
    command = [sys.executable, "-P", __file__, str(os.getpid()), mark, folder]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, cwd=os.sep, start_new_session=True)


@contextlib.contextmanager
def reaped(mark: str) -> Iterator[str]:
    """End the marked processes at the end of the block, and when this process is killed.

    Yields:
        A folder for their files, which is removed then.
    """
    folder = tempfile.mkdtemp(prefix="workbench-marked-")
    reaper = start_reaper(mark, folder)
    try:
        yield folder
    finally:
        end_marked(mark)
        reaper.kill()
        reaper.wait()
        shutil.rmtree(folder, ignore_errors=True)


def main(parent: str, mark: str, folder: str) -> None:
    """Wait until the parent has ended, then clean up."""
    while os.getppid() == int(parent):  # safe if another process reuses the number: it does not become our parent
        time.sleep(POLL_S)
    end_marked(mark)
    run_last(folder)
    shutil.rmtree(folder, ignore_errors=True)


def run_last(folder: str) -> None:
    """Run the command in the folder's AT_END file, if there is one."""
    missing_or_late = (OSError, ValueError, subprocess.TimeoutExpired)
    with contextlib.suppress(*missing_or_late), open(os.path.join(folder, AT_END)) as file:
        null = subprocess.DEVNULL
        subprocess.run(json.load(file), stdin=null, stdout=null, stderr=null, timeout=COMMAND_S, check=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
