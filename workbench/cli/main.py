"""The command line: `workbench COMMAND`. One thin function a command; heavy imports wait until one needs them."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import NoReturn, final

from workbench.cli.bench import add_bench_options
from workbench.cli.cluster import add_cluster_options
from workbench.cli.doctor import add_doctor_options
from workbench.cli.emulate import add_emulate_options
from workbench.cli.kernels import add_kernels_options
from workbench.cli.notebook import add_demo_options, add_notebook_options
from workbench.cli.papers import add_artefact_options, add_papers_options
from workbench.cli.predict import add_calibrate_options, add_predict_options, add_recommend_options
from workbench.cli.reproduce import add_reproduce_options
from workbench.cli.runs import add_runs_options
from workbench.cli.steer import add_steer_options
from workbench.cli.submit import add_submit_options
from workbench.cli.sweep import add_sweep_options
from workbench.cli.train import add_train_command
from workbench.errors import ConfigError, WorkbenchError
from workbench.naming import did_you_mean, parse_pairs
from workbench.resources import version

TERMINATED = 128 + signal.SIGTERM  # what `experiments.sigterm` leaves with, which is not imported before it is needed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 (also for a run that was stopped),

    2 for what the caller can mend, 130 when interrupted, 143 when terminated where a command cleans up.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        options.given = given  # spawned ranks are told the same
        status = int(options.command(options) or 0)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if _is_read():
            raise
        return 0  # `| head` has seen enough
    except WorkbenchError as error:
        print(f"workbench: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        if error.code == TERMINATED:
            print("workbench: terminated", file=sys.stderr)
            return TERMINATED
        raise


def _is_read() -> bool:
    """Whether anybody still reads what is printed; if nobody does, the interpreter must not flush into the pipe again."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)  # an error is told whatever is asked for
    if not watch.poll(0):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


