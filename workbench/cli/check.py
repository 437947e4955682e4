"""`workbench check`: the laws of algorithms, for your own class."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.cli.catalogue import table_width
from workbench.errors import ConfigError
from workbench.naming import call_checked, json_line, parse_pairs
from workbench.user_file import is_in_user_file

EXAMPLES = """
  workbench check mine.py:Mine
  workbench check mine.py:Mine --set every=4 --workers 3 --real
  workbench check mine.py:Mine --only convergence
"""
REAL_STEPS, REAL_LIMIT_S = 6, 300.0
REAL_SIZES = (2, 3, 4, 1)  # ranks, in the order in which they are tried


def add_check_options(check: argparse.ArgumentParser) -> None:
    """Add the options of `workbench check`, and set its function."""
    check.epilog = EXAMPLES
    add = check.add_argument
    add("algorithm", help="file.py:Class, an instance or a function in a file, or a name of `workbench algorithms`")
    add(
        "--set",
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the algorithm, such as every=4",
    )
    add("--workers", type=int, help="number of simulated ranks; 4 by default, if it runs on 4")
    add("--only", action="append", default=[], metavar="LAW", help="check only this law; may be repeated")
    add("--skip", action="append", default=[], metavar="LAW", help="leave this law out; may be repeated")
    add(
        "--real",
        action="store_true",
        help="also train on real ranks (gloo): two, or more if it needs more; and compare with the simulator",
    )
    add("--json", action="store_true", help="print one JSON object a law")
    check.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> int:
    from workbench import algorithms
    from workbench.laws import checks

    if options.real:
        algorithms.find(options.algorithm)  # ranks are started by name: a class
    algorithm = _algorithm(options.algorithm, parse_pairs(options.set, "--set"))
    laws = checks.chosen(options.only, options.skip)
    if options.workers is not None:
        algorithm.check(options.workers)
    num_ranks = options.workers or checks.ranks_for(algorithm)
    if not options.json:
        print(f"{algorithm} on {num_ranks} simulated ranks:\n", flush=True)
    verdicts = []
    for law in laws:
        verdicts.append(checks.verdict_of(law, algorithm, num_ranks))
        _print(verdicts[-1], as_json=options.json)
    if options.real:
        real = checks.Law("real-ranks", _RealRanks(options))
        verdicts.append(checks.verdict_of(real, algorithm, checks.ranks_for(algorithm, REAL_SIZES)))
        _print(verdicts[-1], as_json=options.json)
    num_broken = sum(bool(verdict.broken) for verdict in verdicts)
    if not options.json:
        _report(verdicts, num_broken)
    return int(num_broken > 0)


def _algorithm(name: str, settings: dict[str, Any]) -> Any:
    """Return the algorithm that a class, an instance or a function in a user's file gives, or a name of the package."""
    from dataclasses import replace
    from functools import partial

    from workbench import algorithms
    from workbench.program import Algorithm
    from workbench.user_file import is_defined_in_user_file, load

    if not is_in_user_file(name):
        return algorithms.get(name, **settings)
    found = load(name, "algorithm", lambda value: callable(value) and is_defined_in_user_file(value))
    if isinstance(found, type) or not (isinstance(found, Algorithm) or callable(found)):
        return algorithms.get(name, **settings)
    make = partial(replace, found) if isinstance(found, Algorithm) else found
    made = call_checked(name, make, algorithms.named(settings)) if settings or make is found else found
    if not isinstance(made, Algorithm):
        raise ConfigError(f"{name} returned a {type(made).__name__}: return an instance of your workbench.Algorithm")
    return made


def _print(verdict: Any, *, as_json: bool) -> None:
    if as_json:
        row = {"law": verdict.law.name, "seconds": round(verdict.seconds, 3), "property": verdict.law.statement}
        print(json_line({**row, "broken": verdict.broken, "not_tried": verdict.not_tried}), flush=True)
        return
    word = "FAILS" if verdict.broken else "-" if verdict.not_tried else "holds"
    text = f"not tried: {verdict.not_tried}" if verdict.not_tried else verdict.law.statement
    print(f"{word:6}{verdict.law.name:17}{verdict.seconds:5.1f} s  {text}", flush=True)


def _report(verdicts: Sequence[Any], num_broken: int) -> None:
    """Print each law that fails, with its details, and the result in one line."""
    for verdict in verdicts:
        if not verdict.broken:
            continue
        print(f"\n{verdict.law.name}: {verdict.broken}")
        lines = [f"the law: {verdict.law.description}"] if verdict.law.description else []
        lines += [f"raised at {line}" for line in verdict.details.splitlines()]
        lines.append(f"only this law: --only {verdict.law.name}; if your rule means this: --skip {verdict.law.name}")
        for line in lines:
            print(textwrap.fill(line, table_width(), initial_indent="  ", subsequent_indent="    "))
    num_tried = sum(not verdict.not_tried for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(
        f"\n{num_tried - num_broken} of {num_tried} laws hold, {len(verdicts) - num_tried} not tried, in {seconds:.0f} s"
    )


class _RealRanks:
    """Real ranks (gloo) take the steps of simulated ones.

    Weights are compared, up to rounding; if the algorithm depends on timing, only the steps that each rank took.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._name = options.algorithm
        self._settings = [word for pair in options.set for word in ("--set", pair)]

    def __call__(self, algorithm: Any, num_ranks: int) -> None:
        from workbench.laws.sentences import assert_holds, assert_near, name_of
        from workbench.trace.run import Run

        law = f"{name_of(algorithm)}: real ranks take the steps of simulated ones"
        with tempfile.TemporaryDirectory(prefix="workbench-check-") as folder:
            runs = {
                runtime: Run.load(self._train(runtime, Path(folder) / runtime, law, num_ranks))
                for runtime in ("simulated", "torch")
            }
            for rank in range(algorithm.roles(num_ranks).num_computing):
                steps = {
                    name: [row["step"] for row in run.metrics[rank] if "evaluation" not in row]
                    for name, run in runs.items()
                }
                where = (
                    f"on rank {rank} of {num_ranks}: it took the steps {steps['torch']}, simulated {steps['simulated']}"
                )
                assert_holds(law, steps["torch"] == steps["simulated"] or algorithm.requires.servers, where)
            if algorithm.depends_on_timing:
                return
            ours, theirs = (runs[name].model().state_dict() for name in ("torch", "simulated"))
            for name, value in theirs.items():
                assert_near(law, ours[name], value, 1e-5, f"on rank 0 of {num_ranks} at the end, {name}")

    def _train(self, runtime: str, folder: Path, law: str, num_ranks: int) -> Path:
        """Run `workbench train` in a process of its own, and return the run's folder."""
        words = ["train", self._name, *self._settings, "--runtime", runtime, "--workers", str(num_ranks)]
        words += ["--problem", "digits-softmax", "--steps", str(REAL_STEPS), "--evaluate-every", "0", "--quiet"]
        environment = {**os.environ, "WORKBENCH_RUNS": str(folder)}
        done = subprocess.run(
            [sys.executable, "-m", "workbench", *words, "--timeout", "60"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=REAL_LIMIT_S,
            check=False,
        )
        said = " ".join((done.stderr or done.stdout).split())[-600:]
        assert done.returncode == 0, f"{law}: not so on {runtime} ranks: {said}"
        return next(iter(folder.iterdir()))
