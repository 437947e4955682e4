"""`workbench sweep`: runs a grid of runs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.logs import is_quiet
from workbench.naming import json_line
from workbench.progress import clock

if TYPE_CHECKING:
    from workbench.experiments import Progress, SweepResult

EXAMPLE = """
A grid is a YAML file. Its entries are options of `workbench train` (or, under `notebook: NAME`, parameters of a notebook):

  name: widths                 # of the sweep; the file's name by default. The same name continues where it stopped
  base: {problem: digits-mlp, runtime: mpi, epochs: 2}
  axes:
    algorithm: [synchronous-sgd, {pipe-sgd: {width: 2}}, {pipe-sgd: {width: 3}}]
    seed: [0, 1, 2]
    size: [{workers: 2, lr: 0.1}, {workers: 4, lr: 0.2}]    # not an option: each value sets several options
  exclude:
    - {algorithm: pipe-sgd, workers: 4, seed: [1, 2]}
  include:
    - {algorithm: dear, set.bucket_bytes: 1MiB}
  timeout_s: 600               # limit for one cell

Exit status: 0 if every cell is finished, 1 if some failed, 2 for an error in the grid, 130 or 143 if interrupted or terminated.
"""


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench sweep`, and set its function."""
    parser.epilog = EXAMPLE
    add = parser.add_argument
    add("grid", help="a YAML file; a cell is one combination of its values")
    add("--jobs", "-j", type=int, help="number of cells that run at a time; that of the grid by default, else 1")
    add("--timeout", type=float, metavar="SECONDS", help="limit for one cell; that of the grid by default")
    add("--retry-failed", action="store_true", help="run failed cells again")
    add("--dry-run", action="store_true", help="list the cells and their states; run nothing")
    add("--json", action="store_true", help="print one JSON object per cell at the end, and no progress")
    parser.set_defaults(command=_sweep)


def _sweep(options: argparse.Namespace) -> int:
    from workbench.errors import ConfigError
    from workbench.experiments.grid import read_grid
    from workbench.experiments.sweep_result import SweepResult, states
    from workbench.experiments.sweeper import sweep
    from workbench.trace.store import runs_root

    grid = read_grid(options.grid)
    if options.timeout is not None:
        if options.timeout <= 0:
            raise ConfigError(f"--timeout {options.timeout:g}: give the seconds that one cell may take, above 0")
        grid = replace(grid, timeout_s=options.timeout)
    if options.dry_run:
        _print(SweepResult(grid.name, states(grid), runs_root()), options.json)
        return 0
    show = _Line().show if not options.json and not is_quiet() else None
    result = sweep(grid, jobs=options.jobs, retry_failed=options.retry_failed, watch=show)
    _print(result, options.json)
    for item in result.failed:
        print(f"failed: {item.cell.key}  {item.cell.label}: {item.error}", file=sys.stderr)
        if item.attempt:
            print(f"        its output: {item.attempt.log}", file=sys.stderr)
    if result.failed:
        print(
            f"{len(result.failed)} of {len(result.cells)} cells failed: --retry-failed runs them again", file=sys.stderr
        )
    return result.exit_status


def _print(result: SweepResult, as_json: bool) -> None:
    table = result.table()
    if not as_json:
        print(table)
        return
    for item, row in zip(result.cells, table, strict=True):
        print(
            json_line(
                {**row, "sweep": result.name, "values": item.cell.values, "axes": item.cell.axes, "runs": item.runs}
            )
        )


class _Line:
    """Progress: on a terminal, one line that is updated; elsewhere, one line for each cell that ends."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def show(self, now: Progress) -> None:
        """Print the progress."""
        clear = "\r\x1b[K" if self._terminal else ""
        where = f"{now.num_done + now.num_failed}/{now.num_cells}"
        left = f", {clock(now.left_s)} left" if now.left_s is not None else ""
        if now.ended is not None:
            took = now.ended.attempt.record["seconds"] if now.ended.attempt else 0.0
            error = f": {now.ended.error.splitlines()[0]}" if now.ended.error else ""
            state = f"{now.ended.state} in {took:.1f} s{error}{'' if self._terminal else left}"
            print(f"{clear}{where}  {now.ended.cell.label}: {state}", file=sys.stderr, flush=True)
        if self._terminal:
            failed = f", {now.num_failed} failed" if now.num_failed else ""
            print(f"{clear}{where}{failed}{left}  {' | '.join(now.running)}"[:160], end="", file=sys.stderr, flush=True)
            if not now.running and now.num_done + now.num_failed == now.num_cells:
                print(clear, end="", file=sys.stderr, flush=True)
