"""`Engines`: a controller and engines of ipyparallel. It starts, watches, detaches, attaches to and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, final

import cloudpickle
import ipyparallel
from ipyparallel import error as ipp_error
from ipyparallel.cluster.launcher import LocalProcessLauncher
from traitlets import TraitError

from workbench.clusters.engines.engine_server import SOCKET, start_engine_server
from workbench.clusters.engines.event_loop import LoopThread
from workbench.clusters.engines.options import forks_engines, new_cluster, options
from workbench.clusters.launchers.base import Launcher
from workbench.clusters.supervision import registry
from workbench.clusters.supervision.rank_output import last_lines, lines_since, write_whole
from workbench.clusters.supervision.reaper import end_marked, start_reaper
from workbench.clusters.supervision.start_progress import Progress
from workbench.errors import LaunchError
from workbench.logs import LOG
from workbench.machine import is_running

STOP_S = 10.0
CONNECT_S = 30.0


@final
class Engines:
    """`num_ranks` engines of one world, their controller, and a client that is connected to it.

    `mark` is the variable in the environment of each of these processes (see `reaper`).

    Args:
        launcher: starts the engines.
        num_ranks: number of engines.
        name: the cluster's id begins with it.
        cluster_id: id of an existing cluster; None for a new one.
    """

    def __init__(self, launcher: Launcher, num_ranks: int, name: str, cluster_id: str | None = None) -> None:
        self.id = cluster_id or f"{name}-{secrets.token_hex(4)}"
        self.launcher, self.num_ranks = launcher, num_ranks
        self.folder = registry.state_folder() / self.id
        self.client: Any = None
        self.mark = "WORKBENCH_CLUSTER_" + self.id.upper().replace("-", "_")
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._loop: LoopThread | None = None
        self._reaper: Any = None
        self._cluster: Any = None
        self._attached = False
        self.detached = False
        self.starting: threading.Thread | None = None  # the thread that runs `start`
        self._training = ""  # name of the training that runs, or of the last one

    # ------------------------------------------------------------ start

    def start(self, timeout_s: float, progress: Progress, about: dict[str, Any]) -> None:
        """Start all processes and wait until every engine is connected.

        Args:
            timeout_s: limit in seconds; a job's time in a queue does not count.
            progress: shows how many engines are connected.
            about: more entries of the cluster's record.

        Raises:
            LaunchError: a process failed or was too slow; the message has the last lines of its output.
        """
        for folder in (self.folder, self.folder / "log"):
            folder.mkdir(parents=True, mode=0o700)
        facts = {
            "id": self.id,
            "mark": self.mark,
            "num_ranks": self.num_ranks,
            "title": self.launcher.title,
            "started_s": time.time(),
        }
        write_whole(self.folder / registry.RECORD, {**facts, **registry.this_owner(), **about})
        self._reaper = start_reaper(self.mark, str(self.folder))
        self._bring_up(timeout_s, progress)

    def restart(self, launcher: Launcher, num_ranks: int, timeout_s: float, progress: Progress) -> None:
        """End all processes in any state, and start new ones under the same id.

        Raises:
            LaunchError: as `start`.
        """
        with self._lock:
            self._end_processes(gently=False)
        for path in (self.folder / "security").glob("*"):
            path.unlink()  # it holds the old controller's address, and new engines would wait there
        self.launcher, self.num_ranks = launcher, num_ranks
        self._attached, self._training = False, ""
        registry.change_record(self.folder, num_ranks=num_ranks, title=launcher.title)
        self._bring_up(timeout_s, progress)

    def _bring_up(self, timeout_s: float, progress: Progress) -> None:
        deadline = time.monotonic() + timeout_s
        self._loop = self._loop or LoopThread()
        try:
            self._start_engine_server()
            self._cluster = self._run(self._make(), deadline)
            if self.launcher.starts_at_once:
                self._run(self._cluster.start_engines(self.num_ranks), deadline)
            self._run(self._cluster.start_controller(), deadline)
            while not self._ended.is_set():
                waits = self.launcher.waits(self._cluster.controller)  # for a job that is in a queue
                if waits is None:
                    break
                deadline = time.monotonic() + timeout_s
                progress.ready(0, waits)
                time.sleep(0.05)
            info = self._run(self._cluster.controller.get_connection_info(deadline - time.monotonic()), deadline)
            self._run(self.launcher.controller_is_up(info["engine"]), deadline)
            if not self.launcher.starts_at_once:
                self._run(self._cluster.start_engines(self.num_ranks), deadline)
            self.client = self._connected(info, deadline - time.monotonic())
        except LaunchError:
            raise
        except (RuntimeError, OSError, ipp_error.IPythonError) as error:  # TimeoutError is an OSError
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"0 of {self.num_ranks} ranks were ready after {timeout_s:.3g} s, and neither was the controller; "
                    f"on a slow machine, raise timeout_s{self.last_output()}"
                ) from None
            raise LaunchError(
                f"the controller did not start: {error or 'no answer in time'}.{self.last_output()}"
            ) from None
        self._wait_for_engines(timeout_s, deadline, progress)

    def _start_engine_server(self) -> None:
        """Start the process that forks the engines. Without it, they import everything themselves."""
        if not forks_engines(self.launcher):
            return
        path = self.folder / SOCKET
        path.unlink(missing_ok=True)
        try:
            start_engine_server(path, {self.mark: "1", **self.launcher.server_variables(self.num_ranks)})
        except (OSError, subprocess.SubprocessError) as error:  # such as a path too long for a socket
            LOG.debug("engines are not forked: %s", error)

    def _run(self, work: Any, deadline: float) -> Any:
        assert self._loop is not None
        return self._loop.run(work, deadline - time.monotonic(), self._ended)

    def _connected(self, info: dict[str, Any], timeout_s: float) -> Any:
        folder = str(self.folder)
        limit = max(1.0, min(timeout_s, CONNECT_S))
        return ipyparallel.Client(
            info["client"], profile_dir=folder, ipython_dir=folder, cluster_id=self.id, timeout=limit
        )

    def _wait_for_engines(self, timeout_s: float, deadline: float, progress: Progress) -> None:
        while (ready := len(self.client.ids)) < self.num_ranks:
            waits = self.launcher.waits(self._cluster.engine_set)
            progress.ready(ready, waits)
            if self._ended.is_set():
                raise LaunchError("the cluster was stopped while it started")
            if not self.alive:
                raise LaunchError(
                    f"{self.launcher.starter} ended before its {self.num_ranks} ranks were ready.{self.last_output()}"
                )
            if waits is not None:
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{ready} of {self.num_ranks} ranks were ready after {timeout_s:.3g} s; "
                    f"on a slow machine, raise timeout_s{self.last_output()}"
                )
            time.sleep(0.05)

    async def _make(self) -> Any:
        """The ipyparallel cluster. It is made inside the event loop, because its launchers use the current loop."""
        return ipyparallel.Cluster(**new_cluster(self.launcher, self.num_ranks), **self._options())

    def _options(self) -> dict[str, Any]:
        return options(self.launcher, self.num_ranks, self.id, self.mark, self.folder)

    # ------------------------------------------------------------ while it runs

    @property
    def engine_set(self) -> Any:
        """ipyparallel's launcher of the engines; None before the start."""
        return getattr(self._cluster, "engine_set", None)

    @property
    def alive(self) -> bool:
        """Return True if the controller and the process that started the engines are alive."""
        return self._controller_is_alive() and self.launcher.alive(self.engine_set)

    def _controller_is_alive(self) -> bool:
        controller = getattr(self._cluster, "controller", None)  # None when ipyparallel has seen its end
        process = getattr(controller, "process", None)  # a controller in a job has none, and ends with the engines
        return controller is not None and (process is None or is_running(process))

    @property
    def was_removed(self) -> bool:
        """Return True if another process stopped the cluster: its record is gone."""
        return self.client is not None and not (self.folder / registry.RECORD).exists()

    def why_silent(self) -> str | None:
        """Why no rank can answer any more, if another process ended the cluster or its controller; else None."""
        if self.was_removed:
            return "the cluster was stopped by another process while it trained"
        ended_here = self._ended.is_set() or self.client is None
        if not ended_here and not self._controller_is_alive():
            return "the cluster's controller ended while it trained"
        return None

    def begin_training(self, folder: Path) -> None:
        """Record that a training begins. `last_output` then covers only this training."""
        self._training = folder.name
        registry.change_record(self.folder, run=str(folder))

    def last_output(self) -> str:
        """The last output lines of the engines and the controller, for an error message; empty if there are none."""
        controller = getattr(self._cluster, "controller", None)
        starter = "mpiexec" if self.launcher.is_mpi else "the ranks"
        outputs = {
            starter: self.launcher.last_output(self.engine_set) if self._cluster else "",
            "the controller": controller.get_output() if controller and not self._training else "",
        }
        paragraphs = []
        for source, output in outputs.items():
            of_ranks = not self.launcher.is_mpi
            lines = last_lines(lines_since(output.splitlines(), self._training, of_ranks=of_ranks), of_ranks=of_ranks)
            if lines:
                paragraphs.append(f"\nThe last lines of {source}:\n" + "\n".join(f"  {line}" for line in lines))
        return "".join(paragraphs)

    # ------------------------------------------------------------ detach and attach

    def detach(self, **facts: Any) -> None:
        """Leave all processes running.

        `workbench cluster stop` ends them. If a process attaches to them, they end with that process.

        Args:
            facts: what the process that attaches needs.

        Raises:
            LaunchError: the launcher's ranks cannot outlive this process.
        """
        reason = self.launcher.why_not_detach()
        if reason is not None:
            raise LaunchError(f"this cluster cannot be detached: {reason}")
        with self._lock:
            registry.write_private(self.folder / registry.LAUNCHER, cloudpickle.dumps(self.launcher))
            registry.mark_detached(self.folder, **facts)  # if this process is killed here, the reaper ends the ranks
            self._end_reaper()
            self.client.close()
            self.detached, self._owner = True, 0  # from here on, this process must not end the cluster,
            self._cluster.cluster_file = ""  # must not write its file,
            started = self.engine_set
            for process in (self._cluster.controller, started, *getattr(started, "launchers", {}).values()):
                process.output_file = ""  # and must not read and remove its logs
            self.client = self._cluster = None  # the event loop stays: threads that watch the processes call it

    @classmethod
    def attach(cls, entry: registry.Entry) -> Engines:
        """Attach to a detached cluster.

        Raises:
            LaunchError: another process owns it, its processes have ended, or they do not answer.
        """
        if not entry.is_here and not entry.record.get("reachable"):
            raise LaunchError(
                f"the controller of cluster {entry.id} is a process of {entry.record['host']}: attach to it there"
            )
        if entry.is_here and not entry.processes() and not entry.in_job:
            raise LaunchError(
                f"the processes of cluster {entry.id} have ended: `workbench cluster stop {entry.id}` removes its files"
            )
        registry.take_ownership(entry)
        try:
            launcher = cloudpickle.loads(registry.check_trusted(entry.folder / registry.LAUNCHER).read_bytes())
        except BaseException:
            registry.mark_detached(entry.folder, **(entry.detached or {}))
            raise
        engines = cls(launcher, entry.record["num_ranks"], "", cluster_id=entry.id)
        engines._reaper = start_reaper(engines.mark, str(engines.folder))
        try:
            engines._reconnect()
        except BaseException as error:
            registry.mark_detached(entry.folder, **(entry.detached or {}))
            engines._end_reaper()
            if not isinstance(error, RuntimeError | OSError | ValueError | ipp_error.IPythonError | TraitError):
                raise
            raise LaunchError(
                f"cluster {entry.id} does not answer ({error}): `workbench cluster stop {entry.id}` ends it"
            ) from None
        return engines

    def _reconnect(self) -> None:
        self._attached = True
        self._loop = LoopThread()
        deadline = time.monotonic() + CONNECT_S
        self._cluster = self._run(self._restored(), deadline)
        if self._cluster.controller is None or self._cluster.engine_set is None:
            raise LaunchError("its controller has ended")
        self.client = self._connected(self._run(self._cluster.controller.get_connection_info(), deadline), CONNECT_S)
        while len(self.client.ids) < self.num_ranks and self.alive and time.monotonic() < deadline:
            time.sleep(0.05)

    async def _restored(self) -> Any:
        file = self.folder / "security" / f"cluster-{self.id}.json"
        state = json.loads(file.read_text())
        for name, launcher_class in (("controller", self.launcher.controller), ("engines", self.launcher.engine_set)):
            if name in state:
                state[name]["class"] = launcher_class  # ipyparallel cannot import the package's own classes by name
        return ipyparallel.Cluster.from_dict(state, cluster_file=str(file), **self._options())

    # ------------------------------------------------------------ end

    def stop(self) -> None:
        """End every process and remove the folder. Further calls do nothing."""
        if os.getpid() != self._owner:  # a fork of the notebook must not end the cluster
            return
        self._ended.set()
        if self.starting is not None and self.starting is not threading.current_thread():
            self.starting.join()
        with self._lock:
            try:
                self._end_processes()
            finally:
                self._clear()

    def _end_processes(self, *, gently: bool = True) -> None:
        try:
            if self.client is not None:
                self.client.close()
            with contextlib.suppress(TimeoutError, RuntimeError):
                self._stop_launchers(gently=gently)
        finally:
            if self._cluster is not None:
                self._cluster.cluster_file = ""  # when it sees the end of its processes, it removes the next one's file
            self.client = self._cluster = None
            end_marked(self.mark)

    def _stop_launchers(self, *, gently: bool) -> None:
        if self._cluster is None or self._loop is None:
            return
        gently = gently and not self._attached  # ipyparallel may miss the end of a process that is no child
        if gently or not isinstance(self.engine_set, LocalProcessLauncher):  # `end_marked` ends the others
            self._loop.run(self._cluster.stop_engines(), STOP_S)  # first: nannies report to the controller
            self._loop.run(self._cluster.stop_controller(), STOP_S)
        self._loop.run(self.launcher.close(), STOP_S)

    def _clear(self) -> None:
        """Do the part of `stop` that must happen even if `stop` is interrupted."""
        end_marked(self.mark)
        self.launcher.clear()
        self._end_reaper()
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
            self._reaper = None
