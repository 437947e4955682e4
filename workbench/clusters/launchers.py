"""How a cluster's engines come up: what `launcher=` means."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import psutil
from traitlets.config import Config

from workbench.clusters.emulated import EmulatedNetwork, Placement
from workbench.clusters.emulated.launcher import network_of
from workbench.clusters.emulated.relay import Relay
from workbench.clusters.mpi_install import MPIInstall, rank_environment
from workbench.clusters.slurm import Slurm

LOOPBACK = "127.0.0.1"


class Launcher(ABC):
    """Starts a number of engines, ranks of one world, whose controller ipyparallel starts on this machine.

    A controller that listens beyond loopback is encrypted. What a method does not say is that of engines on this machine.
    """

    engine_set: str | type = "mpi"  # ipyparallel's launcher of the engines
    controller: str | type = "local"  # and of the controller
    is_mpi = True  # whether the engines are ranks of one MPI world
    starts_at_once = False  # whether engines may start before the controller listens: they find its address in the cluster's folder
    is_here = True  # whether they are on this machine, whose cores then limit their number
    oversubscribe = True  # whether they may outnumber them, as the cluster was asked for: also when it is scaled

    @property
    @abstractmethod
    def title(self) -> str:
        """What starts the ranks, as messages call it: "Open MPI 5.0.11"."""

    @property
    def starter(self) -> str:
        """The command that starts them, for the words of a failure."""
        return self.title

    @property
    def reachable(self) -> bool:
        """Whether a cluster that was detached can be taken up, and ended, on other machines: no process of it is tied to this one."""
        return not isinstance(self.controller, str)  # one in a job, which knows itself where that is

    def check(self, num_ranks: int) -> None:  # noqa: B027 - nothing to do for most
        """Refuse what cannot be started, before anything is.

        Raises:
            ConfigError, LaunchError: says why, and what to do.
        """

    def controller_ip(self) -> str:
        """Where the controller listens."""
        return LOOPBACK

    @abstractmethod
    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        """Tell ipyparallel how to start the engines.

        Args:
            environment: what every process of the cluster must have in its environment: the cluster's mark among them.
            folder: the cluster's own, which ends with it.
        """

    async def controller_is_up(self, info: dict[str, Any]) -> None:  # noqa: B027 - nothing to do for most
        """The controller listens as its connection file, the engines' part of it, says; no engine was started yet."""

    def waits(self, engine_set: Any) -> str | None:
        """Why the engines have not begun to start, such as a job's place in a queue: time that does not count. None: they have."""
        return None

    def alive(self, engine_set: Any) -> bool:
        """Whether the engines can still be there."""
        return engine_set is not None and engine_set.state == "running" and runs(engine_set.process)

    def last_words(self, engine_set: Any) -> str:
        """All that the engines' starter wrote so far."""
        return written(engine_set)

    def why_not_detach(self) -> str | None:
        """Why the engines cannot outlive this process; None: they can."""
        return None

    def pid_here(self, pid: int) -> int:
        """A rank's process, by the number it goes by on this machine."""
        return pid

    async def close(self) -> None:  # noqa: B027 - nothing to do for most
        """After engines and controller were stopped, in their event loop."""

    def clear(self) -> None:  # noqa: B027 - nothing to do for most
        """What must be done even when a stop is interrupted; once is enough, more does no harm."""


class MPILauncher(Launcher):
    """Ranks of this machine, started by mpiexec."""

    starts_at_once = True
    emulated = False

    def __init__(self, install: MPIInstall) -> None:
        self.install = install

    @property
    def title(self) -> str:
        return str(self.install)

    @property
    def starter(self) -> str:
        return self.install.mpiexec

    def check(self, num_ranks: int) -> None:
        here = Placement.here()
        if here is not None:
            here.check(num_ranks)

    def controller_ip(self) -> str:
        return socket.gethostbyname(socket.gethostname()) if Placement.here() else LOOPBACK

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        config.MPIEngineSetLauncher.mpi_cmd = [self.install.mpiexec]
        config.MPIEngineSetLauncher.mpi_args = list(self.install.args)
        ranks = rank_environment(self.install, num_ranks, emulated=self.emulated or Placement.here() is not None)
        config.MPIEngineSetLauncher.environment = {**environment, **ranks}


@final
class EmulatedLauncher(MPILauncher):
    """Ranks on hosts of an emulated network, started by mpiexec on its first host; the controller stays outside.

    Args:
        owned: whether the network ends with the cluster.
    """

    starts_at_once = False
    emulated = True

    def __init__(self, install: MPIInstall, network: EmulatedNetwork, *, owned: bool) -> None:
        super().__init__(install)
        self.network, self._owned = network, owned
        self._relay = Relay()

    def check(self, num_ranks: int) -> None:
        self.network.placement.check(num_ranks)

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        super().configure(config, num_ranks, environment | self.network.environment, folder)
        config.MPIEngineSetLauncher.mpi_cmd = [*self.network.command(0, []), self.install.mpiexec]

    async def controller_is_up(self, info: dict[str, Any]) -> None:
        await self._relay.start(self.network, _ports(info))

    def pid_here(self, pid: int) -> int:
        return self.network.pid_here(pid) or pid

    async def close(self) -> None:
        await self._relay.close()

    def why_not_detach(self) -> str | None:
        return "an emulated network ends with the process that made it"

    def clear(self) -> None:
        if self._owned:
            self.network.close()


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
        from workbench.clusters.processes import ProcessLauncher

        return ProcessLauncher()
    if isinstance(words, Slurm) or (isinstance(words, str) and words.partition(":")[0].strip() == "slurm"):
        from workbench.clusters.slurm_launcher import slurm_launcher

        return slurm_launcher(words, install)
    if str(words).partition(":")[0].strip() == "ssh":
        from workbench.clusters.ssh import SSHLauncher, parse_hosts

        return SSHLauncher(install, parse_hosts(str(words)))
    network = network_of(words, num_ranks)
    return MPILauncher(install) if network is None else EmulatedLauncher(install, network, owned=network is not words)


def runs(process: Any) -> bool:
    """Whether a process (of psutil) is there and has not ended: nobody may collect one whose parent is gone."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def ended_here(who: dict[str, Any]) -> bool:
    """Whether a rank was a process of this machine and is none any more."""
    if who["host"] != socket.gethostname():
        return False
    try:
        return not runs(psutil.Process(who["pid"]))
    except psutil.Error:
        return True


def written(launcher: Any) -> str:
    """What a launcher of ipyparallel has logged so far, which it would read but once; removed when the process has ended."""
    path = Path(getattr(launcher, "output_file", "") or "")
    with contextlib.suppress(OSError):  # there is none, or none any more
        return path.read_text(errors="replace")
    return str(launcher.get_output() or "") if launcher is not None else ""


def _ports(info: dict[str, Any]) -> list[int]:
    """Where the controller listens for engines, as its connection file tells."""
    return [port for value in info.values() for port in (value if isinstance(value, list) else [value]) if type(port) is int]
