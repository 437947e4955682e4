"""What `launcher=` means: a launcher by its name, network or Slurm request."""

from __future__ import annotations

from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.emulated.launcher import network_of
from workbench.clusters.launchers.base import Launcher
from workbench.clusters.launchers.mpi import EmulatedLauncher, MPILauncher
from workbench.clusters.launchers.processes import ProcessLauncher
from workbench.clusters.launchers.slurm_launcher import slurm_launcher
from workbench.clusters.launchers.ssh import SSHLauncher, parse_hosts
from workbench.clusters.local.mpi_install import MPIInstall
from workbench.clusters.slurm.request import Slurm


def needs_mpi(words: str | EmulatedNetwork | Slurm | Launcher) -> bool:
    """Whether that launcher has to be given an MPI."""
    return not isinstance(words, Launcher) and words not in ("torch", "processes")


def make_launcher(words: str | EmulatedNetwork | Slurm | Launcher, num_ranks: int, install: MPIInstall | None) -> Launcher:
    """What `launcher=` of a cluster means; `install` is there for what needs an MPI.

    Raises:
        ConfigError: no such launcher, or an option that it does not have.
        LaunchError: it cannot be had on this machine.
    """
    if isinstance(words, Launcher):
        return words
    if install is None:
        return ProcessLauncher()
    if isinstance(words, Slurm) or (isinstance(words, str) and words.partition(":")[0].strip() == "slurm"):
        return slurm_launcher(words, install)
    if str(words).partition(":")[0].strip() == "ssh":
        return SSHLauncher(install, parse_hosts(str(words)))
    network = network_of(words, num_ranks)
    return MPILauncher(install) if network is None else EmulatedLauncher(install, network, owned=network is not words)
