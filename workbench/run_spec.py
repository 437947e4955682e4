"""One training by names and options, as the command line and sweeps give it: parsed, resolved to objects, checked, simulated.

Used by `cli/train.py`, `cli/submit.py` and `experiments`; real ranks are started by `cli/train.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from workbench.errors import ConfigError
from workbench.naming import call_checked, parse_pairs, unknown

LAUNCHERS = {"torch": "torchrun", "mpi": "mpiexec"}
OPTION_GROUPS = ("set", "option", "optimizer_set")  # those that take NAME=VALUE


def add_train_options(train: argparse.ArgumentParser) -> None:
    """The options of `workbench train`."""
    add = train.add_argument
    add("method", help="such as pipe-sgd; `workbench methods` lists them")
    add("--problem", default="digits-mlp", help="`workbench problems` lists them")
    add("--runtime", help="mpi, torch or simulated; default: the launcher's that started this, else mpi")
    add("--workers", type=int, default=2)
    add("--epochs", type=int)
    add("--steps", type=int)
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="of the method, such as width=2; see `workbench methods NAME`")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the problem, such as hidden=[64]")
    add("--optimizer", help="a class of torch.optim, such as AdamW")
    add("--optimizer-set", action="append", default=[], metavar="NAME=VALUE", help="its arguments, such as momentum=0.9")
    add("--lr", type=float)
    add("--batch-size", type=int, help="samples a worker and step")
    add("--micro-batches", type=int, default=1, dest="num_micro")
    add("--clip-norm", type=float)
    add("--ema-decay", type=float, help="evaluate a moving average of the parameters, such as 0.999")
    add("--progress", default="auto", help="how communication goes on while a rank computes: blocking, tests, thread, library or process")
    add("--precision", default="fp32", help="fp32, bf16 or fp16")
    add("--compile", action="store_true", help="run the model through torch.compile")
    add("--evaluate-every", type=int, metavar="STEPS", help="0: at the end only; default: once an epoch")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="how long a rank waits for the others")
    add("--on-failure", default="stop", help="when a rank has left: stop, or shrink to those that remain (gloo, Open MPI 5)")
    add("--on-bad-gradient", default="stop", help="one that is not finite, or above --max-grad-norm: stop, skip, clip or ignore")
    add("--max-grad-norm", type=float, help="the largest global norm of a rank's own gradient that is a good one")
    add("--divergence-ratio", type=float, help="stop at a loss of so many times the first one")
    add("--replace", action="store_true", help="start another process for a rank that is killed while the others go on (gloo)")
    add("--threads", type=int, help="compute threads a rank")
    add(
        "--trace-steps",
        type=_trace_steps,
        default=argparse.SUPPRESS,
        help="record the timeline of the first so many steps only, or all (default 2000)",
    )
    add("--network", help="of simulated workers; ethernet-10g by default")
    add("--stragglers", action="append", default=[], metavar="LAW", help="of simulated workers, such as lognormal:0.3; several multiply")
    add("--timing-only", action="store_true", help="simulated: what time does, without gradients")
    add("--detail", default="auto", help="simulated: messages (each one an event), formula (closed forms, with --timing-only); auto")
    add("--checkpoint-every", type=int, metavar="STEPS", help="keep a checkpoint every so many steps, for --resume after a crash")
    add("--keep-checkpoints", type=int, default=2, metavar="N", help="how many of them, the newest")
    add("--resume", metavar="RUN", help="go on from the newest checkpoint of a run that was stopped or lost")
    add("--json", action="store_true", help="print one JSON object at the end, and no progress")


class _Refusing(argparse.ArgumentParser):
    """A parser that raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Refusing(prog="workbench train", add_help=False, allow_abbrev=False)
    add_train_options(parser)
    return parser


def train_options() -> tuple[str, ...]:
    """Names of all options of `workbench train`, the method among them."""
    return tuple(action.dest for action in _parser()._actions)


