"""Runs the cells of a grid: goes on where it stopped, skips what is done, leaves no process."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from workbench.clusters.local.fork_server import Forked, ForkServer
from workbench.clusters.supervision.reaper import end_marked, start_warden
from workbench.errors import ConfigError, RunNotFound
from workbench.experiments.attempts import Attempt, State, beat, claim, conclude, read_attempts
from workbench.experiments.fork_cells import warm_server
from workbench.experiments.grid import Cell, Grid, read_grid
from workbench.experiments.outcome import CellState, SweepResult, cells_folder, notebook_of, state_of, states
from workbench.experiments.sigterm import terminated_as_exit
from workbench.trace.store import OVER, SWEEP_VARIABLE, read_info, runs_root, update_run

POLL_S, BEAT_S, LOOK_S = 0.1, 10.0, 2.0


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """Where a sweep is: cells done (those of earlier times too), failed, all; labels of those that run; seconds left, if known;

    and the cell that has just ended, if one has.
    """

    num_done: int
    num_failed: int
    num_cells: int
    running: tuple[str, ...]
    left_s: float | None
    ended: CellState | None = None


def sweep(
    grid: Grid | Path | str | Mapping[str, Any],
    *,
    jobs: int | None = None,
    retry_failed: bool = False,
    root: Path | str | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> SweepResult:
    """Run every cell of a grid that is not done, each in processes of its own; returns when all are.

    What a sweep of that name finished before, as far as the runs are still in the store, is not run again; a cell that was cut off
    is. Ended by Ctrl-C or killed, it leaves no process behind, and the same call goes on.

    Args:
        grid: a YAML file, what such a file holds, or a `Grid`.
        jobs: cells at a time; None for what the grid says.
        retry_failed: run failed cells again.
        root: the run store; None for `runs_root()`.
        watch: called when a cell begins or ends, and about once a second between.

    Raises:
        ConfigError: the grid, or a cell of it, cannot run.
    """
    grid = grid if isinstance(grid, Grid) else read_grid(grid)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs}: how many cells at a time, 1 or more")
    grid = replace(grid, jobs=jobs or grid.jobs)
    store = Path(root if root is not None else runs_root()).resolve()
    folder = cells_folder(grid.name, store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): name another run store in WORKBENCH_RUNS") from None
    with terminated_as_exit(), contextlib.closing(_Sweeper(grid, store, folder, retry_failed, watch)) as sweeper:
        sweeper.run()
    return SweepResult(grid.name, states(grid, store), store)


@final
@dataclass
class _Running:
    """A cell's process."""

    cell: Cell
    attempt: Attempt
    process: subprocess.Popen[bytes] | Forked
    mark: str
    begun_s: float


