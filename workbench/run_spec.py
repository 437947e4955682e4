"""A training given by names and options: parses it, resolves the names to objects, checks it, and simulates it.

`cli/train.py`, `cli/submit.py` and `experiments` use it. `cli/train.py` starts real ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from workbench.errors import ConfigError
from workbench.logs import LOG
from workbench.naming import call_checked, json_line, parse_pairs, unknown
from workbench.user_file import is_defined_in_user_file, is_in_user_file, load

if TYPE_CHECKING:
    from workbench.trace.run import Run

LAUNCHERS = {"torch": "torchrun", "mpi": "mpiexec"}
OPTION_GROUPS = ("set", "option", "optimizer_set", "compute")  # those that take NAME=VALUE

TUNED = "tuned"  # value of --lr


def add_train_options(train: argparse.ArgumentParser) -> None:
    """Add the options of `workbench train`.

    Their names are keys of sweep files and of records.
    """
    add = train.add_argument
    add("algorithm", help="such as pipe-sgd; `workbench algorithms` lists them; file.py:Class for your own")
    add(
        "--problem",
        default="digits-mlp",
        help="model and data; `workbench problems` lists them; file.py:name for your own",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the problem, such as hidden=[64]",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the algorithm, such as width=2; also as --width 2. `workbench train ALGORITHM --help` lists them",
    )
    add("--runtime", help="mpi, torch or simulated; default: that of the launcher that started this process, else mpi")
    add("--workers", type=int, default=2, help="number of ranks; 2 by default")
    add("--epochs", type=int, help="length of the training; 5 by default")
    add("--steps", type=int, help="length of the training, instead of --epochs")
    add("--seed", type=int, default=0, help="seed of data order, initial weights and dropout; 0 by default")
    add(
        "--evaluate-every",
        type=int,
        metavar="STEPS",
        help="steps between evaluations; 0: only at the end; default: once per epoch",
    )

    add = train.add_argument_group("optimizer").add_argument
    add("--optimizer", help="a class of torch.optim, such as AdamW; file.py:Class for your own")
    add(
        "--optimizer-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the optimizer, such as momentum=0.9",
    )
    add(
        "--lr",
        type=_rate,
        help="learning rate; the problem's by default. `tuned`: the best one of a search, for some problems",
    )
    add("--batch-size", type=int, help="samples per worker and step; the problem's by default")
    add(
        "--micro-batches",
        "--num-micro",
        type=int,
        default=1,
        dest="num_micro",
        help="micro-batches in a step; 1 by default",
    )
    add("--clip-norm", type=float, help="clip the mean gradient of all ranks to this norm")
    add("--ema-decay", type=float, help="evaluate a moving average of the parameters with this decay, such as 0.999")
    add("--precision", default="fp32", help="fp32 (the default), bf16 or fp16")
    add("--compile", action="store_true", help="run the model through torch.compile")

    add = train.add_argument_group("lost ranks and bad gradients").add_argument
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="longest wait of a rank for the others; 120 by default",
    )
    add(
        "--on-failure",
        default="stop",
        help="when a rank is lost: stop, or shrink to the remaining ranks (gloo, Open MPI 5)",
    )
    add(
        "--replace",
        action="store_true",
        help="if a rank is killed, another process takes its place; the other ranks continue meanwhile (gloo, Open MPI 5)",
    )
    add(
        "--on-bad-gradient",
        default="stop",
        help="for a gradient that is not finite or exceeds --max-grad-norm: stop, skip, clip or ignore",
    )
    add("--max-grad-norm", type=float, help="largest norm of one rank's gradient: see --on-bad-gradient")
    add("--divergence-ratio", type=float, help="stop when the loss exceeds the first loss by this factor")

    add = train.add_argument_group("checkpoints and records").add_argument
    add(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="write a checkpoint every STEPS steps; --resume continues from it",
    )
    add("--keep-checkpoints", type=int, default=2, metavar="N", help="keep the newest N checkpoints; 2 by default")
    add(
        "--check-replicas",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="compare the ranks' parameters after 1, 2, 4, ... N steps, then every N steps (default 1024); 0: never",
    )
    add(
        "--resume",
        metavar="RUN",
        help="continue from the newest checkpoint of a run that stopped or crashed; RUN@200: from that after 200 steps",
    )
    add(
        "--trace-steps",
        type=_trace_steps,
        default=argparse.SUPPRESS,
        help="record the timeline of the first N steps, or `all` (default 2000)",
        metavar="N",
    )
    add(
        "--log",
        action="append",
        default=[],
        metavar="LOGGER",
        help="also log the run to tensorboard (in its folder), wandb or mlflow; may be repeated",
    )
    add("--json", action="store_true", help="print one JSON object at the end, and no progress")

    add = train.add_argument_group("how a rank uses its cores").add_argument
    add("--threads", type=int, help="compute threads of each rank; a share of the cores by default")
    add(
        "--progress",
        default="auto",
        help="what moves messages while a rank computes: auto (the default), a thread, tests (calls between layers), the "
        "library, or blocking (nothing)",
    )

    add = train.add_argument_group("slept and simulated compute, and the simulated network").add_argument
    add(
        "--compute",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="seconds of compute in a step, such as --compute forward_s=0.03 --compute backward_s=0.07 (and update_s): real "
        "ranks sleep for them; simulated ranks have measured seconds by default",
    )
    add(
        "--stragglers",
        action="append",
        default=[],
        metavar="DISTRIBUTION",
        help="with --compute, or simulated: ranks that are slower, such as lognormal:0.3 (at random), or slow-machines:3=4 "
        "(rank 3 takes 4 times as long); several are multiplied",
    )
    add("--network", help="simulated: the network; ethernet-10g by default")
    add("--timing-only", action="store_true", help="simulated: only times, without gradients")
    add(
        "--detail",
        default="auto",
        help="simulated: messages (every message is an event), formula (sums take a formula's seconds; needs --timing-only), "
        "or auto (the default)",
    )


def algorithm_in(words: Sequence[str]) -> str | None:
    """Return the first of the words that names an algorithm.

    >>> algorithm_in(["--problem", "mine.py:problem", "mine.py:Mine"])
    'mine.py:Mine'
    """
    from workbench import algorithms

    for before, word in pairwise(["", *words]):
        is_own = is_in_user_file(word) and before != "--problem"
        if is_own or word.lower().replace("_", "-") in algorithms.names():
            return word
    return None


def expand_settings(words: Sequence[str], known: Iterable[str] = ()) -> list[str]:
    """Return the words of `workbench train`, with options that it does not have as settings of the algorithm.

    Algorithms are not loaded here: the fork server of the ranks begins before torch is loaded.

    Args:
        words: of the command line.
        known: options that are no settings either.

    >>> expand_settings(["pipe-sgd", "--width", "3", "--workers", "4", "--warmup-steps=8"])
    ['pipe-sgd', '--set', 'width=3', '--workers', '4', '--set', 'warmup_steps=8']
    """
    found, known = list(words), [*_parser()._option_string_actions, "-h", "--help", *known]
    for place in reversed(range(len(found))):
        option, is_one, value = found[place].partition("=")
        if not option.startswith("--") or any(one.startswith(option) for one in known):
            continue
        setting = option[2:].replace("-", "_")
        if is_one:
            found[place : place + 1] = ["--set", f"{setting}={value}"]
        elif place + 1 < len(found) and not found[place + 1].startswith("--"):
            found[place : place + 2] = ["--set", f"{setting}={found[place + 1]}"]
    return found


class _RaisingParser(argparse.ArgumentParser):
    """A parser that raises an exception, where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _RaisingParser(prog="workbench train", add_help=False, allow_abbrev=False)
    add_train_options(parser)
    return parser


