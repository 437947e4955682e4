"""What a cluster's arguments come to, and its words for what became of it."""

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


def choose_launcher(words: Where, n: int, mpi: str | Path | MPIInstall | None, *, oversubscribe: bool) -> Launcher:
    """What starts so many ranks.

    Raises:
        ConfigError: no such launcher, or not so many ranks.
        LaunchError: it cannot be had here.
    """
    check_num_ranks(n, here=False)
    install = None
    if needs_mpi(words):
        install = mpi if isinstance(mpi, MPIInstall) else find_mpi(mpi, oversubscribe=oversubscribe)
    launcher = make_launcher(words, n, install)
    launcher.oversubscribe = oversubscribe
    check_places(launcher, n)
    return launcher


def check_places(launcher: Launcher, n: int) -> None:
    """Refuse a number of ranks that a launcher has no places for.

    Raises:
        ConfigError: says how to have more.
    """
    check_num_ranks(n, oversubscribe=launcher.oversubscribe, here=launcher.is_here)
    launcher.check(n)


def choose_runtime(given: str | None, launcher: Launcher) -> RuntimeName:
    """The library that carries the bytes of trainings.

    Raises:
        ConfigError: no such runtime, or MPI where the ranks have none.
    """
    names = get_args(RuntimeName)
    if given is not None and given not in names:
        raise ConfigError(f"runtime={given!r}: a cluster's ranks run on {' or '.join(map(repr, names))}")
    if given == "mpi" and not launcher.is_mpi:
        raise ConfigError(f"runtime='mpi': {launcher.title} start without MPI: use runtime='torch', or launcher='local'")
    return "torch" if given == "torch" or not launcher.is_mpi else "mpi"


def gone_words(state: str, name: str) -> str:
    """Why there is no client, and what to do."""
    if state == "detached":
        return f"this cluster was detached: wb.attach({name!r}) takes it up again"
    return "this cluster was stopped: start a new Cluster"


def lost_words(gone: list[int], run: Path | None, num_ranks: int) -> str:
    """What is lost when all ranks start anew."""
    why = f"rank{'s' * (len(gone) != 1)} {', '.join(map(str, gone))} had gone" if gone else "ranks did not come back"
    words = f"{why}: {count(num_ranks)} started anew, and what all of them held in memory is lost."
    if run is None:
        return words
    if checkpoints(run) == num_ranks:
        return f"{words} {run.name} goes on from its checkpoint with train(..., resume={run.name!r})"
    return f"{words} {run.name} kept no checkpoint: its metrics are there, its parameters are lost"
