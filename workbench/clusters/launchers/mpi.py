"""Engines started by mpiexec: on this machine, or on the hosts of an emulated network."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, final

from traitlets.config import Config

from workbench.clusters.emulated import EmulatedNetwork, Placement
from workbench.clusters.emulated.relay import Relay
from workbench.clusters.launchers.base import LIBRARIES, LOOPBACK, Launcher
from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall, rank_environment
from workbench.runtimes.liveness.membership import FAULT_TOLERANT


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

    def check_num_ranks(self, num_ranks: int) -> None:
        here = Placement.here()
        if here is not None:
            here.check_num_ranks(num_ranks)

    def controller_ip(self) -> str:
        return socket.gethostbyname(socket.gethostname()) if Placement.here() else LOOPBACK

    @property
    def forks_engines(self) -> bool:  # type: ignore[override]  # a constant for most
        """MPICH names ranks by process, and would name what stands for them."""
        return self.is_here and not self.emulated and Placement.here() is None and self.install.name == OPEN_MPI

    @property
    def outlives(self) -> bool:
        """Return True if the other ranks remain when one is killed. An emulated network is measured without it."""
        return self.install.tolerates_loss and not self.emulated

    def variables(self, num_ranks: int) -> dict[str, str]:
        return rank_environment(self.install, num_ranks, emulated=self.emulated or Placement.here() is not None)

    def server_variables(self, num_ranks: int) -> dict[str, str]:
        """mpiexec puts its own libraries first."""
        folders = [str(Path(self.install.mpiexec).parent.parent / "lib"), os.environ.get(LIBRARIES, "")]
        return {**self.variables(num_ranks), LIBRARIES: os.pathsep.join(filter(None, folders))}

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        config.MPIEngineSetLauncher.mpi_cmd = [self.install.mpiexec]
        config.MPIEngineSetLauncher.mpi_args = [*self.install.args, *(FAULT_TOLERANT if self.outlives else ())]
        config.MPIEngineSetLauncher.environment = {**environment, **self.variables(num_ranks)}


@final
class EmulatedLauncher(MPILauncher):
    """Ranks on hosts of an emulated network, started by mpiexec on its first host. The controller stays outside.

    Args:
        owned: whether the network ends with the cluster.
    """

    starts_at_once = False
    emulated = True

    def __init__(self, install: MPIInstall, network: EmulatedNetwork, *, owned: bool) -> None:
        super().__init__(install)
        self.network, self._owned = network, owned
        self._relay = Relay()

    def check_num_ranks(self, num_ranks: int) -> None:
        self.network.placement.check_num_ranks(num_ranks)

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


def _ports(info: dict[str, Any]) -> list[int]:
    """The controller's ports for engines, from its connection file."""
    return [
        port for value in info.values() for port in (value if isinstance(value, list) else [value]) if type(port) is int
    ]
