"""Makes a launcher from the argument `launcher=`: a name, a network, or a Slurm request."""

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


def needs_mpi(given: str | EmulatedNetwork | Slurm | Launcher) -> bool:
    """Return True if the launcher needs an MPI."""
    return not isinstance(given, Launcher) and given not in ("torch", "processes")


def make_launcher(given: str | EmulatedNetwork | Slurm | Launcher, num_ranks: int, install: MPIInstall | None) -> Launcher:
    """Make the launcher that `launcher=` of a cluster names.

    Args:
        given: the argument.
        num_ranks: number of ranks.
        install: the MPI; None if the launcher needs none.

    Raises:
        ConfigError: there is no such launcher, or it does not have such an option.
        LaunchError: it does not work on this machine.
    """
    if isinstance(given, Launcher):
        return given
    if install is None:
        return ProcessLauncher()
    if isinstance(given, Slurm) or (isinstance(given, str) and given.partition(":")[0].strip() == "slurm"):
        return slurm_launcher(given, install)
    if str(given).partition(":")[0].strip() == "ssh":
        return SSHLauncher(install, parse_hosts(str(given)))
    network = network_of(given, num_ranks)
    if network is None:
        return MPILauncher(install)
    return EmulatedLauncher(install, network, owned=network is not given)
