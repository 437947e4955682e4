"""What happened in a run: spans and metrics recorded, stored, read again on one clock."""

import os

from workbench.errors import RunNotFound
from workbench.trace.from_profiler import from_profiler
from workbench.trace.kinds import KINDS
from workbench.trace.recorder import FileRecorder, MemoryRecorder, Recorder
from workbench.trace.run import Run
from workbench.trace.spans import Spans
from workbench.trace.store import RunListing, StoredRun, find_run, list_runs, new_run, runs_root, update_run

__all__ = [
    "KINDS",
    "FileRecorder",
    "MemoryRecorder",
    "Recorder",
    "Run",
    "RunListing",
    "Spans",
    "StoredRun",
    "find_run",
    "from_profiler",
    "list_runs",
    "new_run",
    "open_run",
    "runs_root",
    "update_run",
]


def open_run(name: str) -> Run:
    """A run of the store by name, by the beginning of its name, or by folder; "last" is the newest.

    Raises:
        RunNotFound: there is none; near misses are named.
    """
    if os.path.isfile(name):  # False also for what is too long a name
        raise RunNotFound(
            f"{name} is a file, not the folder of a run. Of a trace by torch.profiler, `workbench calibrate {name}` makes a cost model, "
            f'and `workbench.trace.from_profiler("{name}")` in Python makes a run; of a run, give the folder or the name'
        )
    return Run.load(find_run(name))
