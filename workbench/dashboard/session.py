"""The trainings of a dashboard: starts, pauses, stops and polls them. It has no widgets."""

from __future__ import annotations

import functools
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

from workbench import problems
from workbench.errors import ConfigError, WorkbenchError
from workbench.plots.live.pace import PollTimer
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace.follow import Follower
from workbench.trace.run import Run

CLOSE_S = 30.0  # how long `close` waits for the training to stop


class Cancelled(WorkbenchError):
    """The user stopped a simulated training from the dashboard."""


@final
@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to train.

    Attributes:
        algorithm: the algorithm.
        problem: one of `problems.names()`, or a problem.
        workers: number of ranks or of simulated workers.
        network: network of the simulated workers; None for real ranks.
        settings: fields of `Settings`.
    """

    algorithm: Algorithm
    problem: str | Problem
    workers: int
    network: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@final
class Entry:
    """One training of the session."""

    def __init__(self, number: int, choice: Choice) -> None:
        self.number, self.choice = number, choice
        self.error: BaseException | None = None
        self.run: Run | None = None
        self.handle: Any = None
        self.over = threading.Event()
        self.stopped = threading.Event()
        self.going = threading.Event()  # cleared while a simulation is paused
        self.going.set()
        self.num_gradients = 0  # computed by simulated workers
        self.timer = PollTimer()
        self._follower: Follower | None = None
        self._lock = threading.Lock()  # an earlier `poll` must not overwrite the result of a later one

    @property
    def status(self) -> str:
        """Status of the training: simulating, starting, running, paused, finished, stopped or failed."""
        if self.error is not None:
            return "stopped" if isinstance(self.error, Cancelled) else "failed"
        if self.handle is not None and not self.over.is_set():
            return str(self.handle.status)
        if self.run is not None:
            return str(self.run.info.get("status", "finished"))
        if self.choice.network is None:
            return "starting"
        return "simulating" if self.going.is_set() else "paused"

    def end(self) -> None:
        """Mark the training as over."""
        self.over.set()
        self.timer.wake()

    def poll(self) -> Run | None:
        """Return the run as it is on disk at this moment; after the end, as it was then: its folder may be removed."""
        with self._lock:
            if self.handle is not None and not self.over.is_set():
                self._follower = self._follower or Follower(self.handle.folder)
                self.run = self._follower.poll()
            return self.run


@final
class Session:
    """Trainings one after the other, each in its own thread, on a cluster or simulated.

    Args:
        cluster: where to train. None: start a cluster when it is needed; it ends with `close`.
    """

    def __init__(self, cluster: Any = None) -> None:
        self.entries: list[Entry] = []
        self._cluster, self._owned = cluster, cluster is None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def cluster(self) -> Any:
        """The cluster that trains; None before the first training on ranks."""
        return self._cluster

    @property
    def active(self) -> Entry | None:
        """The training that runs."""
        return self.entries[-1] if self.entries and not self.entries[-1].over.is_set() else None

    def start(self, choice: Choice) -> Entry:
        """Start a training. Returns at once. A later error is the entry's `error`.

        Raises:
            ConfigError: a training runs already, or a setting is not valid.
        """
        choice.algorithm.check(choice.workers)
        Settings(**choice.settings)
        with self._lock:
            if self.active is not None:
                raise ConfigError(f"run {self.active.number} still trains: wait for it, or stop it")
            entry = Entry(len(self.entries) + 1, choice)
            self.entries.append(entry)
        threading.Thread(target=self._train, args=(entry,), name="workbench-dashboard-train", daemon=True).start()
        return entry

    def pause(self) -> None:
        """Pause the training after the present step.

        Raises:
            ConfigError: no training runs, or it cannot pause.
        """
        entry = self._active_entry()
        if entry.choice.network is not None:
            entry.going.clear()
        else:
            _action(entry, "pause")()

    def resume(self) -> None:
        """Continue a paused training.

        Raises:
            ConfigError: no training runs.
        """
        entry = self._active_entry()
        if entry.choice.network is not None:
            entry.going.set()
        else:
            _action(entry, "resume")()

    def stop(self) -> None:
        """Stop the training after the present step.

        Raises:
            ConfigError: no training runs.
        """
        self._stop(self._active_entry())

    def _stop(self, entry: Entry) -> None:
        entry.stopped.set()
        entry.going.set()
        if entry.handle is not None:
            entry.handle.stop()

    def poll_often(self) -> None:
        """Show the effect of a command at once."""
        if self.active is not None:
            self.active.timer.poll_often()

    def close(self) -> None:
        """Stop the training, and the cluster if this session started it.

        A cluster that is still starting ends once it is ready.
        """
        entry = self.active
        if entry is not None:
            self._stop(entry)
            entry.over.wait(CLOSE_S)
        with self._lock:
            self._closed = True
            cluster = self._cluster if self._owned else None
            self._cluster = None if self._owned else self._cluster
        if cluster is not None:
            cluster.stop()

    def _active_entry(self) -> Entry:
        if self.active is None:
            raise ConfigError("nothing is training: press Start")
        return self.active

    def _train(self, entry: Entry) -> None:
        try:
            if entry.choice.network is not None:
                entry.run = self._simulate(entry, entry.choice)
            else:
                self._on_ranks(entry, entry.choice)
        except Exception as error:  # noqa: BLE001 - a thread has no caller, so the dashboard shows any error
            entry.error = error
        finally:
            with suppress(WorkbenchError, OSError):  # the folder was removed: the last polled state stays
                entry.poll()  # there is no poll after the end
            entry.end()

    def _simulate(self, entry: Entry, choice: Choice) -> Run:
        from workbench.runtimes.simulator.simulate import simulate

        problem = problems.get(choice.problem) if isinstance(choice.problem, str) else choice.problem
        loss = problem.loss

        @functools.wraps(loss)
        def watched(*args: Any, **kwargs: Any) -> Any:
            entry.going.wait()
            if entry.stopped.is_set():
                raise Cancelled("stopped from the dashboard; a stopped simulation keeps no results")
            entry.num_gradients += 1
            return loss(*args, **kwargs)

        assert choice.network is not None
        return simulate(
            choice.algorithm,
            replace(problem, loss=watched),
            workers=choice.workers,
            network=choice.network,
            **choice.settings,
        )

    def _on_ranks(self, entry: Entry, choice: Choice) -> None:
        problem = problems.get(choice.problem) if isinstance(choice.problem, str) else choice.problem
        cluster = self._ready_cluster(choice.workers)
        if entry.stopped.is_set():
            raise Cancelled("stopped before it began")
        entry.handle = cluster.train(choice.algorithm, problem, **choice.settings)
        if entry.stopped.is_set():
            entry.handle.stop()
        entry.handle.wait()

    def _ready_cluster(self, num_ranks: int) -> Any:
        """Return the cluster to train on.

        A cluster that this session started is replaced if it has another number of ranks or has lost ranks.
        """
        from workbench.clusters import Cluster

        if self._cluster is not None and self._owned:
            lost = self._cluster.state in ("lost", "stopped")
            if lost or self._cluster.num_ranks != num_ranks:
                self._cluster.stop()
                self._cluster = None
        if self._cluster is None:
            cluster = Cluster(num_ranks, name="dashboard", quiet=True)
            with self._lock:
                closed = self._closed
                self._cluster = None if closed else cluster
            if closed:
                cluster.stop()
                raise Cancelled("the dashboard was closed before the ranks were ready")
        return self._cluster


def _action(entry: Entry, name: str) -> Any:
    if entry.handle is None:
        raise ConfigError("the ranks are still starting: wait a moment")
    action = getattr(entry.handle, name, None)
    if action is None:
        raise ConfigError(f"this training cannot {name}: stop it instead")
    return action
