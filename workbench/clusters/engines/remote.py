"""Functions that run on the engines.

They return plain data: a class that the notebook cannot import would block the notebook.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def world() -> dict[str, Any]:
    """Return this engine's rank, the world's size, its host, its process id, and its MPI library.

    An engine of an MPI world has imported mpi4py already (`--mpi`). Others read the variables that their launcher
    set.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        communicator = mpi.COMM_WORLD
        rank, size = communicator.Get_rank(), communicator.Get_size()
        library = mpi.Get_library_version().split(",")[0].strip().splitlines()[0]
    else:
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # of another launcher: these ranks meet in the run's folder
            os.environ.pop(name, None)
        rank, size, library = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "none"
    return {"rank": rank, "size": size, "library": library, "host": socket.gethostname(), "pid": os.getpid()}


def can_see(path: str, timeout_s: float) -> bool:
    """Return True if a new file becomes visible within `timeout_s` seconds: a shared file system may be slow."""
    import time

    deadline = time.monotonic() + timeout_s
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(path))  # makes a network file system refresh
        time.sleep(0.1)
    return True


def warm_up() -> None:
    """Import what a training needs, before the first one."""
    import workbench.runtimes.rank.main  # noqa: F401 - for its effect: torch takes seconds to import


def idle_status() -> dict[str, Any]:
    """Return the memory, in bytes, and the device of an idle engine."""
    from workbench.runtimes.liveness.usage import memory_bytes
    from workbench.runtimes.transport.base import pick_device

    rank = world()["rank"]
    return {"memory_bytes": memory_bytes(), "device": str(pick_device(rank))}


def run_job(payload: bytes, folder: str) -> dict[str, Any]:
    """Train as this engine's rank. The rank's output, heartbeat and end are written into the run's folder.

    Args:
        payload: a cloudpickled `runtimes.rank.main.Job` without a folder.
        folder: the run's folder.

    Returns:
        The rank's summary.
    """
    import cloudpickle

    from workbench.clusters.supervision.rank_output import CapturedOutput
    from workbench.runtimes.rank.main import run_rank

    try:
        with CapturedOutput(Path(folder), int(world()["rank"])) as captured:
            summary = run_rank(replace(cloudpickle.loads(payload), folder=folder))
            captured.summary = dict(json.loads(json.dumps(summary, default=str)))
        return captured.summary
    finally:  # a later interrupt would lose the result; the engine restores its own handler at the next call
        signal.signal(signal.SIGINT, signal.SIG_IGN)
