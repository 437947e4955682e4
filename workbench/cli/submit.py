"""`workbench submit`: runs a training in a Slurm job."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
from typing import Any

from workbench.errors import ConfigError, LaunchError
from workbench.run_spec import add_train_options, check_train

EXAMPLES = """
The job runs `workbench` with the arguments after --. Its --workers are the job's tasks:

  workbench submit --partition gpu --time 02:00:00 --nodes 2 --gpus-per-rank 1 -- train pipe-sgd --workers 4 --epochs 50
  workbench submit --time 04:00:00 --requeue -- train synchronous-sgd --workers 8 --steps 200000

Before the time limit (--warn) the training is asked to write a checkpoint and stop at the end of a step. With --requeue the
job then goes back into the queue. When it starts again, it continues from the checkpoint. Each start of the job is a
separate run in the run store.
"""
SLURM_OPTIONS = ("partition", "account", "time_limit", "nodes", "gpus_per_rank")
SBATCH_OPTIONS = {"qos": "qos", "constraint": "constraint", "cpus_per_rank": "cpus-per-task", "memory": "mem"}


def add_submit_options(submit: argparse.ArgumentParser) -> None:
    """Add the options of `workbench submit`, and set its function."""
    submit.formatter_class = argparse.RawDescriptionHelpFormatter
    submit.epilog = EXAMPLES
    add_job_options(submit, short=True)
    submit.add_argument(
        "--requeue",
        action="store_true",
        help="put the job back into the queue, where it continues from the checkpoint, until the training has ended",
    )
    submit.add_argument("argv", nargs="*", metavar="train ...", help="command to run, after --")
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
    more("--gpus-per-rank", type=int, default=0, help="GPUs of each rank; 0 by default")
    more("--cpus-per-rank", type=int, help="cores of each rank")
    more("--memory", help="memory of each node, such as 16G")
    more(
        "--warn",
        type=int,
        default=60,
        metavar="SECONDS",
        help="stop the training this time before the limit (60 by default); a step and a checkpoint must fit into it",
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
    return submit_command(options, _checked(options.argv), options.argv, what="train", requeue=options.requeue)


def submit_command(
    options: argparse.Namespace, num_ranks: int, argv: list[str], *, what: str, requeue: bool = False
) -> int:
    """Run `workbench ARGV` in a job that is interrupted before its time limit.

    Args:
        options: those of `add_job_options`.
        num_ranks: number of ranks.
        argv: arguments of `workbench`.
        what: beginning of the job's name.
        requeue: put the job back into the queue after the warning.

    Returns:
        The exit status.

    Raises:
        ConfigError: this process runs in a job.
        LaunchError: Slurm refuses the job.
    """
    from workbench.clusters.slurm import batch_job
    from workbench.clusters.slurm.queue import Allocation, submit
    from workbench.clusters.slurm.request import WITHOUT_TASK_GPUS, Slurm
    from workbench.clusters.supervision.registry import state_folder

    given = {word: getattr(options, name) for name, word in SBATCH_OPTIONS.items()}
    extra = [f"--{word}={value}" for word, value in given.items() if value is not None]
    extra += [*options.extra, f"--signal=B:USR1@{options.warn}"]
    slurm = Slurm(extra=tuple(extra), **{name: getattr(options, name) for name in SLURM_OPTIONS})
    name = f"{what}-{secrets.token_hex(4)}"
    folder = state_folder("jobs") / name
    command = [sys.executable, "-P", batch_job.__file__, str(folder / "job.json")]
    script = slurm.script(num_ranks, name=name, output=str(folder / "job.log"), command=command, requeue=requeue)
    if options.dry_run:
        print(script, end="")
        return 0
    if Allocation.here() is not None:
        raise ConfigError(
            f"this shell runs in a Slurm job: use `workbench {what}` in it, on all its nodes; or submit outside of it"
        )
    spec: dict[str, Any] = {
        "command": [*WITHOUT_TASK_GPUS, sys.executable, "-m", "workbench", *argv],
        "environment": {"PYTHONUNBUFFERED": "1"},  # the job's output appears at once
        "folder": str(folder),
        "controller": None,
        "connection": None,
        "on_warning": "interrupt",
        "requeue": requeue,
    }
    folder.mkdir(parents=True, mode=0o700)
    (folder / "job.json").write_text(json.dumps(spec))
    try:
        job = submit(script)
    except LaunchError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"job {job}: squeue -j {job}; scancel {job}\noutput: {folder / 'job.log'}")
    return 0


def _checked(argv: list[str]) -> int:
    """Check the command, so that it does not fail after hours in a queue. Return the number of ranks."""
    from workbench.clusters.jobs import checkpoint_of

    if argv[:1] != ["train"]:
        raise ConfigError("give a training after --: workbench submit --time 01:00:00 -- train pipe-sgd --workers 4")
    parser = argparse.ArgumentParser(prog="workbench submit ... -- train")
    add_train_options(parser)
    train = parser.parse_args(argv[1:])
    if train.runtime == "simulated":
        raise ConfigError(
            "a simulation is one process and needs no job: use `workbench train`, or `srun workbench train`"
        )
    if train.runtime == "torch":
        raise ConfigError("mpiexec starts the ranks of a Slurm job: leave --runtime out, or use --runtime mpi")
    if train.json:
        raise ConfigError("--json prints to the job's output: leave it out, and use `workbench show last --json`")
    check_train(argv[1:])
    if train.resume:
        checkpoint_of(train.resume)
    return int(train.workers)