def train_options() -> tuple[str, ...]:
    """Return the names of all options of `workbench train`, including the positional `algorithm`."""
    return tuple(action.dest for action in _parser()._actions)


def parse_train(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `workbench train ARGUMENTS`.

    Raises:
        ConfigError: there is no such option, or a value is not valid.
    """
    return _parser().parse_args(expand_settings(arguments))


def check_train(arguments: Sequence[str]) -> Any:
    """Check `workbench train ARGUMENTS` as the command does before its ranks start. Runs nothing and reads no data.

    Returns:
        The algorithm.

    Raises:
        ConfigError: an option, a name or a combination is not valid.
    """
    from workbench import costs

    options = parse_train(arguments)
    _, algorithm, _, _ = resolve(options)
    algorithm.check(options.workers)
    if options.network:
        costs.get(options.network)
    return algorithm


def resolve(options: argparse.Namespace) -> tuple[str | None, Any, Any, Any]:
    """Make the objects that the options name. Sets `options.runtime`.

    Returns:
        The runtime of the launcher that started this process (None without one), algorithm, problem and settings.

    Raises:
        ConfigError: a name, a value or a combination is not valid.
    """
    from workbench import algorithms, problems
    from workbench.runtimes.rank.main import runtime_here, world_here

    here = runtime_here()
    options.runtime = options.runtime or here or "mpi"
    if options.runtime not in ("mpi", "torch", "simulated"):
        raise unknown("runtime", options.runtime, ("mpi", "torch", "simulated"))
    if here is not None and options.runtime not in (here, "simulated"):
        raise ConfigError(f"this process is a rank of {LAUNCHERS[here]}: use --runtime {here}, or leave --runtime out")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: give 1 or more")
    workers = options.workers if here is None or options.runtime == "simulated" else world_here()[1]
    check_slow_ranks(options.stragglers, workers)
    given = parse_pairs(options.set, "--set")
    if "schedule" in given and not is_in_user_file(options.algorithm):
        raise ConfigError(
            "--schedule: this command has none: use cluster.train(..., schedule=...) in Python, or your own script with a "
            "wb.Trainer"
        )
    algorithm = algorithms.get(options.algorithm, **given)
    problem = problems.get(options.problem, **parse_pairs(options.option, "--option"))
    problem, settings = _with_tuned_rate(options, workers, algorithm, problem, _settings(options))
    if options.runtime == "simulated" and (options.checkpoint_every or options.on_failure != "stop" or options.replace):
        raise ConfigError(
            "--checkpoint-every, --on-failure and --replace are for real ranks: repeat a simulated run from its seed"
        )
    simulated_only = options.network or options.timing_only or options.detail != "auto"
    if options.runtime != "simulated" and simulated_only:
        raise ConfigError("--network, --timing-only and --detail are for simulated workers: add --runtime simulated")
    return here, algorithm, problem, settings


def check_slow_ranks(stragglers: Sequence[str], workers: int) -> None:
    """Refuse a distribution that slows a rank which does not exist."""
    from workbench import costs

    for text in stragglers:
        found = costs.stragglers.get(text)
        ranks = [rank for rank, _ in found.factor_of] if isinstance(found, costs.SlowMachines) else []
        if ranks and max(ranks) >= workers:
            raise ConfigError(
                f"--stragglers {text}: there is no rank {max(ranks)}: with {workers} workers, give ranks from 0 to "
                f"{workers - 1}, or more --workers"
            )


def _trace_steps(text: str) -> int | None:
    return None if text == "all" else int(text)


def _rate(text: str) -> float | str:
    return text if text == TUNED else float(text)


def _with_tuned_rate(
    options: argparse.Namespace, workers: int, algorithm: Any, problem: Any, settings: Any
) -> tuple[Any, Any]:
    """Return problem and settings. With `--lr tuned`, settings have the tuned rate and the problem's note says so."""
    if options.lr != TUNED:
        return problem, settings
    from workbench.problems.tuned_rates import note_of

    chosen = {"batch_size": settings.batch_size, "optimizer": settings.optimizer}
    lr = problem.tuned_lr(algorithm, workers=workers, **chosen)
    notes = [note for note in (problem.note, note_of(problem.name, lr)) if note]
    return replace(problem, note="; ".join(notes)), replace(settings, lr=lr)


def _settings(options: argparse.Namespace) -> Any:
    from workbench.settings import Settings

    if options.epochs is None and options.steps is None:
        options.epochs = 5
    plain = "epochs steps batch_size lr clip_norm ema_decay num_micro precision compile evaluate_every seed threads progress"
    safe = "on_failure on_bad_gradient max_grad_norm divergence_ratio checkpoint_every keep_checkpoints"
    names = [*plain.split(), *safe.split()]
    values = {name: getattr(options, name) for name in names}
    values |= {name: vars(options)[name] for name in ("trace_steps", "check_replicas") if name in options}
    if options.lr == TUNED:
        del values["lr"]
    compute = compute_of(options.compute, options.stragglers, measured=options.runtime == "simulated")
    more = {"optimizer": _optimizer(options), "compute": compute, "callbacks": [_logger(name) for name in options.log]}
    return Settings(**values, timeout_s=options.timeout, **more)


def _logger(name: str) -> Any:
    """Return the logger with this name, with its default settings."""
    from workbench import callbacks

    loggers: dict[str, Callable[[], Any]] = {
        "tensorboard": callbacks.TensorBoard,
        "wandb": lambda: callbacks.WandB("workbench"),
        "mlflow": callbacks.MLflow,
    }
    if name not in loggers:
        raise unknown("logger", name, loggers)
    return loggers[name]()


def compute_of(seconds: Sequence[str], stragglers: Sequence[str], *, measured: bool = False) -> Any:
    """Return the `costs.Compute` of `--compute` and `--stragglers`; None without seconds.

    Args:
        seconds: such as "forward_s=0.03".
        stragglers: distributions, such as "lognormal:0.3".
        measured: whether seconds that are left out are measured.

    Raises:
        ConfigError: a name or a value is not valid, or stragglers have no seconds to multiply.
    """
    from workbench import costs

    arguments = parse_pairs(seconds, "--compute")
    distributions = tuple(costs.stragglers.get(name) for name in stragglers)
    if not arguments:
        if distributions and not measured:
            raise ConfigError(
                "stragglers multiply the seconds of compute: give these too, such as --compute backward_s=0.07, or "
                "simulate"
            )
        return None
    if "stragglers" in arguments:
        raise ConfigError("--compute stragglers=...: give them by --stragglers, such as --stragglers lognormal:0.3")
    given = {"forward_s": 0.0, "backward_s": 0.0, **arguments, "stragglers": distributions}
    return call_checked("--compute", costs.Compute, given)


def _optimizer(options: argparse.Namespace) -> Any:
    if options.optimizer is None:
        if options.optimizer_set:
            raise ConfigError("--optimizer-set needs --optimizer, such as --optimizer SGD --optimizer-set momentum=0.9")
        return None
    return optimizer_of(options.optimizer, options.optimizer_set)


def optimizer_of(name: str, arguments: Sequence[str] = (), option: str = "--optimizer-set") -> Any:
    """Return a factory of an optimizer: a class of `torch.optim` with arguments, each as "momentum=0.9".

    Args:
        name: of the class, or `file.py:name` for your own class, or a function from parameters to an optimizer.

    Raises:
        ConfigError: the class or an argument is not known.
    """
    import torch

    from workbench.replica.optimizer_step import uncompiled

    if is_in_user_file(name):
        make = _optimizer_of_file(name)
    else:
        make = _class_in(torch.optim, "optimizer", name, torch.optim.Optimizer)
    given = parse_pairs(arguments, option)
    with uncompiled():  # a wrong argument raises here, once, and not on every rank
        call_checked(make.__name__, partial(make, [torch.nn.Parameter(torch.zeros(1, 1))]), given)
    return partial(make, **given)


def _optimizer_of_file(name: str) -> Any:
    """Return an optimizer's class, or a function that makes one, from a user's file."""
    import torch

    def fits(value: Any) -> bool:
        return callable(value) and is_defined_in_user_file(value)

    make = load(name, "optimizer", fits)
    if isinstance(make, torch.optim.Optimizer):
        raise ConfigError(
            f"{name} is a {type(make).__name__}: name the class, and give its arguments by --optimizer-set"
        )
    if not callable(make) or (isinstance(make, type) and not issubclass(make, torch.optim.Optimizer)):
        what = f"the class {make.__name__}" if isinstance(make, type) else f"a {type(make).__name__}"
        raise ConfigError(f"{name} is {what}: name a class that derives from torch.optim.Optimizer")
    return make


def schedule_of(name: str, arguments: Sequence[str] = ()) -> Any:
    """Return a factory of a schedule: a class of `torch.optim.lr_scheduler` with arguments, each as "T_max=100".

    Raises:
        ConfigError: the class or an argument is not known.
    """
    import torch

    make = _class_in(torch.optim.lr_scheduler, "schedule", name, torch.optim.lr_scheduler.LRScheduler)
    given = parse_pairs(arguments, "schedule")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    call_checked(make.__name__, partial(make, optimizer), given)
    return partial(make, **given)


def names_in(module: Any, base: type) -> list[str]:
    """Return the public names of the classes of a module that are derived from `base`."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    ]


def _class_in(module: Any, kind: str, name: str, base: type) -> Any:
    known = names_in(module, base)
    found = next((one for one in known if one.lower() == name.lower()), None)
    if found is None:
        raise unknown(kind, name, known)
    return getattr(module, found)


def run_simulated(options: argparse.Namespace, algorithm: Any, problem: Any, settings: Any) -> Path:
    """Simulate the training and save its run. Return the run's folder.

    Raises:
        ConfigError: an option is not valid for a simulation.
    """
    from workbench import costs
    from workbench.callbacks.base import Notifier
    from workbench.progress import progress_line
    from workbench.replica.local_training import run_info
    from workbench.runtimes.simulator.simulate import run_simulation
    from workbench.trace.recorder import watched_rows
    from workbench.trace.run import Run
    from workbench.trace.store import new_run, read_info, remove_run, update_run

    if options.resume:
        raise ConfigError("--resume is for real ranks: repeat a simulated run from its seed")
    network = costs.get(options.network or "ethernet-10g")
    compute, settings = settings.compute, replace(settings, compute=None)
    measured = compute is None
    if compute is None:
        distributions = tuple(costs.stragglers.get(name) for name in options.stragglers)
        threads = settings.threads or 1
        compute = costs.measure_compute(problem, settings.batch_size, optimizer=settings.optimizer, threads=threads)
        compute = replace(compute, stragglers=distributions)
    num_steps = settings.steps or _steps_of_epochs(algorithm, problem, settings, options.workers)
    folder = new_run(run_info(algorithm, problem, settings, "simulated", options.workers))

    def simulated(stop_after: int | None = None) -> Run:
        return run_simulation(
            algorithm,
            problem,
            settings,
            options.workers,
            network=network,
            compute=compute,
            timing_only=options.timing_only,
            detail=options.detail,
            stop_after=stop_after,
            measured=measured,
        )

    try:
        with progress_line(num_steps, "steps", shown=not options.json) as line, watched_rows(partial(_show_row, line)):
            run = simulated()
        notifier = Notifier(settings.callbacks, LOG.warning)
        stop = notifier.tell_simulated(replace(run, folder=folder, info={**read_info(folder), **run.info}))
        if stop is not None:
            run = simulated(stop)
    except ConfigError:
        remove_run(folder)  # refused: no step was simulated
        raise
    except BaseException as error:
        update_run(folder, status="failed", error=f"{type(error).__name__}: {error}")
        raise
    run.save(folder)
    notifier.end(Run.load(folder))
    return folder


def _steps_of_epochs(algorithm: Any, problem: Any, settings: Any, workers: int) -> int:
    from workbench.replica.local_training import num_steps_of, sampler_of

    batch_size, num_computing = settings.batch_size or problem.batch_size, algorithm.roles(workers).num_computing
    return num_steps_of(settings, sampler_of(problem.train_source(), batch_size, num_computing, settings.seed))


def _show_row(line: Any, row: dict[str, Any]) -> None:
    """Show the furthest step of any worker."""
    if row["step"] >= line.n:
        line.update(row["step"] + 1 - line.n)


def report(folder: Path, options: argparse.Namespace) -> int:
    """Print the run's numbers. Return the exit status."""
    from workbench.analysis import compare, summary
    from workbench.trace.run import Run

    run = Run.load(folder)
    if options.json:
        print(json_line(summary(run)))
        return 0
    print(compare([run]))
    for note in notes_of(run):
        print(f"note: {note}")
    print(f"run: {folder}")
    if run.info.get("status") == "stopped":
        print(f"stopped with a checkpoint: the same command with --resume {run.id} continues from it")
    return 0


def notes_of(run: Run) -> list[str]:
    """Return what the run's record notes, such as that compute took longer than its slept time, or a steered setting.

    The problem's own note is left out, because tables of runs show it.
    """
    from workbench.trace.info import describe_changes

    own = (run.info.get("problem") or {}).get("note")
    notes = [str(note) for note in run.info.get("notes") or () if note != own]
    return notes + [f"steered: {change}" for change in describe_changes(run.info)]
