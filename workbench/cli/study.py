"""`workbench study`: which algorithm reaches a target first."""

from __future__ import annotations

import argparse
from typing import Any

from workbench.errors import ConfigError
from workbench.logs import is_quiet
from workbench.naming import json_line, parse_pairs

EXAMPLES = """
  workbench study --problem mine.py:problem --network 1gbit,10gbit --workers 4,16 --target loss=3.2 --minutes 5
  workbench study --algorithm 'pipe-sgd width=3' --algorithm local-sgd --target accuracy=0.9
"""


def add_study_options(study: argparse.ArgumentParser) -> None:
    """Add the options of `workbench study`, and set its function."""
    study.epilog = EXAMPLES
    add = study.add_argument
    add("--problem", default="digits-mlp", help="`workbench problems` lists them; or file.py:name")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the problem")
    add(
        "--algorithm",
        action="append",
        default=[],
        metavar="'NAME SETTING=VALUE ...'",
        help="a candidate, such as 'pipe-sgd width=3', or 'file.py:Class'; may be repeated. A dozen by default",
    )
    add(
        "--calibrated",
        nargs="+",
        default=[],
        metavar="RUN",
        help="where costs come from: a run, a file of `workbench calibrate`, or traces of torch.profiler. By default "
        "they are measured here",
    )
    add("--network", default="1gbit", help="rates or names of networks, separated by commas; 1gbit by default")
    add("--workers", default="4,16", help="numbers of workers, separated by commas; 4,16 by default")
    add("--target", metavar="NAME=VALUE", help="loss=3.2, accuracy=0.9 or a metric of the problem, on the test data")
    add(
        "--seeds",
        type=int,
        default=5,
        help="trainings of each kind of gradient (exact, late, compressed, ...); 5 by default",
    )
    add("--minutes", type=float, default=2.0, help="limit of the study; 2 by default")
    add("--batch-size", type=int, help="samples of a worker in a step; the problem's by default")
    add("--lr", type=float, help="learning rate of exact gradients; the optimizer's by default")
    add("--search", type=int, default=0, help="trainings that search each learning rate (needs Optuna); 0 by default")
    add(
        "--stragglers",
        action="append",
        default=[],
        metavar="DISTRIBUTION",
        help="workers that are slower, such as lognormal:0.3 (at random), or slow-machines:3=4 (rank 3 takes 4 times as "
        "long), if costs are measured here; several are multiplied",
    )
    add("--threads", type=int, help="compute threads of a worker, if costs are measured here")
    add("--name", help="keep the study in the folder study-NAME of the run store; the same name continues it")
    add("--json", action="store_true", help="print one JSON object for each algorithm, number of workers and network")
    study.set_defaults(command=_study)


def _study(options: argparse.Namespace) -> int:
    from workbench import costs, problems
    from workbench.run_spec import check_slow_ranks
    from workbench.what_if import study

    algorithms = [_algorithm(text) for text in options.algorithm] or None
    calibrated: Any = options.calibrated[0] if len(options.calibrated) == 1 else options.calibrated or None
    workers = _wholes(options.workers)
    check_slow_ranks(options.stragglers, max(workers, default=1))
    found = study(
        problems.get(options.problem, **parse_pairs(options.option, "--option")),
        algorithms=algorithms,
        calibrated=calibrated,
        networks=[name.strip() for name in options.network.split(",") if name.strip()],
        workers=workers,
        target=_target(options.target),
        seeds=options.seeds,
        minutes=options.minutes,
        batch_size=options.batch_size,
        search=options.search,
        stragglers=[costs.stragglers.get(text) for text in options.stragglers],
        threads=options.threads,
        name=options.name,
        quiet=is_quiet(),
        **({} if options.lr is None else {"lr": options.lr}),
    )
    if options.json:
        for cell in found.cells:
            print(json_line(cell.as_record()))
    else:
        print(found)
    return 0


def _algorithm(text: str) -> Any:
    from workbench import algorithms

    name, *settings = text.split()
    return algorithms.get(name, **parse_pairs(settings, "--algorithm"))


def _wholes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(f"--workers {text!r}: give whole numbers separated by commas, such as 4,16") from None


def _target(text: str | None) -> tuple[str, float] | None:
    if text is None:
        return None
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--target {text!r}: write loss=3.2 or accuracy=0.9") from None
