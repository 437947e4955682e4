"""The command line: `workbench COMMAND`. Each command is a thin function, which imports what it needs."""

from __future__ import annotations

import argparse
import logging
import os
import re
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, final

from workbench.cli.bench import add_bench_options
from workbench.cli.catalogue import add_catalogue_options, add_problems_options, table_width
from workbench.cli.check import add_check_options
from workbench.cli.cluster import add_cluster_options
from workbench.cli.completion import ASKED, add_completion_options, complete
from workbench.cli.config import add_config_options
from workbench.cli.doctor import add_doctor_options
from workbench.cli.emulate import add_emulate_options
from workbench.cli.kernels import add_kernels_options
from workbench.cli.notebook import add_demo_options, add_notebook_options
from workbench.cli.papers import add_artefact_options, add_papers_options
from workbench.cli.predict import add_calibrate_options, add_predict_options, add_recommend_options
from workbench.cli.record import add_record_options
from workbench.cli.reproduce import add_reproduce_options
from workbench.cli.runs import add_runs_options
from workbench.cli.show import add_evaluate_options, add_export_options, add_show_options, add_timeline_options
from workbench.cli.steer import add_steer_options
from workbench.cli.study import add_study_options
from workbench.cli.submit import add_submit_options
from workbench.cli.sweep import add_sweep_options
from workbench.cli.train import add_train_command
from workbench.clusters.supervision.sigterm import TERMINATED
from workbench.errors import WorkbenchError
from workbench.logs import LOG, shown_on_stderr
from workbench.naming import did_you_mean
from workbench.resources import version
from workbench.run_spec import algorithm_in, expand_settings

DESCRIPTION = """\
Train a model with distributed SGD on several processes (ranks), see where the time of each step goes, and predict which
algorithm would be faster. Begin with `workbench doctor`, then `workbench demo`.

`workbench COMMAND --help` lists the options of a command."""
HEADINGS = {  # first command of a group -> heading
    "train": "train, and look at runs",
    "cluster": "clusters and jobs",
    "study": "find out which algorithm would help",
    "demo": "notebooks and papers",
    "algorithms": "what is available, and what works here",
}
LISTED = {"algorithms": "", "collectives": " (how gradients are summed)", "codecs": " (how gradients are compressed)"}
LEVELS = {  # option -> the least level of the messages that are printed
    "--quiet": (logging.WARNING, "print no progress and no messages, only warnings and errors"),
    "--verbose": (logging.DEBUG, "also print what helps to find a fault: commands, folders, tracebacks of errors"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line; that of this process by default.

    Returns:
        The exit status. 0: success, also for a run that was stopped. 2: an error that the caller can fix.
        130: interrupted. 143: terminated, for commands that clean up.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if ASKED in os.environ:
        complete(_parser())
    try:
        first = next((place for place, word in enumerate(given) if word not in LEVELS), 0)
        if given[first : first + 1] == ["train"]:
            if {"-h", "--help"} & set(given) and (algorithm := algorithm_in(given)):
                from workbench.catalogue import show

                shown = show("algorithms", algorithm, table_width())
                print(f"{shown}\n\n`workbench train --help` lists the options of all trainings.")
                return 0
            given[first + 1 :] = expand_settings(given[first + 1 :], known=LEVELS)
        options = _parser().parse_args(given)
        options.given = given  # ranks get the same command line
        with shown_on_stderr(options.level):
            status = _run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if _is_read():
            raise
        return 0  # the reader, such as `| head`, has closed the pipe
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


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.command(options) or 0)
    except WorkbenchError:
        LOG.debug("the traceback of the error:", exc_info=True)
        raise


def _is_read() -> bool:
    """Return True if standard output has a reader.

    If there is no reader, redirect standard output, so that the interpreter's last flush cannot fail.
    """
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)  # poll reports errors even if no event is requested
    if not watch.poll(0):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


