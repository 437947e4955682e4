"""Experiments: executed notebooks, and grids of runs.

- Grids: `yaml_file` and `grid` read one. `sweeper` runs its cells, `fork_cells` starts simulated ones, `cell_states`
  keeps their states, `sweep_result` shows them.
- Notebooks: `notebook_catalogue` lists them. `notebooks` executes one by `papermill_engine`, and `execution_record`
  describes the execution. papermill finds the engine through `papermill_entry`. `side_by_side` executes several at a
  time.

Imports `run_spec`, `clusters` and what lies below. Used by `papers`, `bench` and `cli`. Begin with `grid` and
`sweeper`, or with `notebooks`.
"""

from workbench.experiments.grid import Cell, Grid, read_grid
from workbench.experiments.notebooks import run_notebook
from workbench.experiments.sweep_result import CellState, SweepResult
from workbench.experiments.sweeper import Progress, sweep

__all__ = ["Cell", "CellState", "Grid", "Progress", "SweepResult", "read_grid", "run_notebook", "sweep"]
