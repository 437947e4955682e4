"""The states of a sweep's cells, as a table and as an exit status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from workbench.analysis.table import Column, Table, seconds
from workbench.experiments.cell_states import Attempt, State, is_alive, read_attempts
from workbench.experiments.grid import Cell, Grid
from workbench.trace.store import runs_root


@final
@dataclass(frozen=True, slots=True)
class CellState:
    """A cell, its state and its newest attempt."""

    cell: Cell
    state: State
    attempt: Attempt | None = None

    @property
    def error(self) -> str:
        """Why the cell failed; empty if it did not fail."""
        return str(self.attempt.record.get("error") or "") if self.attempt else ""

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the cell's runs in the store."""
        return self.attempt.runs if self.attempt else ()


@final
@dataclass(frozen=True, repr=False)
class SweepResult:
    """All cells of a sweep, in the grid's order."""

    name: str
    cells: tuple[CellState, ...]
    root: Path

    @property
    def failed(self) -> tuple[CellState, ...]:
        """Cells that failed."""
        return tuple(item for item in self.cells if item.state == "failed")

    @property
    def exit_status(self) -> int:
        """0 if all cells are finished, else 1."""
        return 0 if all(item.state == "finished" for item in self.cells) else 1

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs of finished cells, in the grid's order."""
        return tuple(name for item in self.cells if item.state == "finished" for name in item.runs)

    def table(self) -> Table:
        """Return a table with one row per cell."""
        rows = [
            {
                "key": item.cell.key,
                "cell": item.cell.label,
                "state": item.state,
                "seconds": item.attempt.record.get("seconds") if item.attempt else None,
                "run": ", ".join(item.runs) or None,
                "error": item.error.partition("\n")[0] or None,
            }
            for item in self.cells
        ]
        columns = (
            Column("key", "key"),
            Column("cell", "cell"),
            Column("state", "state"),
            Column("seconds", "took", seconds),
            Column("run", "run"),
            Column("error", "error"),
        )
        return Table(rows, columns)

    def __repr__(self) -> str:
        num_finished = sum(item.state == "finished" for item in self.cells)
        return f"<SweepResult {self.name}: {num_finished} of {len(self.cells)} cells finished>"


def cells_folder(name: str, store: Path) -> Path:
    """Return the folder of the attempts at a sweep's cells."""
    return store / "sweeps" / name


def states(grid: Grid, root: Path | None = None) -> tuple[CellState, ...]:
    """Return the state of each cell.

    A cell is "open" if it has not begun, if it was interrupted, or if its run is not in the store.

    Args:
        grid: the grid.
        root: the run store; None: `runs_root()`.
    """
    store = Path(root if root is not None else runs_root())
    attempts = read_attempts(cells_folder(grid.name, store))
    return tuple(state_of(cell, attempts.get(cell.key), store) for cell in grid.cells)


def state_of(cell: Cell, attempt: Attempt | None, store: Path) -> CellState:
    """Return the state of a cell, from its newest attempt."""
    if attempt is None:
        return CellState(cell, "open")
    state: State = attempt.state
    removed = state == "finished" and not _has_results(cell, attempt, store)
    abandoned = state == "running" and not is_alive(attempt)
    if removed or abandoned or state == "interrupted":
        state = "open"
    return CellState(cell, state, attempt)


def _has_results(cell: Cell, attempt: Attempt, store: Path) -> bool:
    """Return True if the results of a finished cell are still in the store."""
    if cell.notebook is not None:
        return notebook_of(attempt).is_file()
    return bool(attempt.runs) and all((store / name / "run.json").is_file() for name in attempt.runs)


def notebook_of(attempt: Attempt) -> Path:
    """Return the path of a cell's executed notebook."""
    return attempt.path.with_suffix(".ipynb")