@final
class _Grouped(argparse.RawDescriptionHelpFormatter):
    """Lists commands under headings."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        lines = []
        for helped in action._choices_actions:
            if helped.dest in HEADINGS:
                lines.append(f"\n{HEADINGS[helped.dest]}:\n")
            lines.append(self._format_action(helped))
        return "".join(lines)


@final
class _Parser(argparse.ArgumentParser):
    """Suggests the nearest choices for an invalid one."""

    def error(self, message: str) -> NoReturn:
        given = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if given:
            meant = did_you_mean(given[1], re.findall(r"[\w.-]+", given[2]), most=2)
            if meant:  # instead of all choices
                message = f"{message.partition(' (choose from ')[0]}. {meant[0].upper()}{meant[1:].rstrip()}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="workbench", description=DESCRIPTION, formatter_class=_Grouped)
    parser.add_argument("--version", action="version", version=f"workbench {version()}")
    _add_levels(parser, default=logging.INFO)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = commands.add_parser
    # train, and look at runs
    add_train_command(add("train", help="train a model with an algorithm, on real or simulated ranks"))
    add_steer_options(add("steer", help="change settings of a running training, or pause, resume or stop it"))
    add_sweep_options(
        add("sweep", help="run a grid of trainings from a YAML file; if interrupted, start it again to continue")
    )
    add_record_options(
        add("record", help="run your training script unchanged, and show where its steps spend their time")
    )
    add_runs_options(add("runs", help="list, export or remove your runs"))
    add_show_options(add("show", help="print the numbers of a run, or compare several"))
    add_timeline_options(
        add("timeline", help="write an HTML page with the timeline of a run, or of two runs to compare")
    )
    add_export_options(add("export", help="write a run's trace for ui.perfetto.dev, or as a graph for ASTRA-sim"))
    add_evaluate_options(add("evaluate", help="make the evaluations that a run lacks because it failed or was killed"))

    # clusters and jobs
    add_cluster_options(add("cluster", help="list, change and stop the clusters that notebooks and scripts started"))
    add_submit_options(
        add("submit", help="run a training or your own script in a Slurm job; it can continue after the time limit")
    )
    add_emulate_options(
        add("emulate", help="run a command on hosts of an emulated network of a known rate and latency")
    )
    add_kernels_options(add("kernels", help="list or install the package's Jupyter kernels"))

    # ask what would help
    add_study_options(
        add("study", help="predict which algorithm reaches a target first, for other workers and networks")
    )
    add_calibrate_options(
        add("calibrate", help="fit a cost model (compute, latency, bandwidth) to a run, or to a profile of a DDP loop")
    )
    add_predict_options(add("predict", help="predict the time of a step for other workers, networks and algorithms"))
    add_recommend_options(
        add(
            "recommend", help="recommend an algorithm, width, bucket size, codec and number of backups, with the reason"
        )
    )

    # notebooks and papers
    add_demo_options(add("demo", help="execute the tour: three algorithms on four MPI ranks; print its result"))
    add_notebook_options(add("notebook", help="execute a notebook, or list those of the package"))
    add_reproduce_options(
        add("reproduce", help="execute the notebooks that test a paper's claims; print the verdicts and write a page")
    )
    add_papers_options(add("papers", help="list the claims of papers with their verdicts; check or write their pages"))
    add_artefact_options(add("artefact", help="write one zip with a paper's notebooks, claims, records and versions"))

    # what there is, and what works here
    for title, meant in LISTED.items():
        add_catalogue_options(add(title, help=f"list the {title}{meant}, or describe one"), title)
    add_check_options(add("check", help="check your own algorithm (file.py:Class) against the laws of algorithms"))
    add_problems_options(add("problems", help="list the problems (models with data), or describe one"))
    add_config_options(add("config", help="show the defaults of this machine, and where they come from"))
    add_completion_options(add("completion", help="print the script with which bash or zsh completes this command"))
    add_doctor_options(add("doctor", help="check what works on this machine, and say how to fix the rest"))
    add_bench_options(
        add("bench", help="compare step times, collectives and codecs with torch DDP, MPI and physical limits")
    )
    for listed in commands._choices_actions:
        words = listed.help or ""
        commands.choices[listed.dest].description = f"{words[:1].upper()}{words[1:]}."
    for command in commands.choices.values():
        if command.epilog:  # examples, whose lines stay as they are
            command.formatter_class = argparse.RawDescriptionHelpFormatter
        _add_levels(command, default=argparse.SUPPRESS)
    return parser


def _add_levels(parser: argparse.ArgumentParser, default: Any) -> None:
    """Add --quiet and --verbose, which may be given before or after a command."""
    for option, (level, words) in LEVELS.items():
        parser.add_argument(option, action="store_const", dest="level", const=level, default=default, help=words)
    for action in parser._actions:
        if default is argparse.SUPPRESS and isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _add_levels(inner, default)
