"""`workbench submit`: a training in a Slurm job, from a shell."""

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
What is after -- is given to `workbench`, inside the job; its --workers are the job's tasks:

  workbench submit --partition gpu --time 02:00:00 --nodes 2 --gpus-per-rank 1 -- train pipe-sgd --workers 4 --epochs 50
  workbench submit --time 04:00:00 --requeue -- train synchronous-sgd --workers 8 --steps 200000

Before the time limit (--warn) the training is asked to stop at the end of a step, and leaves a checkpoint. With --requeue the
job then goes back into the queue, and its next turn goes on from there; each turn is a run of its own in the run store.
"""
WORDS = ("partition", "account", "time_limit", "nodes", "gpus_per_rank")
EXTRA = {"qos": "qos", "constraint": "constraint", "cpus_per_rank": "cpus-per-task", "memory": "mem"}


def add_submit_options(submit: argparse.ArgumentParser) -> None:
    """The options of `workbench submit`, and what runs it."""
    submit.formatter_class = argparse.RawDescriptionHelpFormatter
    submit.epilog = EXAMPLES
    add_job_options(submit, short=True)
    submit.add_argument("--requeue", action="store_true", help="go on from the checkpoint in a next turn, until the training has ended")
    submit.add_argument("argv", nargs="*", metavar="train ...", help="after --")
    submit.set_defaults(command=_submit)


def add_job_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *, short: bool) -> None:
    """What a job asks for.

    Args:
        short: also by sbatch's letters.
    """

    def add(name: str, letter: str, **about: Any) -> None:
        parser.add_argument(name, *([letter] if short else []), **about)

    add("--partition", "-p")
    add("--account", "-A")
    add("--qos", "-q")
    add("--constraint", "-C")
    add("--time", "-t", dest="time_limit", metavar="HH:MM:SS", help="or minutes, or D-HH:MM")
    add("--nodes", "-N", type=int)
    more = parser.add_argument
    more("--gpus-per-rank", type=int, default=0)
    more("--cpus-per-rank", type=int)
    more("--memory", help="of each node, such as 16G")
    more("--warn", type=int, default=60, metavar="SECONDS", help="before the time limit: how long a step and a checkpoint may take")
    more("--extra", action="append", default=[], metavar="OPTION", help="another option of sbatch, such as --extra=--exclusive")
    more("--dry-run", action="store_true", help="print the batch script, and submit nothing")


def _submit(options: argparse.Namespace) -> int:
    return submit_words(options, _checked(options.argv), options.argv, what="train", requeue=options.requeue)


def submit_words(options: argparse.Namespace, num_ranks: int, argv: list[str], *, what: str, requeue: bool = False) -> int:
    """Have `workbench ARGV` run in a job of so many ranks, which is interrupted before its time limit; returns the exit status.

    Args:
        options: those of `add_job_options`.
        what: how the job's name begins.

    Raises:
        ConfigError: this process is in a job.
        LaunchError: Slurm does not take it.
    """
    from workbench.clusters.slurm import batch_job
    from workbench.clusters.slurm.queue import Allocation, jobs_folder, submit
    from workbench.clusters.slurm.request import WITHOUT_TASK_GPUS, Slurm

    extra = [f"--{word}={getattr(options, name)}" for name, word in EXTRA.items() if getattr(options, name) is not None]
    extra += [*options.extra, f"--signal=B:USR1@{options.warn}"]
    slurm = Slurm(extra=tuple(extra), **{name: getattr(options, name) for name in WORDS})
    name = f"{what}-{secrets.token_hex(4)}"
    folder = jobs_folder() / name
    command = [sys.executable, "-P", batch_job.__file__, str(folder / "job.json")]
    script = slurm.script(num_ranks, name=name, output=str(folder / "job.log"), command=command, requeue=requeue)
    if options.dry_run:
        print(script, end="")
        return 0
    if Allocation.here() is not None:
        raise ConfigError(f"this shell is in a Slurm job already: `workbench {what}` runs in it, on all its nodes; or submit outside of it")
    spec: dict[str, Any] = {
        "command": [*WITHOUT_TASK_GPUS, sys.executable, "-m", "workbench", *argv],
        "environment": {"PYTHONUNBUFFERED": "1"},  # the job's output can be followed
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
    """The number of ranks; what would fail in the job, after hours in a queue, is refused now."""
    from workbench.clusters.jobs import checkpoint_of

    if argv[:1] != ["train"]:
        raise ConfigError("say what to train, after --: workbench submit --time 01:00:00 -- train pipe-sgd --workers 4")
    parser = argparse.ArgumentParser(prog="workbench submit ... -- train")
    add_train_options(parser)
    train = parser.parse_args(argv[1:])
    if train.runtime == "simulated":
        raise ConfigError(
            "simulated workers are one process: have them without a job, with `workbench train`, or in `srun workbench train`"
        )
    if train.runtime == "torch":
        raise ConfigError("ranks of a Slurm job are started by mpiexec: leave --runtime out, or have --runtime mpi")
    if train.json:
        raise ConfigError("--json prints to who started it: leave it out, and ask `workbench show last --json` for the numbers")
    check_train(argv[1:])
    if train.resume:
        checkpoint_of(train.resume)
    return int(train.workers)
