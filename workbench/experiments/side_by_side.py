"""Execute several notebooks at a time, each in a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from workbench.clusters.supervision.reaper import reaped
from workbench.errors import WorkbenchError
from workbench.machine import num_cores

POLL_S = 0.1  # time between checks whether a notebook has ended
CORES_VARIABLE = "WORKBENCH_NOTEBOOK_CORES"  # number of cores for the simulations of a notebook; all if it is not set


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A notebook to execute, where to write the executed one, and its parameters."""

    notebook: Path
    output: Path
    parameters: Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    messages: Path  # what the process writes to its standard error
    begun_s: float


def run_side_by_side(
    tasks: Sequence[Task],
    jobs: int,
    *,
    timeout_s: float | None = None,
    begin: Callable[[Task], object] = lambda _: None,
) -> Generator[tuple[Task, float, WorkbenchError | None]]:
    """Execute notebooks as `workbench notebook run` does, in the given order.

    Close the generator if you leave it early. No process remains then, nor after a kill of this process.

    Args:
        tasks: the notebooks.
        jobs: number of notebooks at a time.
        timeout_s: limit for each notebook, in seconds.
        begin: called with each notebook that begins.

    Yields:
        A notebook that has ended, its duration in seconds, and its error if it failed.
    """
    queue, running = deque(tasks), list[_Running]()
    mark = f"WORKBENCH_NOTEBOOKS_{secrets.token_hex(8).upper()}"
    environment = {**os.environ, mark: "1", CORES_VARIABLE: str(max(1, num_cores() // jobs))}
    with reaped(mark) as folder:
        while queue or running:
            while queue and len(running) < jobs:
                task = queue.popleft()
                begin(task)
                running.append(_start(task, Path(folder), environment, timeout_s))
            ended = [one for one in running if one.process.poll() is not None]
            for one in ended:
                running.remove(one)
                yield one.task, time.monotonic() - one.begun_s, _error(one)
            if not ended:
                time.sleep(POLL_S)


def _start(task: Task, folder: Path, environment: dict[str, str], timeout_s: float | None) -> _Running:
    parameters, messages = folder / f"{task.output.stem}.json", folder / f"{task.output.stem}.log"
    parameters.write_text(json.dumps(dict(task.parameters)))
    command = [sys.executable, "-m", "workbench", "notebook", "run", str(task.notebook)]
    command += ["--file", str(parameters), "--output", str(task.output)]
    command += [] if timeout_s is None else ["--timeout", str(timeout_s)]
    with messages.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    return _Running(task, process, messages, time.monotonic())


def _error(ended: _Running) -> WorkbenchError | None:
    """Return why a notebook failed: the message of its process, with the traceback as a note."""
    status = ended.process.returncode
    if status == 0:
        return None
    prefix = "workbench: "
    lines = ended.messages.read_text(errors="replace").splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith(prefix)), None)
    if first is None:
        why = "was killed (out of memory?)" if status < 0 else f"ended with exit status {status}"
        return WorkbenchError("\n".join([f"{ended.task.notebook}: its process {why}", *lines[-20:]]))
    error = WorkbenchError(lines[first].removeprefix(prefix))
    if lines[first + 1 :]:
        error.add_note("\n".join(lines[first + 1 :]))
    return error
