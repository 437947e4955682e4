"""`workbench show`, `timeline`, `export` and `evaluate`: look at runs of the run store."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import ConfigError
from workbench.naming import json_line, parse_pairs
from workbench.run_spec import notes_of


def add_show_options(show: argparse.ArgumentParser) -> None:
    """Add the options of `workbench show`, and set its function."""
    show.add_argument("run", nargs="+", help="name, beginning of a name, folder, or `last`")
    show.add_argument("--json", action="store_true", help="print one JSON object per run")
    show.set_defaults(command=_show)


def add_timeline_options(timeline: argparse.ArgumentParser) -> None:
    """Add the options of `workbench timeline`, and set its function."""
    timeline.add_argument("run", nargs="+", help="name, beginning of a name, folder, or `last`; two to compare them")
    timeline.add_argument(
        "--steps", metavar="FIRST:LAST", help="these steps; by default some from the middle of the run"
    )
    timeline.add_argument("--ranks", metavar="0,1,...", help="only these ranks")
    timeline.add_argument(
        "--output", "-o", type=Path, help="file to write; by default timeline.html in the (first) run's folder"
    )
    timeline.set_defaults(command=_timeline)


def add_export_options(export: argparse.ArgumentParser) -> None:
    """Add the options of `workbench export`, and set its function."""
    export.add_argument("run", help="name, beginning of a name, folder, or `last`")
    export.add_argument(
        "--format",
        choices=("perfetto", "chakra"),
        default="perfetto",
        help="perfetto: Chrome trace JSON (the default); chakra: MLCommons Chakra, a file for each rank",
    )
    export.add_argument(
        "--output",
        "-o",
        type=Path,
        help="file to write; with chakra, the beginning of OUTPUT.RANK.et. By default trace.json, or chakra.RANK.et, in "
        "the run's folder",
    )
    export.set_defaults(command=_export)


def add_evaluate_options(evaluate: argparse.ArgumentParser) -> None:
    """Add the options of `workbench evaluate`, and set its function."""
    evaluate.add_argument("run", help="name, beginning of a name, folder, or `last`")
    evaluate.add_argument("--algorithm", help="the run's algorithm, if it is your own: file.py:Class")
    evaluate.add_argument("--problem", help="the run's problem, if it is your own: file.py:name")
    evaluate.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the problem, as in the training",
    )
    evaluate.set_defaults(command=_evaluate)


def _show(options: argparse.Namespace) -> int:
    from workbench.analysis import compare, summary
    from workbench.trace import open_run

    runs = [open_run(name) for name in options.run]
    if options.json:
        for run in runs:
            print(json_line(summary(run)))
    else:
        print(compare(runs))
        for run in runs:
            for note in notes_of(run):
                print(f"note: {note}" if len(runs) == 1 else f"note on {run.id}: {note}")
    return 0


def _timeline(options: argparse.Namespace) -> int:
    from workbench.plots import TraceViewer
    from workbench.plots.trace_viewer.payload import MAX_SPANS
    from workbench.trace import open_run

    runs = [open_run(name) for name in options.run]
    steps = None
    if options.steps is not None:
        found = re.fullmatch(r"(\d+):(\d+)", options.steps)
        if found is None or int(found[1]) > int(found[2]):
            raise ConfigError(f"--steps {options.steps}: give the first and the last step, such as 100:105")
        steps = slice(int(found[1]), int(found[2]) + 1)
    if options.ranks is not None and not re.fullmatch(r"\d+(,\d+)*", options.ranks):
        raise ConfigError(f"--ranks {options.ranks}: give numbers, such as 0,1,2")
    ranks = None if options.ranks is None else [int(rank) for rank in options.ranks.split(",")]
    target = options.output or (runs[0].folder or Path()) / "timeline.html"
    viewer = TraceViewer(runs, steps, ranks, max_spans=MAX_SPANS)
    if viewer.difference is not None:
        print(viewer.difference)
    with _writing(target):
        print(f"{viewer.save(target)}: open it in a browser; press ? for its keys")
    return 0


def _export(options: argparse.Namespace) -> int:
    from workbench.trace import open_run

    run = open_run(options.run)
    chakra = options.format == "chakra"
    target = options.output or (run.folder or Path()) / ("chakra" if chakra else "trace.json")
    with _writing(target):
        if chakra:
            num_ranks = len(run.export_chakra(target))
            print(f"{target}.RANK.et, {num_ranks} ranks: for ASTRA-sim, --workload-configuration={target}")
        else:
            print(f"{run.export_chrome(target)}: open it at ui.perfetto.dev or chrome://tracing")
    return 0


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Turn an error of writing the file into one that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): name another file with --output") from error


def _evaluate(options: argparse.Namespace) -> int:
    from workbench import algorithms, problems
    from workbench.runtimes.rank.pending_evaluations import evaluate_left
    from workbench.trace import open_run

    run = open_run(options.run)
    assert run.folder is not None, "the run was read from its folder"
    recorded = run.info.get("algorithm") or {}
    named = options.algorithm
    algorithm = algorithms.get(named, **(recorded.get("settings") or {})) if named else algorithms.recorded(recorded)
    if algorithm is None:
        raise ConfigError(f"the algorithm of {run.id} is not the package's: give it, as --algorithm file.py:Class")
    name = options.problem or str((run.info.get("problem") or {}).get("name"))
    problem = problems.get(name, **parse_pairs(options.option, "--option"))
    print(f"evaluations made: {evaluate_left(run.folder, algorithm, problem)}")
    return 0
