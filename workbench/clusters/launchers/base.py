"""`Launcher`: starts a cluster's engines. The argument `launcher=` of `Cluster` selects one."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import psutil
from traitlets.config import Config

from workbench.machine import is_running

LOOPBACK = "127.0.0.1"
LIBRARIES = "LD_LIBRARY_PATH"  # where the system looks for libraries when a process loads them


class Launcher(ABC):
    """Starts engines, which are ranks of one world. ipyparallel starts their controller on this machine.

    A controller that listens beyond loopback is encrypted. The defaults are for engines on this machine.
    """

    engine_set: str | type = "mpi"  # ipyparallel's launcher of the engines
    controller: str | type = "local"  # ipyparallel's launcher of the controller
    is_mpi = True  # whether the engines are ranks of one MPI world
    # Whether engines may start before the controller: they find its address in the cluster's folder.
    starts_at_once = False
    forks_engines = False  # whether an engine server of this machine may fork the engines
    is_here = True  # whether the engines run on this machine, whose cores then limit their number
    oversubscribe = True  # whether there may be more engines than cores; it also holds when the cluster is scaled

    @property
    @abstractmethod
    def title(self) -> str:
        """What starts the ranks, as named in messages: "Open MPI 5.0.11"."""

    @property
    def starter(self) -> str:
        """The command that starts the ranks, for error messages."""
        return self.title

    @property
    def reachable(self) -> bool:
        """Return True if other machines can attach to a detached cluster, because none of its processes runs here."""
        return not isinstance(self.controller, str)  # a controller in a job

    def check_num_ranks(self, num_ranks: int) -> None:  # noqa: B027 - nothing to do for most
        """Check that `num_ranks` ranks can be started, before anything starts.

        Raises:
            ConfigError, LaunchError: they cannot; the message says why, and what to do.
        """

    def controller_ip(self) -> str:
        """Return the address on which the controller listens."""
        return LOOPBACK

    @abstractmethod
    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        """Configure how ipyparallel starts the engines.

        Args:
            config: ipyparallel's configuration; it is changed in place.
            num_ranks: number of engines.
            environment: variables that every process of the cluster must have, such as the cluster's mark.
            folder: the cluster's folder, which is removed with the cluster.
        """

    def variables(self, num_ranks: int) -> dict[str, str]:
        """Return more variables for the engines, such as their number of threads."""
        return {}

    def server_variables(self, num_ranks: int) -> dict[str, str]:
        """Return variables with which an engine server loads the libraries that its engines would load."""
        return self.variables(num_ranks)

    async def controller_is_up(self, info: dict[str, Any]) -> None:  # noqa: B027 - nothing to do for most
        """Called when the controller listens, before any engine starts.

        Args:
            info: the engines' part of the controller's connection file.
        """

    def waits(self, engine_set: Any) -> str | None:
        """Return why the engines cannot start yet, such as a job's place in a queue; None if they can.

        This time does not count towards the limit for the start.
        """
        return None

    def alive(self, engine_set: Any) -> bool:
        """Return False if the engines have ended."""
        return engine_set is not None and engine_set.state == "running" and is_running(engine_set.process)

    def last_output(self, engine_set: Any) -> str:
        """Return the whole output of the process that started the engines."""
        return launcher_log(engine_set)

    def why_not_detach(self) -> str | None:
        """Return why the engines cannot outlive this process; None if they can."""
        return None

    def pid_here(self, pid: int) -> int:
        """Return the process id of a rank as this machine numbers it."""
        return pid

    async def close(self) -> None:  # noqa: B027 - nothing to do for most
        """Called in the event loop after engines and controller were stopped."""

    def clear(self) -> None:  # noqa: B027 - nothing to do for most
        """Do what must happen even if a stop is interrupted. Further calls do nothing."""


def ended_here(process: dict[str, Any]) -> bool:
    """Return True if a rank's process ran on this machine and has ended.

    Args:
        process: a mapping with host and pid.
    """
    if process["host"] != socket.gethostname():
        return False
    try:
        return not is_running(psutil.Process(process["pid"]))
    except psutil.Error:
        return True


def launcher_log(launcher: Any) -> str:
    """Return the log of an ipyparallel launcher.

    Its `get_output` works only once, and it removes the file at the end.
    """
    path = Path(getattr(launcher, "output_file", "") or "")
    with contextlib.suppress(OSError):  # there is no file, or it was removed
        return path.read_text(errors="replace")
    return str(launcher.get_output() or "") if launcher is not None else ""
