"""How a cluster's engines come up: what `launcher=` means."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import psutil
from traitlets.config import Config

from workbench.trace.processes import is_running

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
        return engine_set is not None and engine_set.state == "running" and is_running(engine_set.process)

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


def ended_here(who: dict[str, Any]) -> bool:
    """Whether a rank was a process of this machine and is none any more."""
    if who["host"] != socket.gethostname():
        return False
    try:
        return not is_running(psutil.Process(who["pid"]))
    except psutil.Error:
        return True


def written(launcher: Any) -> str:
    """What a launcher of ipyparallel has logged so far, which it would read but once; removed when the process has ended."""
    path = Path(getattr(launcher, "output_file", "") or "")
    with contextlib.suppress(OSError):  # there is none, or none any more
        return path.read_text(errors="replace")
    return str(launcher.get_output() or "") if launcher is not None else ""
