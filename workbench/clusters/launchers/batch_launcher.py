"""Ranks in a job of PBS, LSF, SGE or HTCondor: `launcher="pbs:queue=gpu,walltime=01:00:00,nodes=2"`."""

from __future__ import annotations

import socket
from functools import cached_property
from typing import final

from workbench.clusters.launchers.job_launcher import JobLauncher
from workbench.clusters.local.mpi_install import MPIInstall, export_arguments
from workbench.clusters.schedulers.job import address_on_route
from workbench.clusters.schedulers.request import BatchJob


@final
class BatchLauncher(JobLauncher):
    """Ranks in a new job of PBS, LSF, SGE or HTCondor, started there by mpiexec on the job's nodes.

    Args:
        install: the MPI, at the same path on the nodes.
        options: the job's resources.
    """

    options: BatchJob

    def __init__(self, install: MPIInstall, options: BatchJob) -> None:
        super().__init__(install, options)
        self.scheduler, self.warn_after_s = options.dialect, options.warn_after_s

    @property
    def queue(self) -> str | None:
        return self.options.queue

    def check_num_ranks(self, num_ranks: int) -> None:
        self.options.check_num_ranks(num_ranks)

    @cached_property
    def address(self) -> str:
        kind = self.options.scheduler
        fix = f"give its address, '{kind}:address=10.0.0.1', or run the controller in the job, '{kind}:controller=job'"
        return self.options.address or address_on_route([socket.gethostname()], fix)

    def start_command(self, num_ranks: int, variables: dict[str, str]) -> list[str]:
        exports = export_arguments(self.install, [*variables, "OMP_NUM_THREADS"])
        return self.options.start_command(num_ranks, self.install, exports)
