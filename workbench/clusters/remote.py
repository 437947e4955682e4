"""What runs on the engines. Everything returned is plain data: a class that the notebook cannot import would hang it."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from typing import Any


def world() -> dict[str, Any]:
    """Who this engine is: its MPI rank and world, where it runs, and the library it found.

    The engine has imported mpi4py before (`--mpi`).
    """
    mpi = sys.modules["mpi4py.MPI"]
    communicator = mpi.COMM_WORLD
    return {
        "rank": communicator.Get_rank(),
        "size": communicator.Get_size(),
        "library": mpi.Get_library_version().split(",")[0].strip().splitlines()[0],
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def warm_up() -> None:
    """Import what a training needs, while the user is still reading."""
    import workbench.runtimes.launch  # noqa: F401 - for its effect: torch takes seconds to import


def run_job(payload: bytes, folder: str) -> dict[str, Any]:
    """Train as this engine's rank.

    Args:
        payload: a cloudpickled `runtimes.launch.Job` without a folder.
        folder: its folder.
    """
    import cloudpickle

    from workbench.runtimes.launch import run_rank

    summary = run_rank(replace(cloudpickle.loads(payload), folder=folder))
    return dict(json.loads(json.dumps(summary, default=str)))
