"""Resolves a cluster's arguments `launcher=`, `mpi=` and `runtime=` to a launcher and a library."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.emulated.launcher import network_of
from workbench.clusters.launchers.base import Launcher
from workbench.clusters.launchers.batch_launcher import BatchLauncher
from workbench.clusters.launchers.mpi import EmulatedLauncher, MPILauncher
from workbench.clusters.launchers.processes import ProcessLauncher
from workbench.clusters.launchers.slurm_launcher import slurm_launcher
from workbench.clusters.launchers.ssh import SSHLauncher, parse_hosts
from workbench.clusters.local.mpi_install import MPIInstall, check_num_ranks, find_mpi
from workbench.clusters.schedulers.dialects import DIALECTS
from workbench.clusters.schedulers.request import BatchJob
from workbench.clusters.slurm.request import Slurm
from workbench.errors import ConfigError

RuntimeName = Literal["mpi", "torch"]
Where = str | EmulatedNetwork | Slurm | BatchJob | Launcher


def choose_launcher(given: Where, n: int, mpi: str | Path | MPIInstall | None, *, oversubscribe: bool) -> Launcher:
    """Return the launcher that starts `n` ranks.

    Raises:
        ConfigError: there is no such launcher, or it has no place for `n` ranks.
        LaunchError: the launcher does not work on this machine.
    """
    check_num_ranks(n, here=False)
    install = None
    if _needs_mpi(given):
        install = mpi if isinstance(mpi, MPIInstall) else find_mpi(mpi, oversubscribe=oversubscribe)
    launcher = _make_launcher(given, n, install)
    launcher.oversubscribe = oversubscribe
    check_places(launcher, n)
    return launcher


def check_places(launcher: Launcher, n: int) -> None:
    """Check that a launcher has places for `n` ranks.

    Raises:
        ConfigError: it has fewer places; the message says how to get more.
    """
    check_num_ranks(n, oversubscribe=launcher.oversubscribe, here=launcher.is_here, by_mpiexec=launcher.is_mpi)
    launcher.check_num_ranks(n)


def choose_runtime(given: str | None, launcher: Launcher) -> RuntimeName:
    """Return the library that carries the bytes of trainings.

    Raises:
        ConfigError: there is no such runtime, or it is MPI and the ranks start without MPI.
    """
    names = get_args(RuntimeName)
    if given is not None and given not in names:
        raise ConfigError(f"runtime={given!r}: a cluster's ranks run on {' or '.join(map(repr, names))}")
    if given == "mpi" and not launcher.is_mpi:
        raise ConfigError(
            f"runtime='mpi': {launcher.title} start without MPI: use runtime='torch', or launcher='local'"
        )
    return "torch" if given == "torch" or not launcher.is_mpi else "mpi"


def _needs_mpi(given: Where) -> bool:
    """Return True if the launcher needs an MPI."""
    return not isinstance(given, Launcher) and given not in ("torch", "processes")


def _make_launcher(given: Where, num_ranks: int, install: MPIInstall | None) -> Launcher:
    """Return the launcher that `launcher=` names; `install` is None if the launcher needs no MPI."""
    if isinstance(given, Launcher):
        return given
    if install is None:
        return ProcessLauncher()
    if isinstance(given, str):
        kind = given.partition(":")[0].strip()
        if kind == "ssh":
            return SSHLauncher(install, parse_hosts(given))
        if kind == "slurm":
            return slurm_launcher(given, install)
        if kind in DIALECTS:
            given = BatchJob.parse(given)
    if isinstance(given, Slurm):
        return slurm_launcher(given, install)
    if isinstance(given, BatchJob):
        return BatchLauncher(install, given)
    network = network_of(given, num_ranks)
    if network is None:
        return MPILauncher(install)
    return EmulatedLauncher(install, network, owned=network is not given)
