"""Ranks in one MPI world on several hosts, which this machine reaches by ssh: `launcher="ssh:hostA:2,hostB:2"`.

mpiexec logs in to each host. So ssh must work without a password, and this interpreter and its packages must be
at the same path there. The controller stays on this machine. It is encrypted and listens where the hosts reach
it. All hosts must see the folder of runs.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import final

from traitlets.config import Config

from workbench.clusters.launchers.base import LOOPBACK
from workbench.clusters.launchers.mpi import MPILauncher
from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall, export_arguments, rank_environment
from workbench.errors import ConfigError, LaunchError

FORM = "'ssh:hostA:2,hostB:2', each host with its number of ranks"
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FROM_IPYPARALLEL = ("IPP_CLUSTER_ID", "IPP_PROFILE_DIR", "IPP_CONNECTION_INFO")


def parse_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Return the hosts, and the number of ranks on each.

    >>> parse_hosts("ssh:hostA:2,hostB")
    (('hostA', 2), ('hostB', 1))

    Raises:
        ConfigError: the text does not have this form.
    """
    hosts = []
    for item in text.partition(":")[2].split(","):
        name, colon, number = item.strip().partition(":")
        if not HOST.fullmatch(name) or (colon and not (number.isdigit() and int(number) > 0)):
            raise ConfigError(f"launcher={text!r}: {item!r} is no host; write it like {FORM}")
        hosts.append((name, int(number or 1)))
    if len({name for name, _ in hosts}) != len(hosts):
        raise ConfigError(f"launcher={text!r}: a host is named twice; write it like {FORM}")
    return tuple(hosts)


@final
class SSHLauncher(MPILauncher):
    """Starts ranks by mpiexec over ssh.

    Args:
        install: the MPI, at the same path on all hosts.
        hosts: (name, number of ranks) of each host, in the order in which ranks fill them.
    """

    is_here = starts_at_once = False

    def __init__(self, install: MPIInstall, hosts: tuple[tuple[str, int], ...]) -> None:
        super().__init__(install)
        self.hosts = hosts

    @property
    def title(self) -> str:
        return f"{self.install} over ssh on {', '.join(name for name, _ in self.hosts)}"

    def check_num_ranks(self, num_ranks: int) -> None:
        places = sum(number for _, number in self.hosts)
        if num_ranks > places:
            raise ConfigError(f"{num_ranks} ranks on hosts with places for {places}: give a host more places, {FORM}")

    def controller_ip(self) -> str:
        """Return this machine's address on the route to the first host that is another machine."""
        address = LOOPBACK
        for name, _ in self.hosts:
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((name, 9))  # nothing is sent: the kernel looks up the route
                    address = str(probe.getsockname()[0])
            except OSError as error:
                raise LaunchError(
                    f"no route to host {name!r} ({error}): is the name right, and does `ssh {name} true` work?"
                ) from None
            if not address.startswith("127.") and name not in (socket.gethostname(), address):
                return address
        return address

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        super().configure(config, num_ranks, environment, folder)
        most = min(num_ranks, max(number for _, number in self.hosts))
        variables = {**environment, **rank_environment(self.install, most)}
        config.MPIEngineSetLauncher.environment = variables
        names = ",".join(f"{name}:{number}" for name, number in self.hosts)
        if self.install.name != OPEN_MPI:
            config.MPIEngineSetLauncher.mpi_args = ["-hosts", names]  # this mpiexec exports its whole environment
            return
        exports = export_arguments(self.install, [*variables, *FROM_IPYPARALLEL])
        placement = ["--host", names, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        config.MPIEngineSetLauncher.mpi_args = [*placement, *exports]
