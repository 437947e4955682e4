"""`workbench calibrate`, `predict` and `recommend`: cost models from measured steps, and their predictions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from workbench.errors import ConfigError
from workbench.naming import json_line, parse_pairs
from workbench.progress import clock, progress_line

EXAMPLES = """
  workbench train synchronous-sgd --workers 2 --steps 50
  workbench calibrate last -o calibration.json
  workbench predict calibration.json --algorithm pipe-sgd --set width=2 --workers 8,64 --network ethernet-1g,ethernet-10g
  workbench recommend calibration.json --workers 16 --network ethernet-1g
"""


def add_calibrate_options(calibrate: argparse.ArgumentParser) -> None:
    """Add the options of `workbench calibrate`, and set its function."""
    calibrate.epilog = EXAMPLES
    add = calibrate.add_argument
    add(
        "run",
        nargs="+",
        help="a run's name or folder, or `last`; or traces of torch.profiler of a DDP loop, one for each rank",
    )
    add("--output", "-o", type=Path, help="file to write; calibration.json in the run's folder, or here, by default")
    add(
        "--problem",
        help="the trained problem: measure here each layer's share of the compute, for algorithms that send by layer",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the problem, such as hidden=[64]",
    )
    add("--cores", type=float, help="number of cores that all ranks shared; known if they ran on one host")
    add(
        "--latency",
        type=float,
        metavar="SECONDS",
        help="latency of a message; needed if all messages had the same size",
    )
    add(
        "--rate",
        metavar="RATE",
        help="nominal rate of the link, such as 1gbit; predictions for other rates then use the measured efficiency",
    )
    add("--batch-size", type=int, default=1, help="with a profile: samples per worker and step")
    add(
        "--workers",
        type=int,
        help="ranks of a profile that does not contain them; with --probe, ranks to start (those of the run by default)",
    )
    add(
        "--probe",
        action="store_true",
        help="also measure messages of several sizes, on ranks started here or those of torchrun or mpiexec",
    )
    add("--runtime", choices=("torch", "mpi"), help="with --probe: runtime of the ranks; the run's by default")
    add("--codecs", default="truncate16,linear8", help="with --probe: codecs to measure, separated by commas")
    add("--json", action="store_true", help="print the calibration as one JSON object")
    calibrate.set_defaults(command=_calibrate)


def add_predict_options(predict: argparse.ArgumentParser) -> None:
    """Add the options of `workbench predict`, and set its function."""
    predict.epilog = EXAMPLES
    add = predict.add_argument
    _add_places(predict)
    add("--algorithm", default="synchronous-sgd", help="such as pipe-sgd; `workbench algorithms` lists them")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the algorithm, such as width=2")
    add("--codec", help="compression of messages, such as truncate16: short for --set collective=ring:truncate16")
    add("--backups", type=int, help="number of backup workers: short for --algorithm backup-sgd --set backups=")
    predict.set_defaults(command=_predict)


def add_recommend_options(recommend: argparse.ArgumentParser) -> None:
    """Add the options of `workbench recommend`, and set its function."""
    recommend.epilog = EXAMPLES
    add = recommend.add_argument
    _add_places(recommend)
    add("--exact", action="store_true", help="only algorithms with the same numerical results as synchronous SGD")
    add(
        "--budget",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit for each number of workers and network; 60 by default; inf: no limit",
    )
    add("--target-loss", type=float, help="sort by the time to this test loss; needs --runs")
    add(
        "--runs",
        action="append",
        default=[],
        metavar="RUN",
        help="a run that shows how many steps its algorithm needs to the loss; may be repeated",
    )
    recommend.set_defaults(command=_recommend)


def _add_places(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("calibration", type=Path, help="file written by `workbench calibrate`")
    add("--workers", default="", help="number of workers, or several separated by commas; the calibration's by default")
    add(
        "--network",
        default="",
        help="such as ethernet-10g, or several separated by commas; the measured one by default",
    )
    add("--rate", default="", help="instead of --network: other rates of the measured network, such as 100mbit,1gbit")
    add("--latency", type=float, metavar="SECONDS", help="latency of the link in addition to the measured one")
    add(
        "--cores",
        type=parse_cores,
        metavar="NUMBER|measured|own",
        help="cores that all ranks share. `measured`: those of the calibration. `own`: a host for each rank. "
        "By default `measured` for the measured number of workers on the measured network, else `own`",
    )
    add("--seed", type=int, default=0, help="seed of the simulations; 0 by default")
    add("--json", action="store_true", help="print one JSON object per row")


# -- calibrate ----------------------------------------------------------------------------------------


def _calibrate(options: argparse.Namespace) -> int:
    from workbench import calibration, problems
    from workbench.clusters.local.probe_ranks import probe_as_rank, probe_new_ranks
    from workbench.runtimes.rank.main import runtime_here
    from workbench.trace.from_profiler import is_profile_folder

    here = runtime_here()
    if options.probe and here is not None:
        probe_as_rank(here, [name for name in options.codecs.split(",") if name])
        return 0
    if options.option and not options.problem:
        raise ConfigError("--option needs --problem, such as --problem wide-mlp --option megabytes=8")
    problem = problems.get(options.problem, **parse_pairs(options.option, "--option")) if options.problem else None
    rate = {"line_bytes_per_s": parse_rates(options.rate)[0] if options.rate else None}
    common: dict[str, Any] = {"cores": options.cores, "latency_s": options.latency, **rate}
    folder = Path()
    if all(name.endswith((".json", ".json.gz")) or is_profile_folder(name) for name in options.run):
        if problem is not None:
            raise ConfigError("a profile contains the time of each parameter: leave --problem out")
        found = calibration.from_profile(options.run, batch_size=options.batch_size, workers=options.workers, **common)
    else:
        from workbench.trace import open_run

        if len(options.run) > 1:
            raise ConfigError(f"{len(options.run)} runs: give one run, or the profiles of one DDP loop (*.json)")
        run = open_run(options.run[0])
        folder = run.folder or folder
        found = calibration.calibrate(run, problem=problem, before_probe=options.probe, **common)
    if options.probe:
        usual: Literal["mpi", "torch"] = "mpi" if found.origin.runtime == "mpi" else "torch"
        runtime = options.runtime or usual
        num_ranks = options.workers or found.origin.num_workers
        probed = probe_new_ranks(runtime, num_ranks, [*options.given, "--runtime", runtime])
        found = calibration.with_probe(found, probed)
    path = found.save(options.output or folder / "calibration.json")
    print(json_line(found.as_record()) if options.json else f"{found}\ncalibration: {path}")
    return 0


# -- predict and recommend ----------------------------------------------------------------------------------------


def _predict(options: argparse.Namespace) -> int:
    from workbench.calibration import Calibration, Prediction, predict
    from workbench.calibration.predict import table

    calibration, places = Calibration.load(options.calibration), _places(options)
    algorithm = _algorithm(options)
    found: list[Prediction] = []
    with progress_line(len(places), "predictions", shown=not options.json) as line:
        for place in places:
            workers = place.pop("workers") or calibration.origin.num_workers
            found.append(predict(calibration, algorithm, workers=workers, seed=options.seed, **place))
            line.update()
    if options.json:
        for prediction in found:
            print(json_line(prediction.as_record()))
        return 0
    print(table(found))
    _print_notes(calibration.notes)
    return 0


def _recommend(options: argparse.Namespace) -> int:
    from workbench.calibration import Calibration, Convergence, recommend
    from workbench.trace import open_run

    calibration = Calibration.load(options.calibration)
    if (options.target_loss is None) != (not options.runs):
        raise ConfigError(
            "give both --target-loss and --runs: the runs show how many steps each algorithm needs to the loss"
        )
    convergence = (
        Convergence.from_runs([open_run(name) for name in options.runs], options.target_loss) if options.runs else None
    )
    for place in _places(options):
        workers = place.pop("workers") or calibration.origin.num_workers
        with progress_line(0, f"candidates for {workers} workers", shown=not options.json) as line:
            found = recommend(
                calibration,
                workers=workers,
                convergence=convergence,
                exact=options.exact,
                seed=options.seed,
                budget_s=options.budget,
                progress=partial(_show_progress, line),
                **place,
            )
        print(json_line(found.as_record()) if options.json else f"{workers} workers: {found}\n")
    if not options.json:
        _print_notes(calibration.notes)
    return 0


def _show_progress(line: Any, done: int, most: int, left_s: float) -> None:
    """Show a simulated candidate. `most` decreases, because a good candidate rules others out."""
    line.total = most
    line.set_postfix_str(f"at most {clock(left_s)}", refresh=False)
    line.update(done - line.n)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _algorithm(options: argparse.Namespace) -> Any:
    from workbench import algorithms

    settings, name = parse_pairs(options.set, "--set"), options.algorithm
    if options.codec is not None:
        if "collective" in settings:
            raise ConfigError("--codec is short for --set collective=ring:CODEC: give one of the two")
        settings["collective"] = f"ring:{options.codec}"
    if options.backups is not None:
        name = "backup-sgd" if name in ("synchronous-sgd", "parameter-server-sgd", "backup-sgd") else name
        settings["backups"] = options.backups
    return algorithms.get(name, **settings)


def _places(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the arguments of `predict` for every number of workers on every network."""
    if options.network and options.rate:
        raise ConfigError("--network and --rate: give one of the two")
    workers: list[int | None] = [_whole(word) for word in options.workers.split(",") if word]
    networks: list[dict[str, Any]] = [{"network": name.strip()} for name in options.network.split(",") if name]
    networks += [{"bandwidth_bytes_per_s": rate} for rate in parse_rates(options.rate)]
    common = {"latency_s": options.latency, "cores": options.cores}
    return [
        {"workers": number, **network, **common} for number, network in product(workers or [None], networks or [{}])
    ]


def parse_cores(word: str) -> Any:
    """Parse `--cores`: a number, `measured` or `own`.

    >>> parse_cores("4"), parse_cores("own")
    (4.0, 'own')
    """
    if word in ("measured", "own"):
        return word
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r}: write a number, `measured` or `own`") from None


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"--workers {word!r}: give whole numbers separated by commas, such as 4,16,64") from None


def parse_rates(text: str) -> list[float]:
    """Return rates of a link, in bytes per second.

    >>> parse_rates("100mbit,1gbit")
    [12500000.0, 125000000.0]

    Raises:
        ConfigError: a rate does not have this form.
    """
    from workbench.what_if.question import line_rate

    try:
        return [line_rate(word) / 8 for word in text.split(",") if word.strip()]
    except ConfigError as error:
        raise ConfigError(f"--rate: {error}") from None
