"""A controller and MPI engines on this machine, through ipyparallel: started, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, final

import ipyparallel
from traitlets.config import Config

from workbench.clusters.launchers import LOOPBACK, Launcher
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
    """`num_ranks` engines of one world, their controller, and a client connected to it.

    `mark` is the variable in the environment of every process of it (see `warden`).

    Args:
        launcher: what starts them.
        num_ranks: how many.
        name: what the cluster's id begins with.
    """

    def __init__(self, launcher: Launcher, num_ranks: int, name: str) -> None:
        self.id = f"{name}-{secrets.token_hex(4)}"
        self.launcher, self.num_ranks = launcher, num_ranks
        self.folder = state_folder() / self.id
        self.client: Any = None
        self.mark = "WORKBENCH_CLUSTER_" + self.id.upper().replace("-", "_")
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
            while self.launcher.waits(self._cluster.controller) is not None:  # it lives in a job, which is in a queue
                deadline = time.monotonic() + timeout_s
                time.sleep(0.05)
            info = self._loop.run(self._cluster.controller.get_connection_info(), deadline - time.monotonic())
            self._loop.run(self.launcher.controller_is_up(info["engine"]), deadline - time.monotonic())
            self._loop.run(self._cluster.start_engines(self.num_ranks), deadline - time.monotonic())
        except (RuntimeError, OSError) as error:  # TimeoutError is an OSError
            raise LaunchError(f"the controller did not start: {error or 'no answer in time'}.{self.last_words()}") from None
        folder = str(self.folder)
        self.client = ipyparallel.Client(info["client"], profile_dir=folder, ipython_dir=folder, cluster_id=self.id)
        self._wait_for_engines(timeout_s, deadline, progress)

    def _wait_for_engines(self, timeout_s: float, deadline: float, progress: Callable[[int], None]) -> None:
        while (ready := len(self.client.ids)) < self.num_ranks:
            progress(ready)
            if not self.alive:
                raise LaunchError(f"{self.launcher.starter} ended before its {self.num_ranks} ranks were ready.{self.last_words()}")
            if self.launcher.waits(self._cluster.engine_set) is not None:
                deadline = time.monotonic() + timeout_s
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
            engines=self.launcher.engine_set,
            controller=self.launcher.controller,
            n=self.num_ranks,
            cluster_id=self.id,
            profile_dir=str(self.folder),
            controller_ip=self.launcher.controller_ip(),
            config=self._config(),
            log=log,
            load_profile=False,
            shutdown_atexit=False,
            delay=0.0,
        )

    def _config(self) -> Config:
        everywhere = {self.mark: "1", "IPYTHONDIR": str(self.folder)}
        config = Config()
        config.EngineLauncher.engine_args = [f"--IPEngine.timeout={REGISTER_S}"]
        self.launcher.configure(config, self.num_ranks, everywhere, self.folder)
        config.LocalControllerLauncher.environment = everywhere
        config.ControllerLauncher.controller_args = [
            f"--HeartMonitor.period={HEARTBEAT_MS}",
            f"--HeartMonitor.max_heartmonitor_misses={HEARTBEAT_MISSES}",
            "--IPController.broadcast_scheduler_depth=0",
            f"--IPController.enable_curve={self.launcher.controller_ip() != LOOPBACK}",
        ]
        return config

    @property
    def alive(self) -> bool:
        """Whether what started them is there; mpiexec ends when one of its ranks dies."""
        return self._cluster is not None and self.launcher.alive(self._cluster.engine_set)

    def last_words(self) -> str:
        """The last lines that the engines and the controller wrote, for an error message; empty if they were silent."""
        parts = []
        controller = self._cluster.controller
        told = {
            "mpiexec": self.launcher.last_words(self._cluster.engine_set),
            "the controller": controller.get_output() if controller else "",
        }
        for what, said in told.items():
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
                        self._loop.run(self.launcher.close(), STOP_S)
            finally:
                self.client = None
                self._clear()

    def _clear(self) -> None:
        """What must happen even when a stop is interrupted."""
        end_marked(self.mark)
        self.launcher.clear()
        if self._warden is not None:
            self._warden.kill()
            self._warden.wait()
            self._warden = None
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        shutil.rmtree(self.folder, ignore_errors=True)
