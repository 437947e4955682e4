"""`Slurm`: what a job asks for, in words or as an object, and the batch script that says it."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, final, get_args

from workbench.errors import ConfigError

Starter = Literal["mpiexec", "pmix", "pmi2"]
Place = Literal["here", "job"]
TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")  # minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS
FORM = "'slurm:partition=debug,time=00:30:00,nodes=2,gpus-per-task=1'"
WORDS = {  # of `launcher="slurm:..."`, where they are not a field's own name
    "time": "time_limit",
    "gpus_per_task": "gpus_per_rank",
    "cpus_per_task": "cpus_per_rank",
    "mem": "memory",
}
NUMBERS = ("nodes", "gpus_per_rank", "cpus_per_rank", "warn_s")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A job that a cluster's ranks live in; what is not given is the site's default.

    Args:
        partition, account, qos, constraint: as sbatch knows them.
        time_limit: as sbatch writes it: "30" minutes, "00:30:00", "1-12".
        nodes: how many; the ranks are spread evenly over them.
        gpus_per_rank, cpus_per_rank: how many each rank has.
        memory: of each node, as "16G".
        mpi: how the ranks start inside the job: by the MPI's own mpiexec, or by `srun --mpi=` with Slurm's PMIx or PMI-2.
        controller: where the controller of the ranks lives: "here", beside the notebook, or in the "job", so that a cluster that
            was detached outlives the notebook's machine.
        warn_s: seconds before the time limit at which a training is asked to stop, so that it ends with a checkpoint.
        extra: other words for sbatch: ["--exclusive"].

    Raises:
        ConfigError: a value that cannot be.

    Example:
        Cluster(8, launcher=Slurm(partition="gpu", time_limit="02:00:00", nodes=2, gpus_per_rank=1))
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit: str | None = None
    nodes: int | None = None
    gpus_per_rank: int = 0
    cpus_per_rank: int = 0
    memory: str | None = None
    mpi: Starter = "mpiexec"
    controller: Place = "here"
    warn_s: int = 60
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        extra: Any = self.extra
        if isinstance(extra, str) or not all(isinstance(word, str) and word.startswith("-") for word in extra):
            raise ConfigError(f"extra={extra!r}: a list of sbatch's own options, such as ['--exclusive', '--mail-type=END']")
        object.__setattr__(self, "extra", tuple(extra))
        for name in NUMBERS:
            value, least = getattr(self, name), 1 if name in ("nodes", "warn_s") else 0
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name}={value!r}: a whole number, {least} or more")
        for name, allowed in (("mpi", get_args(Starter)), ("controller", get_args(Place))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: one of {', '.join(map(repr, allowed))}")
        for name in ("partition", "account", "qos", "constraint", "memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip() or any(letter.isspace() for letter in value)):
                raise ConfigError(f"{name}={value!r}: a word without blanks, as sbatch knows it")
        if self.time_limit is not None and not (isinstance(self.time_limit, str) and TIME.fullmatch(self.time_limit)):
            raise ConfigError(f"time_limit={self.time_limit!r}: minutes ('30'), 'HH:MM:SS' or 'D-HH:MM', as sbatch writes it")
        if "\n" in "".join(self.extra):
            raise ConfigError("extra: a line break is not a word for sbatch")

    @classmethod
    def parse(cls, words: str) -> Slurm:
        """What "slurm" or "slurm:partition=debug,time=00:30:00,nodes=2,--exclusive" means.

        Raises:
            ConfigError: no such option; names the nearest.
        """
        kind, _, rest = words.partition(":")
        if kind.strip() != "slurm":
            raise ConfigError(f"launcher={words!r}: write it like {FORM}")
        values: dict[str, Any] = {}
        extra = []
        for pair in filter(None, (part.strip() for part in rest.split(","))):
            if pair.startswith("--"):
                extra.append(pair)
                continue
            name, equals, value = (part.strip() for part in pair.partition("="))
            known = name.replace("-", "_")
            known = WORDS.get(known, known)
            if known not in _names() or not equals or not value:
                raise ConfigError(f"launcher={words!r}: {pair!r} is no option of it{_nearest(name)}; write it like {FORM}")
            if known in values:
                raise ConfigError(f"launcher={words!r}: {name} is given twice")
            values[known] = int(value) if known in NUMBERS and value.isdigit() else value
        return cls(**values, extra=tuple(extra))

    def check(self, num_ranks: int) -> None:
        """Refuse what cannot be placed.

        Raises:
            ConfigError: fewer ranks than nodes, or nothing that is a number of ranks.
        """
        if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
            raise ConfigError(f"{num_ranks!r} ranks: give a whole number, 1 or more")
        if self.nodes is not None and num_ranks < self.nodes:
            raise ConfigError(f"{num_ranks} ranks on {self.nodes} nodes: at least one rank a node; have nodes={num_ranks}, or more ranks")

    def options(self, num_ranks: int) -> list[str]:
        """What sbatch is told of the resources.

        >>> Slurm(partition="gpu", nodes=2, gpus_per_rank=1).options(4)
        ['--partition=gpu', '--nodes=2', '--ntasks=4', '--ntasks-per-node=2', '--gpus-per-task=1']
        """
        self.check(num_ranks)
        asked = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "time": self.time_limit,
            "nodes": self.nodes,
            "ntasks": num_ranks,
            "ntasks-per-node": -(-num_ranks // self.nodes) if self.nodes else None,
            "cpus-per-task": self.cpus_per_rank or None,
            "gpus-per-task": self.gpus_per_rank or None,
            "mem": self.memory,
        }
        return [f"--{name}={value}" for name, value in asked.items() if value is not None] + list(self.extra)

    def script(self, num_ranks: int, *, name: str, output: str, command: Sequence[str], requeue: bool = False) -> str:
        """The batch script of a job that runs `command` once, on its first node.

        Args:
            output: path of the job's output, which its nodes and this machine share.
            requeue: whether Slurm may put the job back into its queue.
        """
        ours = [f"--job-name={name}", f"--output={output}", "--open-mode=append", f"--signal=B:USR1@{self.warn_s}"]
        ours.append("--requeue" if requeue else "--no-requeue")
        lines = [f"#SBATCH {shlex.quote(option)}" for option in [*ours, *self.options(num_ranks)]]
        return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}", ""])

    def start_command(self, num_ranks: int, mpiexec: str, args: Sequence[str]) -> list[str]:
        """What starts that many ranks inside the job, before what they run.

        All GPUs of a node are seen by all its ranks, which take theirs by their number on the node: Slurm would bind what starts the
        ranks of a node, and with it all of them, to the first.
        """
        if self.mpi == "mpiexec":
            return [*WITHOUT_TASK_GPUS, mpiexec, "-n", str(num_ranks), *args]
        cores = [f"--cpus-per-task={self.cpus_per_rank}"] if self.cpus_per_rank else ["--overcommit"]
        return [*WITHOUT_TASK_GPUS, "srun", f"--mpi={self.mpi}", "-n", str(num_ranks), *cores, "--kill-on-bad-exit=1"]


WITHOUT_TASK_GPUS = ("env", "-u", "SLURM_GPUS_PER_TASK", "-u", "SLURM_TRES_PER_TASK", "-u", "SLURM_GPU_BIND")


def _names() -> list[str]:
    return [item.name for item in fields(Slurm) if item.name != "extra"]


def _nearest(name: str) -> str:
    known = [*_names(), *WORDS]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f": did you mean {near[0].replace('_', '-')}=…?" if near else f": there are {', '.join(sorted(known)).replace('_', '-')}"
