"""`Slurm`: the resources of a job, from a text or as an object, and its batch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

from workbench.config import value_of
from workbench.errors import ConfigError
from workbench.naming import did_you_mean

Starter = Literal["mpiexec", "pmix", "pmi2"]
Place = Literal["here", "job"]
# Minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
WARN_S = 60  # seconds between Slurm's warning and the time limit
FORM = "'slurm:partition=debug,time=00:30:00,nodes=2,gpus-per-task=1'"
CLUSTER_ARGUMENTS = {"time": "time_limit", "gpus-per-task": "gpus_per_rank", "gpus-per-rank": "gpus_per_rank"} | {
    name: name for name in ("partition", "account", "nodes", "mpi", "controller")
}
SBATCH = (  # options of sbatch that the text may contain
    *(
        "qos",
        "constraint",
        "mem",
        "mem-per-cpu",
        "cpus-per-task",
        "gres",
        "gpus-per-node",
        "reservation",
        "nodelist",
        "exclude",
    ),
    *("licenses", "comment", "mail-type", "mail-user", "begin", "nice", "signal", "tmp"),
)
NUMBERS = ("nodes", "gpus_per_rank")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A job for a cluster's ranks. Options that are not given have the defaults of `workbench config`, or the site's.

    One minute before the time limit, the training is asked to stop, so that it ends with a checkpoint.
    extra=["--signal=B:USR1@300"] makes it five minutes. There is no warning in a job that existed before (`salloc`):
    `stop()` a training in time.

    Args:
        partition, account: as for sbatch.
        time_limit: in sbatch's forms: "30" minutes, "00:30:00", "1-12".
        nodes: number of nodes; the ranks are spread evenly over them.
        gpus_per_rank: number of GPUs of each rank. None: no GPU, with a warning if the ranks seem to need some. 0: no
            GPU.
        mpi: how the ranks start inside the job: "mpiexec", the MPI's own, or "pmix" or "pmi2", `srun --mpi=`.
        controller: where the controller of the ranks runs. "here": on the notebook's machine. "job": in the job;
            then a detached cluster outlives the notebook's machine.
        extra: other options of sbatch: ["--qos=high", "--constraint=a100", "--exclusive"].

    Raises:
        ConfigError: a value is not valid.

    Example:
        Cluster(8, launcher=Slurm(partition="gpu", time_limit="02:00:00", nodes=2, gpus_per_rank=1))
    """

    partition: str | None = None
    account: str | None = None
    time_limit: str | None = None
    nodes: int | None = None
    gpus_per_rank: int | None = None
    mpi: Starter = "mpiexec"
    controller: Place = "here"
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        extra: Any = self.extra
        if isinstance(extra, str) or not all(isinstance(word, str) and word.startswith("-") for word in extra):
            raise ConfigError(
                f"extra={extra!r}: give a list of options of sbatch, such as ['--exclusive', '--qos=high']"
            )
        object.__setattr__(self, "extra", tuple(extra))
        for name in NUMBERS:
            value, least = getattr(self, name), 1 if name == "nodes" else 0
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name}={value!r}: give a whole number, {least} or more")
        for name, allowed in (("mpi", get_args(Starter)), ("controller", get_args(Place))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give one of {', '.join(map(repr, allowed))}")
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, str) or not value or any(letter.isspace() for letter in value)
            ):
                raise ConfigError(f"{name}={value!r}: give sbatch's name, without blanks")
        if self.time_limit is not None and not (isinstance(self.time_limit, str) and TIME.fullmatch(self.time_limit)):
            raise ConfigError(
                f"time_limit={self.time_limit!r}: give minutes ('30'), 'HH:MM:SS' or 'D-HH:MM', as sbatch writes it"
            )
        if "\n" in "".join(self.extra):
            raise ConfigError("extra: an option of sbatch cannot contain a line break")

    @classmethod
    def parse(cls, text: str) -> Slurm:
        """Parse "slurm" or "slurm:partition=debug,time=00:30:00,nodes=2,--exclusive".

        Raises:
            ConfigError: there is no such option; the message names the nearest one.
        """
        kind, _, rest = text.partition(":")
        if kind.strip() != "slurm":
            raise ConfigError(f"launcher={text!r}: write it like {FORM}")
        values: dict[str, Any] = {}
        extra: list[str] = []
        given: set[str] = set()
        for pair in filter(None, (part.strip() for part in rest.split(","))):
            if pair.startswith("--"):
                extra.append(pair)
                continue
            name, equals, value = (part.strip() for part in pair.partition("="))
            name = name.replace("_", "-")
            if name not in (*CLUSTER_ARGUMENTS, *SBATCH) or not equals or not value:
                raise ConfigError(
                    f"launcher={text!r}: {pair!r} is no option of it{_nearest(name)}; write it like {FORM}"
                )
            if CLUSTER_ARGUMENTS.get(name, name) in given:
                raise ConfigError(f"launcher={text!r}: {name} is given twice")
            given.add(CLUSTER_ARGUMENTS.get(name, name))
            if name in SBATCH:
                extra.append(f"--{name}={value}")
            else:
                values[CLUSTER_ARGUMENTS[name]] = (
                    int(value) if CLUSTER_ARGUMENTS[name] in NUMBERS and value.isdigit() else value
                )
        return cls(**values, extra=tuple(extra))

    def check_num_ranks(self, num_ranks: int) -> None:
        """Check a number of ranks.

        Raises:
            ConfigError: it is not a whole number, or there are fewer ranks than nodes.
        """
        if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
            raise ConfigError(f"{num_ranks!r} ranks: give a whole number, 1 or more")
        if self.nodes is not None and num_ranks < self.nodes:
            raise ConfigError(
                f"{num_ranks} ranks on {self.nodes} nodes: each node needs a rank; set nodes={num_ranks}, or use more "
                "ranks"
            )

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds; None if the partition's holds.

        >>> [Slurm(time_limit=text).time_limit_s for text in ("30", "01:30", "02:00:00", "1-12", "1-12:30")]
        [1800, 90, 7200, 129600, 131400]
        """
        if self.time_limit is None:
            return None
        days, dash, rest = self.time_limit.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        hours, minutes, seconds = (*parts, 0, 0)[:3] if dash or len(parts) == 3 else (0, *parts, 0)[:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    def options(self, num_ranks: int) -> list[str]:
        """Return sbatch's options for the resources.

        >>> Slurm(partition="gpu", nodes=2, gpus_per_rank=1).options(4)
        ['--partition=gpu', '--nodes=2', '--ntasks=4', '--ntasks-per-node=2', '--gpus-per-task=1']
        """
        self.check_num_ranks(num_ranks)
        resources = {
            "partition": self.partition or value_of("slurm.partition"),
            "account": self.account or value_of("slurm.account"),
            "time": self.time_limit,
            "nodes": self.nodes,
            "ntasks": num_ranks,
            "ntasks-per-node": -(-num_ranks // self.nodes) if self.nodes else None,
            "gpus-per-task": self.gpus_per_rank or None,
        }
        return [f"--{name}={value}" for name, value in resources.items() if value is not None] + list(self.extra)

    def script(self, num_ranks: int, *, name: str, output: str, command: Sequence[str], requeue: bool = False) -> str:
        """Return the batch script of a job that runs `command` once, on its first node.

        Args:
            num_ranks: number of ranks.
            name: name of the job.
            output: path of the job's output, which its nodes and this machine share.
            command: the command line.
            requeue: whether Slurm may put the job back into its queue.
        """
        common = [f"--job-name={name}", f"--output={output}", "--open-mode=append"]
        if not any(option.startswith("--signal") for option in self.extra):
            common.append(f"--signal=B:USR1@{WARN_S}")
        common.append("--requeue" if requeue else "--no-requeue")
        lines = [f"#SBATCH {shlex.quote(option)}" for option in [*common, *self.options(num_ranks)]]
        return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}", ""])

    def start_command(self, num_ranks: int, mpiexec: str, args: Sequence[str]) -> list[str]:
        """Return the beginning of the command that starts ranks inside the job; the ranks' own command follows.

        Every rank sees all GPUs of its node and selects one by its local rank. Slurm's own binding would give all
        ranks of a node the first GPU, because one process starts them.
        """
        if self.mpi == "mpiexec":
            return [*WITHOUT_TASK_GPUS, mpiexec, "-n", str(num_ranks), *args]
        return [*WITHOUT_TASK_GPUS, "srun", f"--mpi={self.mpi}", "-n", str(num_ranks), "--kill-on-bad-exit=1"]

    def srun_command(self, num_ranks: int, argv: Sequence[str], *, outlives: bool = False) -> list[str]:
        """Return the command that runs `argv` in the job as each rank of torch.distributed.

        Each rank has RANK, WORLD_SIZE and LOCAL_RANK, and sees all GPUs of its node. It ignores SIGUSR1 at first, so
        that Slurm's warning only reaches a program that handles it.

        Args:
            num_ranks: number of ranks.
            argv: command line of each rank.
            outlives: whether the other ranks continue when one fails.
        """
        end = f"--kill-on-bad-exit={0 if outlives else 1}"
        return [*WITHOUT_TASK_GPUS, "srun", "--export=ALL", "-n", str(num_ranks), end, *AS_RANK, *argv]


WITHOUT_TASK_GPUS = ("env", "-u", "SLURM_GPUS_PER_TASK", "-u", "SLURM_TRES_PER_TASK", "-u", "SLURM_GPU_BIND")
RANK_VARIABLES = "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
AS_RANK = ("sh", "-c", f"trap '' USR1; export {RANK_VARIABLES}; exec \"$@\"", "sh")


def _nearest(name: str) -> str:
    known = [*CLUSTER_ARGUMENTS, *SBATCH]
    if meant := did_you_mean(name, known, cutoff=0.6):
        return f": {meant.strip()}"
    return f": there are {', '.join(sorted(known))}, and --NAME for any other option of sbatch"
