"""Ranks under Slurm: a new job, or a step of the job that this process runs in."""

from __future__ import annotations

import os
import warnings
from functools import cached_property
from pathlib import Path
from typing import final

from traitlets.config import Config

from workbench.clusters.launchers.base import LOOPBACK, Launcher
from workbench.clusters.launchers.job_launcher import JobLauncher
from workbench.clusters.launchers.mpi import MPILauncher
from workbench.clusters.local.mpi_install import MPIInstall, rank_environment
from workbench.clusters.slurm import batch_job
from workbench.clusters.slurm.gpus import gpu_warning
from workbench.clusters.slurm.queue import Allocation, SlurmQueue, address_for_nodes, run_slurm
from workbench.clusters.slurm.request import Slurm
from workbench.errors import ConfigError

SETTLED = ("partition", "account", "time_limit", "gpus_per_rank", "extra")  # options that a running job has fixed


@final
class SlurmLauncher(JobLauncher):
    """Ranks in a new Slurm job, started there by mpiexec or srun. The controller runs here or in the job.

    Args:
        install: the MPI, at the same path on the nodes.
        options: the job's resources.
    """

    options: Slurm
    scheduler = SlurmQueue()

    @property
    def queue(self) -> str | None:
        return self.options.partition

    def check_num_ranks(self, num_ranks: int) -> None:
        self.options.check_num_ranks(num_ranks)
        run_slurm("sbatch", "--version")

    @cached_property
    def address(self) -> str:
        return address_for_nodes()

    def start_command(self, num_ranks: int, variables: dict[str, str]) -> list[str]:
        return self.options.start_command(num_ranks, self.install.mpiexec, self.install.args)


@final
class StepLauncher(MPILauncher):
    """Ranks as a step of the job that this process runs in.

    Args:
        install: the MPI.
        options: how the ranks start.
        allocation: the job.
    """

    is_here = False

    def __init__(self, install: MPIInstall, options: Slurm, allocation: Allocation) -> None:
        super().__init__(install)
        self.options, self.allocation = options, allocation

    @property
    def title(self) -> str:
        return f"Slurm's job {self.allocation.job}, {self.install}"

    def check_num_ranks(self, num_ranks: int) -> None:
        self.options.check_num_ranks(num_ranks)
        settled = [name for name in SETTLED if getattr(self.options, name)]
        settled += ["nodes"] if self.options.nodes not in (None, len(self.allocation.nodes)) else []
        settled += ["controller"] if self.options.controller == "job" else []
        if settled:
            raise ConfigError(
                f"this process is in Slurm's job {self.allocation.job}, and ranks start in it. A running job cannot "
                "change "
                f"{', '.join(settled)}: leave out (launcher='slurm'), or start outside of a job"
            )
        most = max(self.allocation.num_ranks, sum(self.allocation.nodes))
        if num_ranks > most:
            raise ConfigError(
                f"{num_ranks} ranks in Slurm's job {self.allocation.job}, which has {len(self.allocation.nodes)} nodes "
                "with "
                f"{sum(self.allocation.nodes)} CPUs: start at most {most}, or request more with `salloc "
                f"--ntasks={num_ranks}`"
            )

    def controller_ip(self) -> str:
        return LOOPBACK if len(self.allocation.nodes) == 1 and self._on_node else self.address

    @property
    def _on_node(self) -> bool:
        """Return True if this process runs on a node of the job, and not on the machine that called salloc."""
        return "SLURMD_NODENAME" in os.environ or "SLURM_NODEID" in os.environ

    @cached_property
    def address(self) -> str:
        return address_for_nodes()

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        command = self.options.start_command(num_ranks, self.install.mpiexec, self.install.args)
        if self.options.mpi != "mpiexec":
            command = [*command, "--overlap"]  # an interactive shell is a step that occupies the whole job
            command += ["--overcommit"] if num_ranks > self.allocation.num_ranks else []
        place = command.index("-n")
        config.MPIEngineSetLauncher.mpi_cmd = command[:place]
        config.MPIEngineSetLauncher.mpi_args = command[place + 2 :]
        ranks = rank_environment(self.install, num_ranks)
        config.MPIEngineSetLauncher.environment = {**environment, **ranks, **batch_job.for_steps(os.environ, command)}


def slurm_launcher(given: str | Slurm, install: MPIInstall) -> Launcher:
    """Make the launcher for `launcher="slurm:..."`: a new job, or a step of the job that this process runs in.

    Raises:
        ConfigError: there is no such option.
    """
    options = given if isinstance(given, Slurm) else Slurm.parse(given)
    allocation = Allocation.here()
    if allocation is not None:
        return StepLauncher(install, options, allocation)
    if warning := gpu_warning(options, "gpus-per-task="):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return SlurmLauncher(install, options)
