"""A controller and MPI engines on this machine, through ipyparallel: started, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, final

import ipyparallel
from traitlets.config import Config

from workbench.clusters.emulated import EmulatedNetwork, Placement
from workbench.clusters.emulated.relay import Relay
from workbench.clusters.mpi_install import MPIInstall, rank_environment
from workbench.clusters.warden import end_marked, start_warden
from workbench.errors import LaunchError

HEARTBEAT_MS = 500  # an engine is known one heartbeat after it came: at ipyparallel's 3 s that is half of the start
HEARTBEAT_MISSES = 240  # two minutes, as on a starved machine
REGISTER_S = 60
STOP_S = 10.0
TAIL_LINES = 20


def state_folder() -> Path:
    """Where running clusters keep their connection files: under $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "workbench" / "clusters"


@final
class LoopThread:
    """An event loop of its own thread: the same in a script and in a notebook, whose loop is busy running the cell."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workbench-cluster", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """The result of `work`; TimeoutError if it takes longer."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
        if not self._loop.is_running():
            self._loop.close()


@final
class Engines:
    """`num_ranks` engines of one MPI world, their controller, and a client connected to it.

    `mark` is the variable in the environment of every process of it (see `warden`).

    Args:
        install: the MPI to start them with.
        num_ranks: how many.
        name: what the cluster's id begins with.
        network: an emulated network, on whose hosts the engines are; the controller stays here.
        owned: whether the network ends with them.
    """

    def __init__(
        self, install: MPIInstall, num_ranks: int, name: str, network: EmulatedNetwork | None = None, *, owned: bool = True
    ) -> None:
        self.id = f"{name}-{secrets.token_hex(4)}"
        self.install, self.num_ranks = install, num_ranks
        self.folder = state_folder() / self.id
        self.client: Any = None
        self.mark = "WORKBENCH_CLUSTER_" + self.id.upper().replace("-", "_")
        self.network = network
        self._owns_network = owned
        self._relay = Relay()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._warden: Any = None
        self._cluster: Any = None

    def start(self, timeout_s: float, progress: Callable[[int], None]) -> None:
        """Start everything and wait until every engine is there; `progress` is told how many are.

        Raises:
            LaunchError: with the last lines of what the failing part said. Nothing is left running.
        """
        deadline = time.monotonic() + timeout_s
        self.folder.mkdir(parents=True, mode=0o700)
        self._warden = start_warden(self.mark, str(self.folder))
        self._loop = LoopThread()
        self._cluster = self._loop.run(self._make(), timeout_s)
        try:
            self._loop.run(self._cluster.start_controller(), deadline - time.monotonic())
            info = self._loop.run(self._cluster.controller.get_connection_info(), deadline - time.monotonic())
            if self.network is not None:
                self._loop.run(self._relay.start(self.network, _ports(info["engine"])), deadline - time.monotonic())
            self._loop.run(self._cluster.start_engines(self.num_ranks), deadline - time.monotonic())
        except (RuntimeError, OSError) as error:  # TimeoutError is an OSError
            raise LaunchError(f"the controller did not start: {error or 'no answer in time'}.{self.last_words()}") from None
        folder = str(self.folder)
        self.client = ipyparallel.Client(info["client"], profile_dir=folder, ipython_dir=folder, cluster_id=self.id)
        while (ready := len(self.client.ids)) < self.num_ranks:
            progress(ready)
            if not self.alive:
                raise LaunchError(f"{self.install.mpiexec} ended before its {self.num_ranks} ranks were ready.{self.last_words()}")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{ready} of {self.num_ranks} ranks were ready after {timeout_s:.0f} s; "
                    f"give a slow machine more with timeout_s=...{self.last_words()}"
                )
            time.sleep(0.05)
        progress(ready)

    async def _make(self) -> Any:
        """The ipyparallel cluster; made inside the loop, which its launchers remember."""
        log = logging.getLogger("workbench.clusters")
        log.setLevel(logging.ERROR)  # below that, a normal stop prints what reads like an error
        return ipyparallel.Cluster(
            engines="mpi",
            controller="local",
            n=self.num_ranks,
            cluster_id=self.id,
            profile_dir=str(self.folder),
            controller_ip=socket.gethostbyname(socket.gethostname()) if Placement.here() else "127.0.0.1",
            config=self._config(),
            log=log,
            load_profile=False,
            shutdown_atexit=False,
            delay=0.0,
        )

    def _config(self) -> Config:
        everywhere = {self.mark: "1", "IPYTHONDIR": str(self.folder)}
        config = Config()
        start, there = ([], {}) if self.network is None else (self.network.command(0, []), self.network.environment)
        config.MPIEngineSetLauncher.mpi_cmd = [*start, self.install.mpiexec]
        config.MPIEngineSetLauncher.mpi_args = list(self.install.args)
        config.MPIEngineSetLauncher.engine_args = [f"--IPEngine.timeout={REGISTER_S}"]
        config.MPIEngineSetLauncher.environment = {**everywhere, **there, **rank_environment(self.install, self.num_ranks)}
        config.LocalControllerLauncher.environment = everywhere
        config.LocalControllerLauncher.controller_args = [
            f"--HeartMonitor.period={HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={HEARTBEAT_MISSES}",
            "--IPController.broadcast_scheduler_depth=0",
        ]
        return config

    @property
    def alive(self) -> bool:
        """Whether mpiexec is there; it ends when one of its ranks dies."""
        launcher = self._cluster.engine_set if self._cluster else None
        return launcher is not None and launcher.state == "running" and bool(launcher.process.is_running())

    def last_words(self) -> str:
        """The last lines that the engines and the controller wrote, for an error message; empty if they were silent."""
        parts = []
        for what, launcher in (("mpiexec", self._cluster.engine_set), ("the controller", self._cluster.controller)):
            said = launcher.get_output() if launcher else ""
            lines = [line for line in said.splitlines() if line.strip()][-TAIL_LINES:]
            if lines:
                parts.append(f"\nThe last lines of {what}:\n" + "\n".join(f"  {line}" for line in lines))
        return "".join(parts)

    def stop(self) -> None:
        """End every process and remove the folder; once is enough, more does no harm."""
        if os.getpid() != self._owner:  # a fork of the notebook must not end its cluster
            return
        with self._lock:
            try:
                if self.client is not None:
                    self.client.close()
                if self._cluster is not None and self._loop is not None:
                    with contextlib.suppress(TimeoutError, RuntimeError):
                        self._loop.run(self._cluster.stop_engines(), STOP_S)  # first: nannies take their leave of the controller
                        self._loop.run(self._cluster.stop_controller(), STOP_S)
                        self._loop.run(self._relay.close(), STOP_S)
            finally:
                self.client = None
                self._clear()

    def _clear(self) -> None:
        """What must happen even when a stop is interrupted."""
        end_marked(self.mark)
        if self.network is not None and self._owns_network:
            self.network.close()
        if self._warden is not None:
            self._warden.kill()
            self._warden.wait()
            self._warden = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _ports(info: dict[str, Any]) -> list[int]:
    """Where the controller listens for engines, as its connection file tells."""
    return [port for value in info.values() for port in (value if isinstance(value, list) else [value]) if type(port) is int]
