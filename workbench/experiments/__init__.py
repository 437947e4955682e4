"""Experiments: notebooks and grids of runs."""

from workbench.experiments.grid import Cell, Grid, read_grid
from workbench.experiments.notebooks import run_notebook
from workbench.experiments.outcome import CellState, SweepResult
from workbench.experiments.sweeper import Progress, sweep

__all__ = ["Cell", "CellState", "Grid", "Progress", "SweepResult", "read_grid", "run_notebook", "sweep"]