@final
class _Parser(argparse.ArgumentParser):
    """Names the near miss of a word that is none of the choices."""

    def error(self, message: str) -> NoReturn:
        given = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if given:
            meant = did_you_mean(given[1], re.findall(r"[\w.-]+", given[2]), most=2)
            message += f". {meant[0].upper()}{meant[1:].rstrip()}" if meant else ""
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="workbench", description="A research workbench for distributed SGD.")
    parser.add_argument("--version", action="version", version=f"workbench {version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_train_command(commands.add_parser("train", help="train a problem with a method on real or simulated ranks"))
    add_steer_options(commands.add_parser("steer", help="other settings for a run that goes on; or pause, resume, stop it"))
    add_submit_options(commands.add_parser("submit", help="train in a Slurm job, which goes on from its checkpoint after the time limit"))
    add_sweep_options(commands.add_parser("sweep", help="run a grid of runs from a YAML file; goes on where it stopped"))
    add_emulate_options(commands.add_parser("emulate", help="run a command on hosts of an emulated network, of a known rate and latency"))
    add_cluster_options(commands.add_parser("cluster", help="list, look at and stop clusters, those that were detached among them"))
    add_calibrate_options(commands.add_parser("calibrate", help="fit a cost model to a run, or to a profile of a DDP loop"))
    add_predict_options(commands.add_parser("predict", help="what a step would take: other workers, networks, methods"))
    add_recommend_options(commands.add_parser("recommend", help="which method, width, bucket size, codec and b to use, and why"))

    add_runs_options(commands.add_parser("runs", help="list the runs of the store, export or remove some"))

    show = commands.add_parser("show", help="the numbers of runs, side by side")
    show.add_argument("run", nargs="+", help="name, beginning of a name, folder, or `last`")
    show.add_argument("--json", action="store_true", help="one JSON object a run")
    show.set_defaults(command=_show)

    evaluate = commands.add_parser("evaluate", help="make the evaluations that a run left undone when it failed or was killed")
    evaluate.add_argument("run", help="name, beginning of a name, folder, or `last`")
    evaluate.add_argument("--problem", help="of the run, where it is file.py:name")
    evaluate.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the problem, as it was trained")
    evaluate.set_defaults(command=_evaluate)

    export = commands.add_parser("export", help="a run's trace as Chrome trace JSON, for ui.perfetto.dev")
    export.add_argument("run", help="name, beginning of a name, folder, or `last`")
    export.add_argument("--output", "-o", type=Path, help="file to write; trace.json in the run's folder by default")
    export.set_defaults(command=_export)

    add_notebook_options(commands.add_parser("notebook", help="execute a notebook, or list those that come with the package"))
    add_reproduce_options(commands.add_parser("reproduce", help="execute the notebooks about a paper, or all; records and verdicts"))
    add_papers_options(commands.add_parser("papers", help="claims of papers and their verdicts: list them, check them, write their pages"))
    add_artefact_options(commands.add_parser("artefact", help="bundle a paper's notebooks, claims, records and environment"))
    add_demo_options(commands.add_parser("demo", help="execute the tour: three methods on four MPI engines; prints its table"))

    add_kernels_options(commands.add_parser("kernels", help="the Jupyter kernels of the package: list them, install them"))

    for what in ("methods", "collectives", "codecs"):
        listing = commands.add_parser(what, help=f"list the {what}, or tell all of one")
        listing.add_argument("name", nargs="?", help="tell all of this one")
        listing.add_argument("--markdown", action="store_true", help="the table as Markdown")
        listing.add_argument("--json", action="store_true", help="one JSON array; of one, an object")
        listing.set_defaults(command=_catalogue, what=what)
    add_doctor_options(commands.add_parser("doctor", help="what works on this machine, by trying; and what mends the rest"))
    add_bench_options(commands.add_parser("bench", help="step times, collectives, codecs, overheads: beside peers and the physical limit"))
    problems = commands.add_parser("problems", help="list the problems, or tell all of one")
    problems.add_argument("name", nargs="?", help="tell all of this one; also file.py:name")
    problems.set_defaults(command=_problems)
    return parser


def _show(options: argparse.Namespace) -> int:
    from workbench.analysis import compare, summary
    from workbench.trace import open_run

    runs = [open_run(name) for name in options.run]
    if options.json:
        for run in runs:
            print(json.dumps(summary(run)))
    else:
        print(compare(runs))
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from workbench import algorithms, problems
    from workbench.runtimes.rank.pending_evaluations import evaluate_left
    from workbench.trace import open_run

    run = open_run(options.run)
    assert run.folder is not None, "it was read from there"
    method = algorithms.recorded(run.info.get("method") or {})
    if method is None:
        raise ConfigError(
            f"{run.id} has a method that is not the package's: workbench.runtimes.rank.pending_evaluations.evaluate_left takes it"
        )
    problem = problems.get(options.problem or str((run.info.get("problem") or {}).get("name")), **parse_pairs(options.option, "--option"))
    print(f"evaluations made: {evaluate_left(run.folder, method, problem)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from workbench.trace import open_run

    run = open_run(options.run)
    target = options.output or (run.folder or Path()) / "trace.json"
    try:
        path = run.export_chrome(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): name another file with --output") from error
    print(f"{path}: open it at ui.perfetto.dev or chrome://tracing")
    return 0


def _catalogue(options: argparse.Namespace) -> int:
    from workbench import catalogue

    if options.json:
        text = json.dumps(catalogue.describe(options.what, options.name) if options.name else catalogue.describe_all(options.what))
    elif options.name:
        text = catalogue.show(options.what, options.name)
    elif options.markdown:
        text = catalogue.markdown(options.what)
    else:
        text = catalogue.listing(options.what, min(140, max(100, get_terminal_size().columns)))
    print(text)
    return 0


def _problems(options: argparse.Namespace) -> int:
    from workbench import problems

    print(problems.describe(options.name) if options.name else "\n".join(problems.names()))
    return 0
