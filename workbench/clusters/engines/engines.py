"""A controller and engines, through ipyparallel: started, watched, let go and taken up again, and ended without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any, final

import cloudpickle
import ipyparallel
from ipyparallel import error as ipp_error
from ipyparallel.cluster.launcher import LocalProcessLauncher
from traitlets import TraitError

from workbench.clusters.engines.event_loop import LoopThread
from workbench.clusters.engines.options import new_cluster, options
from workbench.clusters.launchers.base import Launcher
from workbench.clusters.supervision import registry as register
from workbench.clusters.supervision.heartbeat import lines_since, write_whole
from workbench.clusters.supervision.reaper import end_marked, start_warden
from workbench.clusters.supervision.start_progress import Progress
from workbench.errors import LaunchError

STOP_S = 10.0
CONNECT_S = 30.0
TAIL_LINES = 20


@final
class Engines:
    """`num_ranks` engines of one world, their controller, and a client connected to it.

    `mark` is the variable in the environment of every process of it (see `warden`).

    Args:
        launcher: what starts them.
        num_ranks: how many.
        name: what the cluster's id begins with.
        cluster_id: that of a cluster that exists.
    """

    def __init__(self, launcher: Launcher, num_ranks: int, name: str, cluster_id: str | None = None) -> None:
        self.id = cluster_id or f"{name}-{secrets.token_hex(4)}"
        self.launcher, self.num_ranks = launcher, num_ranks
        self.folder = register.state_folder() / self.id
        self.client: Any = None
        self.mark = "WORKBENCH_CLUSTER_" + self.id.upper().replace("-", "_")
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._loop: LoopThread | None = None
        self._warden: Any = None
        self._cluster: Any = None
        self._attached = False
        self.detached = False
        self.starting: threading.Thread | None = None  # that may be at work here
        self._training = ""  # the present one, or the last

    # ------------------------------------------------------------ start

    def start(self, timeout_s: float, progress: Progress, about: dict[str, Any]) -> None:
        """Start everything and wait until every engine is there.

        Args:
            about: what the cluster's record says besides.

        Raises:
            LaunchError: with the last lines of what the failing part said.
        """
        for folder in (self.folder, self.folder / "log"):
            folder.mkdir(parents=True, mode=0o700)
        facts = {"id": self.id, "mark": self.mark, "num_ranks": self.num_ranks, "title": self.launcher.title, "started_s": time.time()}
        write_whole(self.folder / register.RECORD, {**facts, **register.me(), **about})
        self._warden = start_warden(self.mark, str(self.folder))
        self._bring_up(timeout_s, progress)

    def restart(self, launcher: Launcher, num_ranks: int, timeout_s: float, progress: Progress) -> None:
        """End all processes, whatever state they are in, and start as many new ones under the same id.

        Raises:
            LaunchError: as `start`.
        """
        with self._lock:
            self._end_processes(gently=False)
        for path in (self.folder / "security").glob("*"):
            path.unlink()  # engines that found the old controller's addresses would wait for it
        self.launcher, self.num_ranks, self._attached, self._training = launcher, num_ranks, False, ""
        register.change_record(self.folder, num_ranks=num_ranks, title=launcher.title)
        self._bring_up(timeout_s, progress)

    def _bring_up(self, timeout_s: float, progress: Progress) -> None:
        deadline = time.monotonic() + timeout_s
        self._loop = self._loop or LoopThread()
        try:
            self._cluster = self._run(self._make(), deadline)
            if self.launcher.starts_at_once:
                self._run(self._cluster.start_engines(self.num_ranks), deadline)
            self._run(self._cluster.start_controller(), deadline)
            while (waits := self.launcher.waits(self._cluster.controller)) is not None and not self._ended.is_set():  # in a job in a queue
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
                    f"0 of {self.num_ranks} ranks were ready after {timeout_s:.3g} s, nor was the controller; "
                    f"give a slow machine more with timeout_s=...{self.last_words()}"
                ) from None
            raise LaunchError(f"the controller did not start: {error or 'no answer in time'}.{self.last_words()}") from None
        self._wait_for_engines(timeout_s, deadline, progress)

    def _run(self, work: Any, deadline: float) -> Any:
        assert self._loop is not None
        return self._loop.run(work, deadline - time.monotonic(), self._ended)

    def _connected(self, info: dict[str, Any], timeout_s: float) -> Any:
        folder = str(self.folder)
        limit = max(1.0, min(timeout_s, CONNECT_S))
        return ipyparallel.Client(info["client"], profile_dir=folder, ipython_dir=folder, cluster_id=self.id, timeout=limit)

    def _wait_for_engines(self, timeout_s: float, deadline: float, progress: Progress) -> None:
        while (ready := len(self.client.ids)) < self.num_ranks:
            waits = self.launcher.waits(self._cluster.engine_set)
            progress.ready(ready, waits)
            if self._ended.is_set():
                raise LaunchError("the cluster was stopped while it started")
            if not self.alive:
                raise LaunchError(f"{self.launcher.starter} ended before its {self.num_ranks} ranks were ready.{self.last_words()}")
            if waits is not None:
                deadline = time.monotonic() + timeout_s
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{ready} of {self.num_ranks} ranks were ready after {timeout_s:.3g} s; "
                    f"give a slow machine more with timeout_s=...{self.last_words()}"
                )
            time.sleep(0.05)

    async def _make(self) -> Any:
        """The ipyparallel cluster; made inside the loop, which its launchers remember."""
        return ipyparallel.Cluster(**new_cluster(self.launcher, self.num_ranks), **self._options())

    def _options(self) -> dict[str, Any]:
        return options(self.launcher, self.num_ranks, self.id, self.mark, self.folder)

    # ------------------------------------------------------------ while it runs

    @property
    def engine_set(self) -> Any:
        """ipyparallel's launcher of them; None before there is one."""
        return getattr(self._cluster, "engine_set", None)

    @property
    def alive(self) -> bool:
        """Whether what started them is there; mpiexec ends when one of its ranks dies."""
        return self._cluster is not None and self.launcher.alive(self.engine_set)

    def begin_training(self, folder: Path) -> None:
        """From here on, the last words are those of this training; the record names it."""
        self._training = folder.name
        register.change_record(self.folder, run=str(folder))

    def last_words(self) -> str:
        """The last lines that the engines and the controller wrote, for an error message; empty if they were silent."""
        parts, controller = [], getattr(self._cluster, "controller", None)
        told = {
            "mpiexec" if self.launcher.is_mpi else "the ranks": self.launcher.last_words(self.engine_set) if self._cluster else "",
            "the controller": controller.get_output() if controller and not self._training else "",
        }
        for what, said in told.items():
            lines = lines_since(said.splitlines(), self._training, of_ranks=not self.launcher.is_mpi)[-TAIL_LINES:]
            if lines:
                parts.append(f"\nThe last lines of {what}:\n" + "\n".join(f"  {line}" for line in lines))
        return "".join(parts)

    # ------------------------------------------------------------ let go, taken up

    def detach(self, **words: Any) -> None:
        """Leave everything running, with no end but `workbench cluster stop` or that of who attaches to it.

        Raises:
            LaunchError: the launcher's ranks cannot outlive this process.
        """
        reason = self.launcher.why_not_detach()
        if reason is not None:
            raise LaunchError(f"this cluster cannot be detached: {reason}")
        with self._lock:
            (self.folder / register.LAUNCHER).write_bytes(cloudpickle.dumps(self.launcher))
            register.let_go(self.folder, **words)  # before the warden ends: should we be killed here, it ends the ranks
            self._end_warden()
            self.client.close()
            self.detached, self._owner = True, 0  # from here on nothing here ends it
            self._cluster.cluster_file = ""  # nor writes of it: who attaches does, and who ends it removes the folder
            started = self.engine_set
            for part in (self._cluster.controller, started, *getattr(started, "launchers", {}).values()):
                part.output_file = ""  # nor reads and removes its log when it ends
            self.client = self._cluster = None  # the loop stays: threads that wait for the processes' ends tell it

    @classmethod
    def attach(cls, entry: register.Entry) -> Engines:
        """Take up what was detached.

        Raises:
            LaunchError: somebody holds it, its processes have ended, or they do not answer.
        """
        if not entry.is_here and not entry.record.get("reachable"):
            raise LaunchError(f"the controller of cluster {entry.id} is a process of {entry.record['host']}: attach to it there")
        if entry.is_here and not entry.processes() and not entry.in_job:
            raise LaunchError(f"the processes of cluster {entry.id} have ended: `workbench cluster stop {entry.id}` removes what is left")
        register.take_up(entry)
        launcher = cloudpickle.loads(register.trusted(entry.folder / register.LAUNCHER).read_bytes())
        engines = cls(launcher, entry.record["num_ranks"], "", cluster_id=entry.id)
        engines._warden = start_warden(engines.mark, str(engines.folder))
        try:
            engines._take_up()
        except BaseException as error:
            register.let_go(entry.folder, **(entry.detached or {}))
            engines._end_warden()
            if not isinstance(error, RuntimeError | OSError | ValueError | ipp_error.IPythonError | TraitError):
                raise
            raise LaunchError(f"cluster {entry.id} does not answer ({error}): `workbench cluster stop {entry.id}` ends it") from None
        return engines

    def _take_up(self) -> None:
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
        for part, kind in (("controller", self.launcher.controller), ("engines", self.launcher.engine_set)):
            if part in state:
                state[part]["class"] = kind  # the file's name for one of ours cannot be imported
        return ipyparallel.Cluster.from_dict(state, cluster_file=str(file), **self._options())

    # ------------------------------------------------------------ end

    def stop(self) -> None:
        """End every process and remove the folder; once is enough, more does no harm."""
        if os.getpid() != self._owner:  # a fork of the notebook must not end its cluster
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
            if self._cluster is not None and self._loop is not None:
                with contextlib.suppress(TimeoutError, RuntimeError):
                    gently = gently and not self._attached  # who are no children of ours may never be seen to end
                    if gently or not isinstance(self.engine_set, LocalProcessLauncher):  # else their mark is enough
                        self._loop.run(self._cluster.stop_engines(), STOP_S)  # first: nannies take their leave of the controller
                        self._loop.run(self._cluster.stop_controller(), STOP_S)
                    self._loop.run(self.launcher.close(), STOP_S)
        finally:
            self.client = self._cluster = None
            end_marked(self.mark)

    def _clear(self) -> None:
        """What must happen even when a stop is interrupted."""
        end_marked(self.mark)
        self.launcher.clear()
        self._end_warden()
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_warden(self) -> None:
        if self._warden is not None:
            self._warden.kill()
            self._warden.wait()
            self._warden = None
