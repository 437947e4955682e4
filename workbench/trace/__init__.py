"""Records of runs: spans and metrics, written by ranks, read on one clock.

- A rank writes: `recorder`, with the numbers of `kinds`.
- The store has a folder for each run: `store`, `info` (run.json), `index`, and `processes` (whether a writer is
  alive).
- A reader reads: `run`, from `read`, `columns`, `spans` and `row_checks`. `links` pairs related spans. `rows` assigns
  rows of a figure to overlapping spans. `tail` and `follow` read a running training, and
  `progress` says how far it is.
- Other formats: `chrome` writes Chrome's and reads it back; `chakra` writes graphs for other simulators;
  `from_profiler` and `profile` read torch.profiler's.
- `weights`: the trained weights in a folder. `views`: the methods of a run that call `analysis`, `plots` and
  `replica.trained`. Only this module names higher layers
  (decisions/0033).
- `files` is a folder: how files are written and read safely.

May import `program`, `settings` and what lies below. Used by `replica`, `runtimes` and layers above. Begin with `run`.
"""

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
    """Return a stored run by its name, the beginning of its name, or its folder. "last" is the newest run.

    Raises:
        RunNotFound: no such run; similar names are listed.
    """
    if os.path.isfile(name):  # also False if the name is too long
        raise RunNotFound(
            f"{name} is a file, not the folder of a run. From a trace of torch.profiler, `workbench calibrate {name}` "
            "makes a cost model, "
            f'and `workbench.trace.from_profiler("{name}")` in Python makes a run. For a run, give its folder or its '
            "name"
        )
    return Run.load(find_run(name))
