"""What runs on the engines. Everything returned is plain data: a class that the notebook cannot import would hang it."""

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
    """Who this engine is: its rank and world, where it runs, and the library it found.

    An engine of an MPI world has imported mpi4py before (`--mpi`); another one has its launcher's word.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        communicator = mpi.COMM_WORLD
        rank, size = communicator.Get_rank(), communicator.Get_size()
        library = mpi.Get_library_version().split(",")[0].strip().splitlines()[0]
    else:
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # another launcher's: these ranks meet in the run's folder
            os.environ.pop(name, None)
        rank, size, library = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "none"
    return {"rank": rank, "size": size, "library": library, "host": socket.gethostname(), "pid": os.getpid()}


def sees(path: str, timeout_s: float) -> bool:
    """Whether a file that was just written is there: a shared file system may take its time."""
    import time

    deadline = time.monotonic() + timeout_s
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(os.path.dirname(path))  # makes a network file system look again
        time.sleep(0.1)
    return True


def warm_up() -> None:
    """Import what a training needs, while the user is still reading, where the engine's own program has not."""
    import workbench.runtimes.rank.main  # noqa: F401 - for its effect: torch takes seconds to import


def vitals() -> dict[str, Any]:
    """What an idle engine says of itself now."""
    from workbench.runtimes.liveness.failure_detector import memory_bytes
    from workbench.runtimes.transport.base import pick_device

    rank = world()["rank"]
    return {"memory_bytes": memory_bytes(), "device": str(pick_device(rank))}


def run_job(payload: bytes, folder: str) -> dict[str, Any]:
    """Train as this engine's rank. What the rank prints, its pulse and its end are kept in the run's folder.

    Args:
        payload: a cloudpickled `runtimes.rank.main.Job` without a folder.
        folder: its folder.
    """
    import cloudpickle

    from workbench.clusters.supervision.heartbeat import RankOutput
    from workbench.runtimes.rank.main import run_rank

    try:
        with RankOutput(Path(folder), int(world()["rank"])) as watch:
            summary = run_rank(replace(cloudpickle.loads(payload), folder=folder))
            watch.summary = dict(json.loads(json.dumps(summary, default=str)))
        return watch.summary
    finally:  # an interrupt from here on would lose the answer; the engine takes up its own way with each call
        signal.signal(signal.SIGINT, signal.SIG_IGN)
