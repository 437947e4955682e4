"""Ranks on several hosts that this one reaches by ssh, in one MPI world: `launcher="ssh:hostA:2,hostB:2"`.

mpiexec logs in to each host, so that must work without a password, with this interpreter and its packages at the same
path. The controller stays here and listens where the hosts reach it, encrypted. Runs are written to a folder that all
must see.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import final

from traitlets.config import Config

from workbench.clusters.launchers.base import LOOPBACK
from workbench.clusters.launchers.mpi import MPILauncher
from workbench.clusters.local.mpi_install import OPEN_MPI, MPIInstall, rank_environment
from workbench.errors import ConfigError, LaunchError

FORM = "'ssh:hostA:2,hostB:2', each host with its number of ranks"
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CARRIED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MPI4PY_LIBMPI", "WORKBENCH_RUNS", "OMP_NUM_THREADS")
CARRIED_BEGINNINGS = ("GLOO_", "NCCL_", "TP_")
FROM_IPYPARALLEL = ("IPP_CLUSTER_ID", "IPP_PROFILE_DIR", "IPP_CONNECTION_INFO")


def parse_hosts(words: str) -> tuple[tuple[str, int], ...]:
    """Hosts and how many ranks each has.

    >>> parse_hosts("ssh:hostA:2,hostB")
    (('hostA', 2), ('hostB', 1))

    Raises:
        ConfigError: it is not written so.
    """
    hosts = []
    for part in words.partition(":")[2].split(","):
        name, colon, number = part.strip().partition(":")
        if not HOST.fullmatch(name) or (colon and not (number.isdigit() and int(number) > 0)):
            raise ConfigError(f"launcher={words!r}: {part!r} is no host; write it like {FORM}")
        hosts.append((name, int(number or 1)))
    if len({name for name, _ in hosts}) != len(hosts):
        raise ConfigError(f"launcher={words!r}: a host is named twice; write it like {FORM}")
    return tuple(hosts)


@final
class SSHLauncher(MPILauncher):
    """Starts them.

    Args:
        hosts: names and numbers of ranks, in the order in which ranks fill them.
    """

    is_here = starts_at_once = False

    def __init__(self, install: MPIInstall, hosts: tuple[tuple[str, int], ...]) -> None:
        super().__init__(install)
        self.hosts = hosts

    @property
    def title(self) -> str:
        return f"{self.install} over ssh on {', '.join(name for name, _ in self.hosts)}"

    def check(self, num_ranks: int) -> None:
        places = sum(number for _, number in self.hosts)
        if num_ranks > places:
            raise ConfigError(f"{num_ranks} ranks on hosts with places for {places}: give a host more, {FORM}")

    def controller_ip(self) -> str:
        """This machine's address on the way to the first host that is not this machine."""
        address = LOOPBACK
        for name, _ in self.hosts:
            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((name, 9))  # nothing is sent: the kernel looks up the way
                    address = str(probe.getsockname()[0])
            except OSError as error:
                raise LaunchError(f"no way to host {name!r} ({error}): is the name right, and does `ssh {name} true` work?") from None
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
            config.MPIEngineSetLauncher.mpi_args = ["-hosts", names]  # carries its whole environment along
            return
        carried = [name for name in os.environ if name in CARRIED or name.startswith(CARRIED_BEGINNINGS)]
        exports = [word for name in sorted({*carried, *variables, *FROM_IPYPARALLEL}) for word in ("-x", name)]
        config.MPIEngineSetLauncher.mpi_args = ["--host", names, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *exports]
