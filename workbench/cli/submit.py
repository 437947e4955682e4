"""`workbench submit`: runs a training, or your own script, in a Slurm job."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from workbench.errors import ConfigError, DataMissing, LaunchError
from workbench.naming import did_you_mean
from workbench.run_spec import check_train, parse_train

if TYPE_CHECKING:
    from workbench.clusters.slurm.request import Slurm

EXAMPLES = """
The job runs what follows --: a training of the package, or your own command, once as each rank.

  workbench submit --partition gpu --time 02:00:00 --nodes 2 --gpus-per-rank 1 -- train pipe-sgd --runtime torch --workers 8
  workbench submit --time 04:00:00 --requeue -- train synchronous-sgd --workers 8 --steps 200000
  workbench submit --nodes 2 --ranks 8 --gpus-per-rank 1 -- python mine.py --lr 0.1

Ranks of your own command, and those of `train --runtime torch`, are started by srun. Each has RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. Ranks of other trainings are started by mpiexec.

Before the time limit (--warn) a training is asked to write a checkpoint and stop at the end of a step. In your own script,
`stop_requested(trainer)` becomes True, and each rank gets SIGUSR1, which it ignores unless it has a handler.

With --requeue the job then goes back into the queue: a training if it has stopped with a checkpoint, from which it continues;
your own command if it has ended with status 0, and it starts again as it is. Each start is a separate run in the run store.
"""
SLURM_OPTIONS = ("partition", "account", "time_limit", "nodes", "gpus_per_rank")
SBATCH_OPTIONS = {"qos": "qos", "constraint": "constraint", "cpus_per_rank": "cpus-per-task", "memory": "mem"}
STARTERS = ("srun", "mpiexec", "mpirun", "torchrun")
BOTH = "a training (-- train pipe-sgd --workers 8) or your own command (--ranks 8 -- python mine.py)"


def add_submit_options(submit: argparse.ArgumentParser) -> None:
    """Add the options of `workbench submit`, and set its function."""
    submit.epilog = EXAMPLES
    submit.add_argument(
        "--ranks", "-n", type=int, help="number of ranks of your own command; a training has its --workers"
    )
    add_job_options(submit, short=True)
    submit.add_argument(
        "--requeue",
        action="store_true",
        help="return the job to the queue at its time limit, until its command has ended by itself",
    )
    submit.add_argument("argv", nargs="*", metavar="COMMAND", help="`train ...`, or your own command; after --")
    submit.set_defaults(command=_submit)


def add_job_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, short: bool) -> None:
    """Add the options for a job's resources.

    Args:
        parser: the parser or group.
        short: also add sbatch's short options.
    """

    def add(name: str, letter: str, **settings: Any) -> None:
        parser.add_argument(name, *([letter] if short else []), **settings)

    add("--partition", "-p", help="as for sbatch")
    add("--account", "-A", help="as for sbatch")
    add("--qos", "-q", help="as for sbatch")
    add("--constraint", "-C", help="as for sbatch")
    add("--time", "-t", dest="time_limit", metavar="HH:MM:SS", help="limit of the job; also minutes, or D-HH:MM")
    add("--nodes", "-N", type=int, help="number of nodes")
    more = parser.add_argument
    more("--gpus-per-rank", type=int, help="GPUs of each rank; none by default. 0: none, and no warning about it")
    more("--cpus-per-rank", type=int, help="cores of each rank")
    more("--memory", help="memory of each node, such as 16G")
    more(
        "--warn",
        type=int,
        default=60,
        metavar="SECONDS",
        help="ask the ranks to stop this time before the limit (60 by default); a step and a checkpoint must fit into it",
    )
    more(
        "--extra",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, such as --extra=--exclusive",
    )
    more("--dry-run", action="store_true", help="print the batch script; submit nothing")


def _submit(options: argparse.Namespace) -> int:
    if not options.argv:
        raise ConfigError(f"there is no command after --: give {BOTH}")
    if options.argv[0] == "train":
        return _submit_training(options, options.argv)
    command = _checked_command(options.ranks, options.argv)
    named = next((word for word in command if word.endswith(".py")), command[0])
    work = JobCommand(
        name=re.sub(r"[^\w.-]", "-", Path(named).stem),
        command=command,
        num_ranks=options.ranks,
        on_warning="signal",
        by_srun=True,
        requeue="again" if options.requeue else False,
    )
    return submit_command(options, work)


def _submit_training(options: argparse.Namespace, argv: list[str]) -> int:
    if options.ranks is not None:
        raise ConfigError("--ranks is for your own command: the ranks of a training are its --workers; leave it out")
    train, outlives = _checked_training(argv[1:], dry_run=options.dry_run)
    by_srun = train.runtime == "torch"
    if options.gpus_per_rank and not by_srun:
        print("workbench: the ranks use MPI. For NCCL between the GPUs: train ... --runtime torch", file=sys.stderr)
    if by_srun and train.threads is None and options.cpus_per_rank:
        argv = [*argv, "--threads", str(options.cpus_per_rank)]  # a rank sees only its own cores
    if train.resume:
        argv = [*argv, "--resume", train.resume]  # when the job starts, `last` may be another run
    work = JobCommand(
        name="train",
        command=workbench_command(argv),
        num_ranks=train.workers,
        on_warning="command",
        by_srun=by_srun,
        outlives=outlives,
        requeue="checkpoint" if options.requeue else False,
    )
    return submit_command(options, work)


def workbench_command(argv: Sequence[str]) -> list[str]:
    """Return the command line of `workbench ARGV`, by this interpreter."""
    return [sys.executable, "-m", "workbench", *argv]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobCommand:
    """The command that a job runs.

    Attributes:
        name: beginning of the job's name.
        command: the command line.
        num_ranks: number of ranks.
        on_warning, requeue: as in `clusters.slurm.batch_job`.
        by_srun: srun runs the command as each rank. Otherwise the command starts its ranks itself.
        outlives: with `by_srun`, whether the other ranks continue when one fails.
    """

    name: str
    command: list[str]
    num_ranks: int
    on_warning: str
    by_srun: bool = False
    outlives: bool = False
    requeue: str | bool = False


def submit_command(options: argparse.Namespace, work: JobCommand) -> int:
    """Run a command in a job that is warned before its time limit.

    Args:
        options: those of `add_job_options`.
        work: the command.

    Returns:
        The exit status.

    Raises:
        ConfigError: this process runs in a job.
        LaunchError: Slurm refuses the job.
    """
    from workbench.clusters.slurm import batch_job
    from workbench.clusters.slurm.gpus import gpu_warning
    from workbench.clusters.slurm.queue import Allocation, submit
    from workbench.clusters.supervision.registry import state_folder

    slurm = _resources(options)
    _check_warning(options.warn, slurm, stops=work.on_warning == "command" or bool(work.requeue))
    name = f"{work.name}-{secrets.token_hex(4)}"
    folder = state_folder("jobs") / name
    program = [sys.executable, "-P", batch_job.__file__, str(folder / "job.json")]
    output = str(folder / "job.log")
    script = slurm.script(work.num_ranks, name=name, output=output, command=program, requeue=bool(work.requeue))
    if warning := gpu_warning(slurm, "--gpus-per-rank ", work.command):
        print(f"workbench: {warning}", file=sys.stderr)
    if slurm.nodes and work.num_ranks % slurm.nodes:
        uneven = f"{work.num_ranks} ranks are not spread evenly over {slurm.nodes} nodes"
        print(f"workbench: {uneven}: give a multiple of the nodes", file=sys.stderr)
    if options.dry_run:
        print(script, end="")
        return 0
    if Allocation.here() is not None:
        raise ConfigError(
            "this shell runs in a Slurm job: run the command in it, with srun for your own script; or submit "
            "outside of it"
        )
    spec = _spec(work, slurm, folder)
    folder.mkdir(parents=True, mode=0o700)
    (folder / "job.json").write_text(json.dumps(spec))
    try:
        job = submit(script)
    except LaunchError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"job {job}: squeue -j {job}; scancel {job}\noutput: {output}")
    return 0


def _check_warning(warn_s: int, slurm: Slurm, *, stops: bool) -> None:
    """Check when the job is warned. `stops`: whether its ranks stop at the warning, and may be requeued."""
    if warn_s < 1:
        raise ConfigError(f"--warn {warn_s}: give 1 second or more")
    limit_s = slurm.time_limit_s
    if stops and limit_s is not None and warn_s >= limit_s:
        raise ConfigError(
            f"--warn {warn_s}: a job of --time {slurm.time_limit} would be asked to stop at its start: warn it later"
        )


def _resources(options: argparse.Namespace) -> Slurm:
    """Return the job's resources from the options of `add_job_options`."""
    from workbench.clusters.slurm.request import Slurm

    given = {word: getattr(options, name) for name, word in SBATCH_OPTIONS.items()}
    extra = [f"--{word}={value}" for word, value in given.items() if value is not None]
    extra += [*options.extra, f"--signal=B:USR1@{options.warn}"]
    return Slurm(extra=tuple(extra), **{name: getattr(options, name) for name in SLURM_OPTIONS})


