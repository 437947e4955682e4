"""End a rank that hangs in MPI_Finalize after a failure, with a line that says why.

MPI_Finalize waits for all ranks, also for one that still trains or is in a call that not all ranks make. MPI_Finalize
runs after Python's end, so a second process watches the rank. This process reads a pipe that no process writes to. The
pipe closes when the rank ends.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

FINALIZE_S = 15.0
WATCH = """
import os, select, signal, sys
limit_s, rank, words = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], limit_s)[0]:
    os.write(2, words.encode(errors="replace"))
    os.kill(rank, signal.SIGALRM)
"""


def bound_finalize(rank: int, why: str) -> None:
    """End this process by SIGALRM if it still runs after `FINALIZE_S`; mpiexec then ends the job.

    Called when the process ends.
    """
    words = (
        f"rank {rank} did not end in {FINALIZE_S:g} s (MPI_Finalize waits for all ranks), so a signal ends it: {why}\n"
    )
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    reader, _ = os.pipe()  # only this process has the other end, which stays open until this process ends
    command = [sys.executable, "-I", "-S", "-c", WATCH, str(FINALIZE_S), str(os.getpid()), words]
    with suppress(OSError):
        os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
        return
    signal.alarm(int(FINALIZE_S))
