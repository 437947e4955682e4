"""`workbench notebook` and `workbench demo`: execute notebooks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigError
from workbench.naming import parse_pairs

if TYPE_CHECKING:
    from workbench.experiments.notebook_catalogue import Parameter

WORDS = ("run", "list")

EXAMPLES = """
  workbench notebook list                       # notebooks, their parameters and defaults
  workbench notebook run 10-scaling -p steps=5
  workbench notebook run mine.ipynb -f params.yaml -o out/mine.ipynb
"""


def add_notebook_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench notebook`, and set its function."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "words",
        nargs="+",
        metavar="run NAME | list [NAME]",
        help="NAME is a name such as 00-tour, or a path; NAME alone also runs it",
    )
    add_run_options(parser)
    add(
        "--output",
        "-o",
        type=Path,
        help="the executed notebook; under the run store by default. A record and an HTML page are written next to it",
    )
    add("--size", help="smoke, ci or full: parameters from the notebook's sizes file; -f and -p override them")
    add("--kernel", "-k", help="name of the kernel; the notebook's own by default")
    add("--json", action="store_true", help="with list: print one JSON object per notebook; with run: print the record")
    parser.set_defaults(command=_notebook)


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `workbench demo`, and set its function."""
    parser.add_argument("--parameter", "-p", action="append", default=[], metavar="NAME=VALUE", help="of the notebook")
    parser.set_defaults(command=_demo)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that executes notebooks."""
    add = parser.add_argument
    add(
        "--parameter",
        "-p",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter; `workbench notebook list` shows names and defaults",
    )
    add(
        "--file",
        "-f",
        action="append",
        default=[],
        metavar="FILE",
        help="parameters from a YAML file; -p overrides them",
    )
    add("--timeout", type=float, default=None, metavar="SECONDS", help="limit for the whole notebook")


def given_parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of `add_run_options`: those of files, overridden by those of the command line."""
    from workbench.experiments.yaml_file import read_yaml

    found: dict[str, Any] = {}
    for name in options.file:
        found |= read_yaml(Path(name))
    return found | parse_pairs(options.parameter, "--parameter")


def _notebook(options: argparse.Namespace) -> int:
    from workbench.experiments.execution_record import read_record
    from workbench.experiments.notebook_catalogue import find_notebook
    from workbench.papers.sizes import check_size, values_at

    word, *names = options.words if options.words[0] in WORDS else ["run", *options.words]
    if word == "list":
        return _list(names, options.json)
    if len(names) != 1:
        raise ConfigError(f"notebook run {' '.join(names)}: give one notebook; `workbench notebook list` lists them")
    path, parameters = find_notebook(names[0]), given_parameters(options)
    if options.size is not None:
        parameters = {**values_at(path, check_size(options.size)), **parameters}
    executed, page = execute(path, options.output, parameters, options.timeout, options.kernel)
    print(json.dumps(read_record(executed)) if options.json else f"notebook: {executed}\npage:     {page}")
    return 0


def _list(names: list[str], as_json: bool) -> int:
    from dataclasses import asdict

    from workbench import resources
    from workbench.experiments.notebook_catalogue import find_notebook, papers_of, parameters_of, question_of
    from workbench.papers.sizes import read_sizes

    for name in names or resources.notebooks():
        path = find_notebook(name)
        sizes = read_sizes(path)
        about: dict[str, Any] = {"name": path.stem, "question": question_of(path), "papers": papers_of(path)}
        parameters = parameters_of(path)
        if as_json:
            about |= {"path": str(path), "parameters": [asdict(parameter) for parameter in parameters]}
            about |= (
                {"sizes": {str(size): values for size, values in sizes.parameters.items()}, "ranks": sizes.ranks}
                if sizes
                else {}
            )
            print(json.dumps(about))
        else:
            papers = f"  ({', '.join(about['papers'])})" if about["papers"] else ""
            size_lines = [_size_line(size, values) for size, values in sizes.parameters.items()] if sizes else []
            print(f"{path.stem}: {about['question']}{papers}", *map(_line, parameters), *size_lines, "", sep="\n")
    return 0


def _line(parameter: Parameter) -> str:
    kind = f": {parameter.type}" if parameter.type else ""
    comment = f"  # {parameter.comment}" if parameter.comment else ""
    return f"  {parameter.name}{kind} = {parameter.default}{comment}"


def _size_line(size: str, values: Mapping[str, Any]) -> str:
    return f"  --size {size}: {', '.join(f'{name} = {value!r}' for name, value in values.items()) or 'as above'}"


def _demo(options: argparse.Namespace) -> int:
    from workbench.experiments.notebooks import tagged_text
    from workbench.resources import notebook

    given = parse_pairs(options.parameter, "--parameter")
    executed, page = execute(notebook("00-tour"), None, given, 600.0, None, first=("answer", "timelines"))
    for tag, title in (("answer", ""), ("table", "On real MPI ranks:\n"), ("simulated", "On simulated workers:\n")):
        print(f"{title}{tagged_text(executed, tag)}\n")
    print(f"Open this page in a browser, also offline: {page}\nThe notebook as executed:                  {executed}")
    print("Next: `make lab` opens JupyterLab; `workbench study --problem digits-mlp` asks which algorithm would help.")
    return 0


def execute(
    path: Path,
    output: Path | None,
    parameters: dict[str, Any],
    timeout_s: float | None,
    kernel: str | None,
    *,
    first: Sequence[str] = (),
) -> tuple[Path, Path]:
    """Execute a notebook and write an HTML page of it, which begins with the outputs of cells with these tags.

    Return the paths of both.
    """
    from workbench.experiments.notebooks import run_notebook
    from workbench.plots.html import export_html
    from workbench.trace.store import runs_root

    output = output or runs_root().resolve() / "notebooks" / path.name
    os.environ.setdefault("WORKBENCH_RUNS", str(runs_root().resolve()))
    executed = run_notebook(path, output, parameters, timeout_s=timeout_s, kernel=kernel)
    page = executed.with_suffix(".html")
    export_html(executed, page, first=first)
    return executed, page
