"""Run the cells of a grid. An interrupted sweep continues where it stopped, and leaves no process."""

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
from workbench.clusters.supervision.reaper import end_marked, start_reaper
from workbench.clusters.supervision.sigterm import terminated_as_exit
from workbench.errors import ConfigError, RunNotFound
from workbench.experiments.cell_states import Attempt, State, claim, conclude, read_attempts, renew
from workbench.experiments.fork_cells import start_fork_server
from workbench.experiments.grid import Cell, Grid, read_grid
from workbench.experiments.sweep_result import CellState, SweepResult, cells_folder, notebook_of, state_of, states
from workbench.trace.store import ENDED, SWEEP_VARIABLE, read_info, runs_root, update_run

POLL_S = 0.1  # time between checks whether a cell has ended
HEARTBEAT_S = 10.0  # time between heartbeats of a claim
OTHERS_POLL_S = 2.0  # time between checks of cells that other processes run


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a sweep.

    Attributes:
        num_done: finished cells, including those of earlier calls.
        num_failed: failed cells.
        num_cells: all cells.
        running: labels of the running cells.
        left_s: estimated seconds left; None if unknown.
        ended: the cell that has just ended, if any.
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
    """Run all cells of a grid that are not finished, each in its own processes. Return when all cells have ended.

    A cell that a sweep of the same name has finished is not run again if its runs are still in the store. A cell that
    was interrupted is run again. After Ctrl-C or a kill no process remains, and the same call continues the sweep.

    Args:
        grid: a YAML file, the content of such a file, or a `Grid`.
        jobs: number of cells that run at a time; None: that of the grid.
        retry_failed: run failed cells again.
        root: the run store; None: `runs_root()`.
        watch: called when a cell begins or ends, and about once per second.

    Raises:
        ConfigError: the grid or a cell is not valid.
    """
    grid = grid if isinstance(grid, Grid) else read_grid(grid)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs={jobs}: give the number of cells that run at a time, 1 or more")
    grid = replace(grid, jobs=jobs or grid.jobs)
    store = Path(root if root is not None else runs_root()).resolve()
    folder = cells_folder(grid.name, store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): set WORKBENCH_RUNS to another folder") from None
    with terminated_as_exit(), contextlib.closing(_Sweeper(grid, store, folder, retry_failed, watch)) as sweeper:
        sweeper.run()
    return SweepResult(grid.name, states(grid, store), store)


@final
@dataclass
class _Running:
    """A running cell and its process."""

    cell: Cell
    attempt: Attempt
    process: subprocess.Popen[bytes] | Forked
    mark: str
    begun_s: float


