"""Pending evaluations: the parameters to evaluate are stored in the run's folder, not in memory.

Where ranks are at different steps, rank 0 evaluates at the end of the run (decisions/0012). If the run ends before,
`evaluate_left` or `workbench evaluate RUN` makes the evaluations.

    evaluations/step-00000004.pt      the parameters after step 4, and the row that the evaluation completes
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, final

import torch

from workbench.errors import ConfigError
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.replica.local_training import LocalTraining, model_info
from workbench.settings import Settings
from workbench.trace.files.append import append, cannot_write, open_append
from workbench.trace.files.atomic import atomic_file
from workbench.trace.processes import ENDED
from workbench.trace.recorder import metrics_name, row_text
from workbench.trace.run import PENDING_FOLDER, Run

FORMAT = 1


@final
class PendingEvaluations:
    """The pending evaluations of one run, in order of step. At most one snapshot is in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = Path(folder) / PENDING_FOLDER
        self._lock = Lock()  # a server's thread adds one while rank 0 removes the folder

    def add(self, row: dict[str, Any], snapshot: Any) -> None:
        """Store a snapshot of the parameters.

        Raises:
            WorkbenchError: it cannot be written.
        """
        path = self._folder / f"step-{row['step']:08d}.pt"
        try:
            with self._lock:
                self._folder.mkdir(exist_ok=True)
                with atomic_file(path) as file:
                    torch.save({"format": FORMAT, "row": row, "snapshot": snapshot}, file)
        except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
            raise cannot_write(self._folder, error if isinstance(error, OSError) else OSError(str(error))) from error

    def newest(self) -> int:
        """The last pending step; -1 for none."""
        return max((int(path.stem.removeprefix("step-")) for path in self._folder.glob("step-*.pt")), default=-1)

    def take(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield row and snapshot of each. A file is removed when the next one is requested, so that none is lost.

        Raises:
            ConfigError: a file is damaged.
        """
        for path in sorted(self._folder.glob("step-*.pt")):
            yield _read(path)
            path.unlink()
        with self._lock:
            if self._folder.is_dir() and not any(self._folder.glob("step-*.pt")):
                for rest in self._folder.iterdir():  # temporary files of a killed writer
                    rest.unlink()
                self._folder.rmdir()


def _read(path: Path) -> tuple[dict[str, Any], Any]:
    """Return row and snapshot of a pending evaluation."""
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        return {**kept["row"], "step": int(kept["row"]["step"])}, kept["snapshot"]
    except (OSError, MemoryError):  # the file may be sound
        raise
    except Exception as error:  # a damaged file can raise nearly any exception
        raise ConfigError(
            f"{path} is damaged, so the parameters of that step are lost: remove the file, then `workbench evaluate` makes the others"
        ) from error


def evaluate_left(folder: Path | str, algorithm: Algorithm, problem: Problem) -> int:
    """Make the pending evaluations of a run that failed or was killed, and add them to its record.

    Args:
        folder: the run's folder.
        algorithm, problem: those of the run.

    Returns:
        How many were made.

    Raises:
        ConfigError: the algorithm or problem is not that of the run, the run has not ended, or a stored evaluation is damaged.
    """
    folder = Path(folder)
    run = Run.load(folder)
    info, made = run.info, {row["step"] for row in run.evaluations()}
    if info.get("status") not in (*ENDED, "lost"):
        raise ConfigError(
            f"{folder.name} is {info.get('status')}: it makes its evaluations itself; stop it first, or wait"
        )
    for key, what, given in (
        ("algorithm", "algorithm", type(algorithm).__name__),
        ("problem", "problem", problem.name),
    ):
        recorded = (info.get(key) or {}).get("name")
        if recorded != given:
            raise ConfigError(f"{folder.name} was a run of {recorded}, and this is {given}: give the same {what} again")
    num_ranks = int(info.get("num_workers") or 1)
    worker = LocalTraining(algorithm, problem, Settings(steps=1), 0, num_ranks, torch.device("cpu"))
    if not worker.can_evaluate:
        raise ConfigError(f"problem {problem.name} has no test data: there is nothing to evaluate")
    shapes, recorded = model_info(worker.replica.layout)["shapes"], (info.get("model") or {}).get("shapes")
    if recorded is not None and shapes != recorded:
        raise ConfigError(f"{folder.name} trained a {problem.name} of other sizes: give the problem with its options")
    metrics = folder / metrics_name(0)
    changed = {path: os.stat(path) for path in (metrics, folder / PENDING_FOLDER) if path.exists()}
    num_made, file = 0, open_append(metrics)
    try:
        for row, snapshot in PendingEvaluations(folder).take():
            if row["step"] in made:  # the run was killed after writing the row
                continue
            append(file, [row_text(evaluated(worker, row, snapshot))])
            num_made += 1
    finally:
        os.close(file)
        for path, before in changed.items():  # a lost run's newest change is its last sign of life: keep that time
            with suppress(FileNotFoundError):
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return num_made


def evaluated(worker: LocalTraining, row: dict[str, Any], snapshot: Any) -> dict[str, Any]:
    """The completed row of an evaluation that one rank makes for all."""
    return {**row, "evaluation": worker.evaluate_snapshot(snapshot)}
