"""Resolves a cluster's arguments to a launcher and a runtime, and writes its messages about lost ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.jobs import checkpoints
from workbench.clusters.launchers.base import Launcher
from workbench.clusters.launchers.choose import make_launcher, needs_mpi
from workbench.clusters.local.mpi_install import MPIInstall, check_num_ranks, find_mpi
from workbench.clusters.slurm.request import Slurm
from workbench.clusters.supervision.start_progress import count
from workbench.errors import ConfigError

RuntimeName = Literal["mpi", "torch"]
Where = str | EmulatedNetwork | Slurm | Launcher


def choose_launcher(given: Where, n: int, mpi: str | Path | MPIInstall | None, *, oversubscribe: bool) -> Launcher:
    """Return the launcher that starts `n` ranks.

    Raises:
        ConfigError: there is no such launcher, or it has no place for `n` ranks.
        LaunchError: the launcher does not work on this machine.
    """
    check_num_ranks(n, here=False)
    install = None
    if needs_mpi(given):
        install = mpi if isinstance(mpi, MPIInstall) else find_mpi(mpi, oversubscribe=oversubscribe)
    launcher = make_launcher(given, n, install)
    launcher.oversubscribe = oversubscribe
    check_places(launcher, n)
    return launcher


def check_places(launcher: Launcher, n: int) -> None:
    """Check that a launcher has places for `n` ranks.

    Raises:
        ConfigError: it has fewer places; the message says how to get more.
    """
    check_num_ranks(n, oversubscribe=launcher.oversubscribe, here=launcher.is_here)
    launcher.check(n)


def choose_runtime(given: str | None, launcher: Launcher) -> RuntimeName:
    """Return the library that carries the bytes of trainings.

    Raises:
        ConfigError: there is no such runtime, or it is MPI and the ranks start without MPI.
    """
    names = get_args(RuntimeName)
    if given is not None and given not in names:
        raise ConfigError(f"runtime={given!r}: a cluster's ranks run on {' or '.join(map(repr, names))}")
    if given == "mpi" and not launcher.is_mpi:
        raise ConfigError(f"runtime='mpi': {launcher.title} start without MPI: use runtime='torch', or launcher='local'")
    return "torch" if given == "torch" or not launcher.is_mpi else "mpi"


def no_client_message(state: str, name: str) -> str:
    """Return the message for a cluster without a client: why, and what to do."""
    if state == "detached":
        return f"this cluster was detached: wb.attach({name!r}) attaches to it"
    return "this cluster was stopped: start a new Cluster"


def lost_message(gone: list[int], run: Path | None, num_ranks: int) -> str:
    """Return the message that says what is lost when all ranks restart."""
    plural = "s" if len(gone) != 1 else ""
    why = f"rank{plural} {', '.join(map(str, gone))} had ended" if gone else "ranks did not return"
    message = f"{why}: {count(num_ranks)} were restarted, and the contents of their memory are lost."
    if run is None:
        return message
    if checkpoints(run) == num_ranks:
        return f"{message} train(..., resume={run.name!r}) continues {run.name} from its checkpoint"
    return f"{message} {run.name} has no checkpoint: its metrics are kept, its parameters are lost"
