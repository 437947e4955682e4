"""Recordings of `workbench record -- COMMAND`: the environment of the command, and what its ranks do with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType

from workbench.runtimes.user_loop.record import Recording
from workbench.trace.store import runs_root

VARIABLE = "WORKBENCH_RECORD"
STARTUP = Path(__file__).with_name("at_startup")
BEFORE_OTHERS = 1000  # exit priority: the process's own ends come later


def environment(
    names_file: Path, name: str | None, steps: int | None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a command whose ranks are recorded.

    Args:
        names_file: rank 0 writes the run's folder to this file, and every other rank an empty line.
        name, steps: see `record`.
        base: the environment to add to.
    """
    paths = [str(STARTUP), *filter(None, [base.get("PYTHONPATH")])]
    facts = {"names_file": str(names_file), "name": name, "steps": steps}
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(paths),
        "WORKBENCH_RUNS": str(runs_root().resolve()),
        VARIABLE: json.dumps(facts),
    }


def begin() -> None:
    """Begin to record this process, as the environment says. The recording ends with the process.

    Raises:
        WorkbenchError: it cannot be recorded.
    """
    facts = json.loads(os.environ[VARIABLE])
    recording = Recording(facts["name"], facts["steps"], timeout_s=120.0)
    recording.__enter__()
    first = recording.rank == 0  # another rank's host may lack the file's folder
    with nullcontext() if first else suppress(OSError), open(facts["names_file"], "a") as file:
        file.write(f"{recording.folder if first else ''}\n")
    errors = list[BaseException]()
    show = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        errors.append(error)
        show(kind, error, trace)

    def end() -> None:
        with suppress(Exception):  # the process ends, and its exit status is the program's
            recording.finish(errors[0] if errors else None, meets=False)

    sys.excepthook = note
    Finalize(None, end, exitpriority=BEFORE_OTHERS)  # also in processes of multiprocessing, which skip atexit