def _spec(work: JobCommand, slurm: Slurm, folder: Path) -> dict[str, Any]:
    """Return the specification that `batch_job` reads on the job's first node."""
    from workbench.clusters.slurm.request import WITHOUT_TASK_GPUS
    from workbench.runtimes.control.job import JOB_VARIABLE

    command = [*WITHOUT_TASK_GPUS, *work.command]
    if work.by_srun:
        command = slurm.srun_command(work.num_ranks, work.command, outlives=work.outlives)
    return {
        "command": command,
        "environment": {"PYTHONUNBUFFERED": "1", JOB_VARIABLE: str(folder)},  # the job's output appears at once
        "folder": str(folder),
        "controller": None,
        "connection": None,
        "on_warning": work.on_warning,
        "rendezvous": work.by_srun,
        "requeue": work.requeue,
    }


def _checked_training(arguments: list[str], *, dry_run: bool) -> tuple[argparse.Namespace, bool]:
    """Check a training, so that it does not fail after hours in a queue.

    Return its options, and whether the other ranks continue when one is killed. `resume` is then the folder of the run
    to continue from.

    Args:
        arguments: those of `workbench train`.
        dry_run: whether its data may be missing on this machine.
    """
    from workbench.clusters.jobs import checkpoint_of
    from workbench.runtimes.elastic.policy import tolerates_loss

    train = parse_train(arguments)
    if train.runtime == "simulated":
        raise ConfigError(
            "a simulation is one process and needs no job: use `workbench train`, or `srun workbench train`"
        )
    if train.json:
        raise ConfigError("--json prints to the job's output: leave it out, and use `workbench show last --json`")
    if train.runtime == "torch" and train.replace:
        raise ConfigError("--replace starts new processes, but srun starts the ranks of this job: leave it out")
    outlives = train.on_failure == "shrink"
    try:
        outlives = tolerates_loss(check_train(arguments), train.on_failure, train.workers)
    except DataMissing as error:
        if not dry_run:
            raise
        print(f"workbench: not on this machine: {error}. The job's nodes need these files", file=sys.stderr)
    if train.resume:
        train.resume = checkpoint_of(train.resume)
    return train, outlives


def _checked_command(num_ranks: int | None, argv: list[str]) -> list[str]:
    """Check the user's own command. Return it with the absolute path of its program."""
    name = Path(argv[0]).name
    if name == "workbench":
        raise ConfigError("leave `workbench` out after --: workbench submit ... -- train pipe-sgd --workers 8")
    if name in STARTERS:
        raise ConfigError(
            f"srun starts the command as each rank: leave {name} and its options out, as in -- python mine.py"
        )
    program = shutil.which(argv[0])
    if program is None:
        meant = did_you_mean(argv[0], ["train"], cutoff=0.6)
        raise ConfigError(f"there is no program {argv[0]!r} here{f': {meant.strip()}' if meant else ''}. Give {BOTH}")
    script = next((word for word in argv[1:2] if word.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise ConfigError(f"there is no file {script} in {Path.cwd()}: give its path from this folder")
    if num_ranks is None:
        raise ConfigError(f"give the number of ranks: workbench submit --ranks 8 ... -- {' '.join(argv[:2])}")
    return [str(Path(program).absolute()), *argv[1:]]