def parse_train(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of `workbench train ARGUMENTS`.

    Raises:
        ConfigError: no such option, or not such a value.
    """
    return _parser().parse_args(list(arguments))


def check_train(arguments: Sequence[str]) -> None:
    """Refuse what `workbench train ARGUMENTS` would refuse before its ranks start; nothing is run and no data are looked for.

    Raises:
        ConfigError: an option, a name or a combination that cannot be.
    """
    from workbench import costs

    options = parse_train(arguments)
    _, algorithm, _, _ = resolve(options)
    algorithm.check(options.workers)
    if options.network:
        costs.get(options.network)
    for law in options.stragglers:
        costs.stragglers.get(law)


def resolve(options: argparse.Namespace) -> tuple[str | None, Any, Any, Any]:
    """The launcher's runtime, if one started this process; method, problem and settings, made from their names."""
    from workbench import algorithms, problems
    from workbench.runtimes.rank.main import runtime_here

    here = runtime_here()
    options.runtime = options.runtime or here or "mpi"
    if options.runtime not in ("mpi", "torch", "simulated"):
        raise unknown("runtime", options.runtime, ("mpi", "torch", "simulated"))
    if here is not None and options.runtime not in (here, "simulated"):
        raise ConfigError(f"this process is a rank of {LAUNCHERS[here]}: use --runtime {here}, or leave --runtime out")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: at least 1")
    algorithm = algorithms.get(options.method, **parse_pairs(options.set, "--set"))
    problem = problems.get(options.problem, **parse_pairs(options.option, "--option"))
    settings = _settings(options)
    if options.runtime == "simulated" and (options.checkpoint_every or options.on_failure != "stop" or options.replace):
        raise ConfigError("--checkpoint-every, --on-failure and --replace are for real ranks: a simulated run is repeated from its seed")
    if options.runtime != "simulated" and (options.network or options.timing_only or options.stragglers or options.detail != "auto"):
        raise ConfigError("--network, --stragglers, --timing-only and --detail are of simulated workers: use them with --runtime simulated")
    return here, algorithm, problem, settings


def _trace_steps(text: str) -> int | None:
    return None if text == "all" else int(text)


def _settings(options: argparse.Namespace) -> Any:
    from workbench.settings import Settings

    if options.epochs is None and options.steps is None:
        options.epochs = 5
    plain = "epochs steps batch_size lr clip_norm ema_decay num_micro precision compile evaluate_every seed threads trace_steps progress"
    safe = "on_failure on_bad_gradient max_grad_norm divergence_ratio checkpoint_every keep_checkpoints"
    names = [*plain.split(), *safe.split()]
    values = {name: getattr(options, name) for name in names if name != "trace_steps" or hasattr(options, name)}
    return Settings(**values, timeout_s=options.timeout, optimizer=_optimizer(options))


def _optimizer(options: argparse.Namespace) -> Any:
    arguments = parse_pairs(options.optimizer_set, "--optimizer-set")
    if options.optimizer is None:
        if arguments:
            raise ConfigError("--optimizer-set needs --optimizer, such as --optimizer SGD --optimizer-set momentum=0.9")
        return None
    from functools import partial

    import torch

    from workbench.replica.optimizer_step import uncompiled

    known = [name for name, value in vars(torch.optim).items() if isinstance(value, type) and name != "Optimizer"]
    name = next((name for name in known if name.lower() == options.optimizer.lower()), None)
    if name is None:
        raise unknown("optimizer", options.optimizer, known)
    make = getattr(torch.optim, name)
    with uncompiled():
        call_checked(name, make, {"params": [torch.nn.Parameter(torch.zeros(1, 1))], **arguments})  # a wrong argument is told here, once
    return partial(make, **arguments)


def run_simulated(options: argparse.Namespace, algorithm: Any, problem: Any, settings: Any) -> Path:
    """Simulate the training and save its run; the run's folder."""
    from workbench import costs
    from workbench.replica.local_training import run_info
    from workbench.runtimes.simulator.simulate import run_simulation
    from workbench.trace.store import new_run, update_run

    if options.resume:
        raise ConfigError("--resume is for real ranks: a simulated run is repeated from its seed")
    network = costs.get(options.network or "ethernet-10g")
    laws = tuple(costs.stragglers.get(name) for name in options.stragglers)
    compute = costs.measure_compute(problem, settings.batch_size, optimizer=settings.optimizer, threads=settings.threads or 1)
    compute = replace(compute, stragglers=laws)
    folder = new_run(run_info(algorithm, problem, settings, "simulated", options.workers))
    try:
        how = {"network": network, "compute": compute, "timing_only": options.timing_only, "detail": options.detail}
        run = run_simulation(algorithm, problem, settings, options.workers, **how)
    except BaseException as error:
        update_run(folder, status="failed", error=f"{type(error).__name__}: {error}")
        raise
    return run.save(folder)


def report(folder: Path, options: argparse.Namespace) -> int:
    """Print the run's numbers; the exit status."""
    from workbench.analysis import compare, summary
    from workbench.trace.run import Run

    run = Run.load(folder)
    if options.json:
        print(json.dumps(summary(run)))
        return 0
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(compare([run]))
    for note in run.info.get("notes", ()):
        if note != run.info["problem"].get("note"):  # the table says it
            print(f"note: {note}")
    print(f"run: {folder}")
    if run.info.get("status") == "stopped":
        print(f"stopped with a checkpoint: the same command with --resume {run.id} goes on")
    return 0
