"""`workbench runs`: lists, exports and removes runs of the run store."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError

ACTIONS = ("list", "export", "remove")
EXAMPLES = """
  workbench runs --where algorithm=pipe-sgd status=finished 'workers>=4' --since 2d --sort=-accuracy
  workbench runs --sweep widths --columns run,set.width,seed,accuracy,seconds
  workbench runs export --sweep widths --format parquet --output widths
  workbench runs remove --where status=failed --yes

Keys of conditions and columns are those of --json. Settings of the algorithm are set.NAME, such as set.width.
Signs are = != < <= > >=, and ~ for "contains".
"""


def add_runs_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench runs`, and set its function."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("action", nargs="?", default="list", help="list (the default), export or remove")
    add(
        "names", nargs="*", metavar="RUN", help="with export and remove: names, beginnings of names, folders, or `last`"
    )
    add(
        "--where",
        "-w",
        nargs="+",
        action="extend",
        default=[],
        metavar="CONDITION",
        help="such as algorithm=pipe-sgd; all conditions must hold",
    )
    add("--since", metavar="AGE|DATE", help="runs not older than an age (30m, 3h, 2d, 1w) or a date")
    add("--sweep", metavar="NAME", help="runs of this sweep")
    add("--sort", default="created", metavar="KEY", help="smallest first; --sort=-KEY for largest first")
    add("--columns", type=lambda text: text.split(","), default=[], metavar="KEY,KEY", help="columns to show")
    add("--limit", "-n", type=int, help="show only the last N runs", metavar="N")
    add("--json", action="store_true", help="print one JSON object per line")
    add("--format", choices=("csv", "parquet", "tensorboard"), default="csv", help="with export: format of the files")
    add("--output", "-o", type=Path, default=Path("runs-export"), help="with export: folder to write to")
    add("--yes", action="store_true", help="with remove: remove the runs, not only list them")
    parser.set_defaults(command=_runs)


def _runs(options: argparse.Namespace) -> int:
    if options.action not in ACTIONS:
        raise ConfigError(
            f"runs {options.action}: give one of {', '.join(ACTIONS)}; `workbench show RUN` shows one run"
        )
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: give 1 or more")
    table = _chosen(options)
    if options.action == "export":
        return _export(table, options)
    if options.action == "remove":
        return _remove(table, options)
    return _list(table, options)


def _chosen(options: argparse.Namespace) -> Any:
    """Return the table of the runs that the options select."""
    from dataclasses import replace

    from workbench.analysis.runs_table import runs_table
    from workbench.trace.store import find_run, runs_root

    if options.names and options.action == "list":
        raise ConfigError("runs list takes no names: `workbench show RUN` shows a run, --where selects runs")
    limit = None if options.names else options.limit
    table = runs_table(
        where=options.where,
        since=options.since,
        sweep=options.sweep,
        sort=options.sort,
        columns=options.columns,
        limit=limit,
    )
    if options.names:
        rows = {Path(row["folder"]).resolve(): row for row in table}
        folders = [find_run(name).resolve() for name in options.names]
        for folder in folders:
            if folder not in rows and folder.parent != runs_root().resolve():
                raise ConfigError(
                    f"{folder} is not in the store {runs_root()}: use WORKBENCH_RUNS={folder.parent} workbench runs ..."
                )
        chosen = [row for folder, row in rows.items() if folder in folders]
        if options.limit is not None:  # as without names: the last ones, or the first ones of a descending order
            chosen = chosen[: options.limit] if options.sort.startswith("-") else chosen[-options.limit :]
        table = replace(table, rows=chosen)
    return table


def _list(table: Any, options: argparse.Namespace) -> int:
    from dataclasses import replace

    from workbench.naming import json_line
    from workbench.trace.store import runs_root

    if options.json:
        for row in table:
            print(json_line(row))
    elif len(table):
        print(replace(table, caption=""))
    if table.caption:
        print(table.caption, file=sys.stderr)
    if not len(table):
        chosen = any((options.where, options.since, options.sweep))
        hint = "" if chosen else ". wb.simulate(..., save=True) and run.save() store simulated runs of Python"
        print(f"no {'such ' if chosen else ''}runs in {runs_root()}{hint}", file=sys.stderr)
    return 0


def _export(table: Any, options: argparse.Namespace) -> int:
    from workbench.analysis.export import export_runs

    if not len(table):
        raise ConfigError("no such runs: nothing is exported; `workbench runs` lists all runs")
    for path in export_runs(table.rows, options.output, options.format):
        print(path)
    return 0


def _remove(table: Any, options: argparse.Namespace) -> int:
    from workbench.analysis.runs_table import Condition
    from workbench.trace.store import ENDED, remove_run

    if not (options.names or options.where or options.sweep or options.since):
        raise ConfigError(
            "runs remove: select runs by name or with --where, --sweep or --since; it does not remove all"
        )
    if not len(table):
        raise ConfigError("no such runs: nothing is removed; `workbench runs` lists all runs")
    conditions = map(Condition.parse, options.where)
    named = {condition.value for condition in conditions if (condition.key, condition.sign) == ("status", "=")}
    alive = [row for row in table if row["status"] not in ENDED and row["status"] not in named]
    if alive:
        raise ConfigError(
            f"{', '.join(row['run'] for row in alive)}: still running; stop it first. If its processes have ended, "
            f"select it with --where status={alive[0]['status']}"
        )
    if not options.yes:
        for row in table:
            print(f"{row['run']}  {row['status']}")
        raise ConfigError(f"{len(table)} runs would be removed permanently: add --yes to remove them")
    for row in table:
        remove_run(Path(row["folder"]))
        print(f"removed {row['run']}")
    return 0