@final
class _Sweeper:
    """The sweep's loop: one thread, and one child process per cell."""

    def __init__(
        self, grid: Grid, store: Path, folder: Path, retry_failed: bool, watch: Callable[[Progress], None] | None
    ) -> None:
        self._grid, self._store, self._folder = grid, store, folder
        self._retry, self._watch = retry_failed, watch or (lambda _: None)
        self._running: list[_Running] = []
        self._took: list[float] = []
        self._mark = f"WORKBENCH_SWEEP_{secrets.token_hex(8).upper()}"
        self._scratch = tempfile.mkdtemp(prefix="workbench-sweep-")
        self._reaper = start_reaper(self._mark, self._scratch)
        self._states: dict[str, CellState] = {}
        self._fork_server: ForkServer | None = None

    def run(self) -> None:
        """Run cells until each is finished or failed."""
        found = states(self._grid, self._store)
        self._states = {item.cell.key: item for item in found}
        self._took = [took for item in found if item.attempt and (took := item.attempt.record.get("seconds"))]
        redo = ("open", "failed") if self._retry else ("open",)
        queue = deque(item.cell for item in found if item.state in redo)
        elsewhere = deque(item.cell for item in found if item.state == "running")
        reported_s = checked_s = beaten_s = time.monotonic()
        self._report(len(queue))
        while queue or elsewhere or self._running:
            while queue and len(self._running) < self._grid.jobs:
                cell = queue.popleft()
                if not self._start(cell):
                    elsewhere.append(cell)
                self._report(len(queue))
            ended = [running for running in self._running if self._has_ended(running)]
            for running in ended:
                self._running.remove(running)
                self._report(len(queue), self._conclude(running))
            now = time.monotonic()
            if now - beaten_s > HEARTBEAT_S:
                beaten_s = now
                for running in self._running:
                    renew(running.attempt)
            if elsewhere and now - checked_s > OTHERS_POLL_S:
                checked_s = now
                self._check_elsewhere(queue, elsewhere)
            if now - reported_s > 1.0:
                reported_s = now
                self._report(len(queue))
            if not ended:
                time.sleep(POLL_S)

    def _check_elsewhere(self, queue: deque[Cell], elsewhere: deque[Cell]) -> None:
        """Check the cells that other processes had claimed. An interrupted one goes into the queue."""
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
        before = read_attempts(self._folder, cell.key).get(cell.key)  # another process may have claimed it meanwhile
        now = state_of(cell, before, self._store)
        known = self._states[cell.key].attempt
        if now.state in ("running", "finished") or (now.state == "failed" and before != known):
            return False
        attempt = claim(self._folder, self._grid.name, cell, before.number + 1 if before else 0)
        if attempt is None:
            return False
        if before is not None:
            self._close_runs(before, "interrupted: the process that ran the sweep was gone")
        mark = f"{self._mark}_{cell.key.upper()}"
        about = {
            "id": self._grid.name,
            "cell": cell.key,
            "attempt": attempt.number,
            "axes": cell.axes,
            "runs_file": str(attempt.runs_file),
        }
        variables = {"WORKBENCH_RUNS": str(self._store), SWEEP_VARIABLE: json.dumps(about), self._mark: "1", mark: "1"}
        try:
            process = self._process(cell, attempt, {**os.environ, **variables})
            self._running.append(_Running(cell, attempt, process, mark, time.monotonic()))
        except BaseException:
            conclude(attempt, "interrupted")
            raise
        self._states[cell.key] = CellState(cell, "running", attempt)
        return True

    def _process(self, cell: Cell, attempt: Attempt, env: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
        if cell.notebook is None and cell.values.get("runtime") == "simulated":
            if self._fork_server is not None and self._fork_server.has_ended:
                self._fork_server.close()
                self._fork_server = None
            self._fork_server = self._fork_server or start_fork_server({**os.environ, self._mark: "1"})
            return self._fork_server.start([*cell.train_arguments()[1:], "--json"], env, attempt.log)
        with attempt.log.open("wb") as log:
            return subprocess.Popen(
                self._command(cell, attempt),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _command(self, cell: Cell, attempt: Attempt) -> list[str]:
        if cell.notebook is None:
            return [sys.executable, "-m", "workbench", *cell.train_arguments(), "--json"]
        parameters = attempt.path.with_suffix(".parameters.json")
        parameters.write_text(json.dumps(cell.values))
        arguments = ["notebook", "run", cell.notebook, "--file", str(parameters), "--output", str(notebook_of(attempt))]
        return [sys.executable, "-m", "workbench", *arguments]

    def _has_ended(self, running: _Running) -> bool:
        if running.process.poll() is not None:
            return True
        return self._grid.timeout_s is not None and time.monotonic() - running.begun_s > self._grid.timeout_s

    def _conclude(self, running: _Running) -> CellState:
        """Record how a cell ended, and end its remaining processes."""
        status = running.process.poll()
        if isinstance(running.process, Forked):
            running.process.kill()
        else:
            end_marked(running.mark)  # also processes that remain after the cell's end
            running.process.wait()
        took = time.monotonic() - running.begun_s
        fault = self._fault(running, status)
        state: State = "failed" if fault else "finished"
        if fault:
            self._close_runs(running.attempt, fault)
        else:
            self._took.append(took)
        attempt = conclude(running.attempt, state, seconds=took, exit_status=status, error=fault or None)
        self._states[running.cell.key] = CellState(running.cell, state, attempt)
        return self._states[running.cell.key]

    def _fault(self, running: _Running, status: int | None) -> str:
        """Return why a cell failed; empty for a finished cell."""
        if status is None:
            return f"not ended after {self._grid.timeout_s:g} s: set a larger timeout_s"
        if status != 0:
            return _error_line(running.attempt.log) or f"exit status {status}"
        if running.cell.notebook is not None:
            return ""
        ended = [_status(self._store / name) for name in running.attempt.runs]
        if not ended:
            return f"it ended without a run in the store; its output: {running.attempt.log}"
        return "" if all(status == "finished" for status in ended) else f"its run is {', '.join(ended)}, not finished"

    def _close_runs(self, attempt: Attempt, error: str) -> None:
        """Record the runs of an attempt as failed, if they have not ended. Their processes are gone."""
        for name in attempt.runs:
            with contextlib.suppress(RunNotFound, OSError):
                if _status(self._store / name) not in ENDED:
                    update_run(self._store / name, status="failed", error=error)

    def _report(self, num_queued: int, ended: CellState | None = None) -> None:
        count = [item.state for item in self._states.values()]
        left_s = None
        if self._took:
            mean = sum(self._took) / len(self._took)
            here = [max(mean - (time.monotonic() - running.begun_s), 0.0) for running in self._running]
            left_s = (num_queued * mean + sum(here)) / self._grid.jobs
        running = tuple(item.cell.label for item in self._running)
        self._watch(Progress(count.count("finished"), count.count("failed"), len(count), running, left_s, ended))

    def close(self) -> None:
        """End the running cells, and then the reaper. The next sweep runs these cells again."""
        with contextlib.ExitStack() as steps:  # in reverse order; each step also runs if an earlier one fails
            steps.callback(shutil.rmtree, self._scratch, ignore_errors=True)
            steps.callback(self._reaper.wait)
            steps.callback(self._reaper.kill)
            steps.callback(self._interrupt)
            steps.callback(end_marked, self._mark)
            if self._fork_server is not None:
                steps.callback(self._fork_server.close)

    def _interrupt(self) -> None:
        """Record that the running cells were interrupted."""
        for running in self._running:
            self._close_runs(running.attempt, "interrupted: the sweep was ended")
            conclude(running.attempt, "interrupted")
        self._running.clear()


def _status(folder: Path) -> str:
    try:
        return str(read_info(folder).get("status"))
    except RunNotFound:
        return "missing"


def _error_line(log: Path) -> str:
    """Return the error message of a failed command; if there is none, the last line of its output."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:  # the command wrote nothing
        return ""
    own = [line.removeprefix("workbench: ") for line in lines if line.startswith("workbench: ")]
    return (own or lines or [""])[-1]