@final
class _Sweeper:
    """The loop: one thread, one child process a cell."""

    def __init__(self, grid: Grid, store: Path, folder: Path, retry_failed: bool, watch: Callable[[Progress], None] | None) -> None:
        self._grid, self._store, self._folder = grid, store, folder
        self._retry, self._watch = retry_failed, watch or (lambda _: None)
        self._running: list[_Running] = []
        self._took: list[float] = []
        self._mark = f"WORKBENCH_SWEEP_{secrets.token_hex(8).upper()}"
        self._scratch = tempfile.mkdtemp(prefix="workbench-sweep-")
        self._warden = start_warden(self._mark, self._scratch)
        self._states: dict[str, CellState] = {}
        self._warm: ForkServer | None = None

    def run(self) -> None:
        """Until every cell is finished or failed."""
        found = states(self._grid, self._store)
        self._states = {item.cell.key: item for item in found}
        self._took = [took for item in found if item.attempt and (took := item.attempt.record.get("seconds"))]
        redo = ("open", "failed") if self._retry else ("open",)
        queue = deque(item.cell for item in found if item.state in redo)
        elsewhere = deque(item.cell for item in found if item.state == "running")
        told_s = looked_s = beaten_s = time.monotonic()
        self._tell(len(queue))
        while queue or elsewhere or self._running:
            while queue and len(self._running) < self._grid.jobs:
                cell = queue.popleft()
                if not self._start(cell):
                    elsewhere.append(cell)
                self._tell(len(queue))
            ended = [running for running in self._running if self._has_ended(running)]
            for running in ended:
                self._running.remove(running)
                self._tell(len(queue), self._conclude(running))
            now = time.monotonic()
            if now - beaten_s > BEAT_S:
                beaten_s = now
                for running in self._running:
                    beat(running.attempt)
            if elsewhere and now - looked_s > LOOK_S:
                looked_s = now
                self._look(queue, elsewhere)
            if now - told_s > 1.0:
                told_s = now
                self._tell(len(queue))
            if not ended:
                time.sleep(POLL_S)

    def _look(self, queue: deque[Cell], elsewhere: deque[Cell]) -> None:
        """Cells that another process had claimed: done, still running, or cut off and ours to run."""
        attempts = read_attempts(self._folder)
        for cell in list(elsewhere):
            now = state_of(cell, attempts.get(cell.key), self._store)
            self._states[cell.key] = now
            if now.state != "running":
                elsewhere.remove(cell)
                if now.state == "open":
                    queue.append(cell)

    def _start(self, cell: Cell) -> bool:
        """Claim a cell and start its process; False if another process has it."""
        before = read_attempts(self._folder, cell.key).get(cell.key)  # somebody may have been quicker
        now = state_of(cell, before, self._store)
        known = self._states[cell.key].attempt
        if now.state in ("running", "finished") or (now.state == "failed" and before != known):
            return False
        attempt = claim(self._folder, self._grid.name, cell, before.number + 1 if before else 0)
        if attempt is None:
            return False
        if before is not None:
            self._close_runs(before, "cut off: the process that ran the sweep was gone")
        mark = f"{self._mark}_{cell.key.upper()}"
        about = {"id": self._grid.name, "cell": cell.key, "attempt": attempt.number, "axes": cell.axes, "runs_file": str(attempt.runs_file)}
        env = {**os.environ, "WORKBENCH_RUNS": str(self._store), SWEEP_VARIABLE: json.dumps(about), self._mark: "1", mark: "1"}
        try:
            self._running.append(_Running(cell, attempt, self._process(cell, attempt, env), mark, time.monotonic()))
        except BaseException:
            conclude(attempt, "interrupted")
            raise
        self._states[cell.key] = CellState(cell, "running", attempt)
        return True

    def _process(self, cell: Cell, attempt: Attempt, env: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
        if cell.notebook is None and cell.values.get("runtime") == "simulated":
            if self._warm is not None and self._warm.has_ended:
                self._warm.close()
                self._warm = None
            self._warm = self._warm or warm_server({**os.environ, self._mark: "1"})
            return self._warm.start([*cell.train_arguments()[1:], "--json"], env, attempt.log)
        with attempt.log.open("wb") as log:
            return subprocess.Popen(
                self._command(cell, attempt), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _command(self, cell: Cell, attempt: Attempt) -> list[str]:
        if cell.notebook is None:
            return [sys.executable, "-m", "workbench", *cell.train_arguments(), "--json"]
        parameters = attempt.path.with_suffix(".parameters.json")
        parameters.write_text(json.dumps(cell.values))
        words = ["notebook", "run", cell.notebook, "--file", str(parameters), "--output", str(notebook_of(attempt))]
        return [sys.executable, "-m", "workbench", *words]

    def _has_ended(self, running: _Running) -> bool:
        if running.process.poll() is not None:
            return True
        return self._grid.timeout_s is not None and time.monotonic() - running.begun_s > self._grid.timeout_s

    def _conclude(self, running: _Running) -> CellState:
        """Write down how a cell ended, and end what it left."""
        status = running.process.poll()
        if isinstance(running.process, Forked):
            running.process.kill()
        else:
            end_marked(running.mark)  # and whatever it left, if it has ended
            running.process.wait()
        took = time.monotonic() - running.begun_s
        words = self._fault(running, status)
        state: State = "failed" if words else "finished"
        if words:
            self._close_runs(running.attempt, words)
        else:
            self._took.append(took)
        attempt = conclude(running.attempt, state, seconds=took, exit_status=status, error=words or None)
        self._states[running.cell.key] = CellState(running.cell, state, attempt)
        return self._states[running.cell.key]

    def _fault(self, running: _Running, status: int | None) -> str:
        """Why a cell counts as failed; empty for one that finished."""
        if status is None:
            return f"not ended after {self._grid.timeout_s:g} s: give cells more with timeout_s"
        if status != 0:
            return _last_words(running.attempt.log) or f"exit status {status}"
        if running.cell.notebook is not None:
            return ""
        ended = [_status(self._store / name) for name in running.attempt.runs]
        if not ended:
            return f"it ended without a run in the store; what it said: {running.attempt.log}"
        return "" if all(word == "finished" for word in ended) else f"its run is {', '.join(ended)}, not finished"

    def _close_runs(self, attempt: Attempt, words: str) -> None:
        """Runs whose processes are gone no longer say that they are running."""
        for name in attempt.runs:
            with contextlib.suppress(RunNotFound, OSError):
                if _status(self._store / name) not in OVER:
                    update_run(self._store / name, status="failed", error=words)

    def _tell(self, num_queued: int, ended: CellState | None = None) -> None:
        count = [item.state for item in self._states.values()]
        left_s = None
        if self._took:
            mean = sum(self._took) / len(self._took)
            here = [max(mean - (time.monotonic() - running.begun_s), 0.0) for running in self._running]
            left_s = (num_queued * mean + sum(here)) / self._grid.jobs
        running = tuple(item.cell.label for item in self._running)
        self._watch(Progress(count.count("finished"), count.count("failed"), len(count), running, left_s, ended))

    def close(self) -> None:
        """End what still runs, so that it is run again next time; then the warden."""
        with contextlib.ExitStack() as steps:  # last first, each also when one before it fails
            steps.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            steps.callback(self._warden.wait)
            steps.callback(self._warden.kill)
            steps.callback(self._interrupt)
            steps.callback(end_marked, self._mark)
            if self._warm is not None:
                steps.callback(self._warm.close)

    def _interrupt(self) -> None:
        """Write down that cells were cut off."""
        for running in self._running:
            self._close_runs(running.attempt, "interrupted: the sweep was ended")
            conclude(running.attempt, "interrupted")
        self._running.clear()


def _status(folder: Path) -> str:
    try:
        return str(read_info(folder).get("status"))
    except RunNotFound:
        return "missing"


def _last_words(log: Path) -> str:
    """What a failed command said: its own error, else its last line."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:  # it ended before it could write
        return ""
    own = [line.removeprefix("workbench: ") for line in lines if line.startswith("workbench: ")]
    return (own or lines or [""])[-1]
