"""Experiments: executed notebooks, and grids of runs.

- Grids: `yaml_file` and `grid` read one. `sweeper` runs its cells, `fork_cells` starts simulated ones, `attempts`
  keeps their states, `outcome` shows them.
- Notebooks: `catalogue` lists them. `notebooks` executes one by `papermill_engine`, and `record` describes the
  execution. papermill finds the engine through `papermill_entry`. `side_by_side` executes several at a time.
- `sigterm`: a terminated process runs its `finally:` clauses.

Imports `run_spec`, `clusters` and what lies below. Used by `papers`, `bench` and `cli`. Begin with `grid` and
`sweeper`, or with `notebooks`.
"""

from workbench.experiments.grid import Cell, Grid, read_grid
from workbench.experiments.notebooks import run_notebook
from workbench.experiments.outcome import CellState, SweepResult
from workbench.experiments.sweeper import Progress, sweep

__all__ = ["Cell", "CellState", "Grid", "Progress", "SweepResult", "read_grid", "run_notebook", "sweep"]
