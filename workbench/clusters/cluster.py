"""`Cluster`: ranks that stay, behind a notebook."""

from __future__ import annotations

import html
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, final

from workbench.analysis.table import Table
from workbench.clusters.choose import RuntimeName, Where, check_places, choose_launcher, choose_runtime, gone_words, lost_words
from workbench.clusters.engines.engines import Engines
from workbench.clusters.folder_results import follow_ends
from workbench.clusters.jobs import prepare, submit
from workbench.clusters.local.mpi_install import MPIInstall
from workbench.clusters.output import Echo, echo_wanted
from workbench.clusters.run_handle import RunHandle
from workbench.clusters.start import Start, end_engines, or_let_go
from workbench.clusters.status import status_table
from workbench.clusters.supervision import registry as register
from workbench.clusters.supervision.start_progress import Progress, count
from workbench.errors import ConfigError, LaunchError
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.liveness.interrupts import deferred_interrupt

START_S = 120.0
RETURN_S = 5.0  # how long ranks may take to come back from a run that is over


@final
class Cluster:
    """`n` ranks of one world behind this program or notebook: IPython engines, ended with this object.

    It ends with `stop()`, with the `with` block, when it is no longer referred to, at the end of the program or kernel, and
    also when that is killed: no process stays behind. After `detach()`: by `workbench cluster stop`, or with who attaches.

    Args:
        n: how many ranks. They may outnumber the cores.
        runtime: what carries the bytes of `train`: "mpi" (mpi4py) or "torch" (torch.distributed: gloo, NCCL); None: MPI where it is.
        launcher: where the ranks are: "local", on this machine, in one MPI world; "torch", without any MPI; "ssh:hostA:2,hostB:2",
            on hosts that share the runs' folder; "slurm:partition=debug,time=00:30:00" or a `Slurm`, in a job; on an emulated
            network, "emulated:1gbit", which ends with the cluster, or an `EmulatedNetwork` that you close; or a `Launcher`.
        name: what its id begins with.
        mpi: folder of the MPI to use (with bin/mpiexec in it), or what `find_mpi` returned; None to look for one.
        oversubscribe: allow more ranks than cores.
        timeout_s: how long the start may take.
        quiet: print nothing, nor what ranks print.
        wait: until the ranks are ready; if False they start in the background, and what needs them waits.

    Raises:
        ConfigError: `n`, `runtime` or `launcher` cannot be.
        LaunchError: no MPI, or no emulated network here, or the ranks did not start, or did not find each other; says what to do.

    Example:
        with Cluster(4) as cluster:
            run = cluster.train(SynchronousSGD(), digits_mlp(), epochs=5).wait()
    """

    def __init__(
        self,
        n: int,
        *,
        runtime: RuntimeName | None = None,
        launcher: Where = "local",
        name: str = "cluster",
        mpi: str | Path | MPIInstall | None = None,
        oversubscribe: bool = True,
        timeout_s: float = START_S,
        quiet: bool = False,
        wait: bool = True,
    ) -> None:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name={name!r}: letters, digits, - and _ only")
        starts = choose_launcher(launcher, n, mpi, oversubscribe=oversubscribe)
        self._hold(Engines(starts, n, name), choose_runtime(runtime, starts), quiet, timeout_s)
        about = {"runtime": self.runtime, "reachable": starts.reachable}
        self._launch(lambda engines, progress: engines.start(timeout_s, progress, about), wait=wait)

    def _hold(self, engines: Engines, runtime: RuntimeName, quiet: bool, timeout_s: float) -> None:
        self.runtime: RuntimeName = runtime
        self._active: RunHandle | None = None
        self._engines, self._quiet, self._timeout_s = engines, quiet, timeout_s
        self._start: Start | None = None
        self._finalizer = weakref.finalize(self, end_engines, engines)

    def _launch(self, work: Callable[[Engines, Progress], None], *, wait: bool) -> None:
        engines = self._engines
        progress = Progress(engines.num_ranks, engines.launcher.title, silent=self._quiet, background=not wait)
        self._start = Start(engines, progress, self._timeout_s, lambda: work(engines, progress))
        if wait:
            try:
                self._ranks = self._start.wait()
            except BaseException:  # an interrupt too ends a start that the caller waits for
                self.stop()
                raise

    @property
    def id(self) -> str:
        """Unique among clusters."""
        return self._engines.id

    @property
    def mark(self) -> str:
        """The variable that all its processes, and theirs, carry in their environment."""
        return self._engines.mark

    @property
    def num_ranks(self) -> int:
        """How many ranks it was started with."""
        return self._engines.num_ranks

    @property
    def ready(self) -> bool:
        """Whether the ranks are there; never waits."""
        return self.state in ("ready", "training")

    def wait(self, timeout_s: float | None = None) -> Cluster:
        """Until the ranks are ready.

        Raises:
            LaunchError: they did not start: says why.
            TimeoutError: not yet, after `timeout_s`; the start goes on.
        """
        if self._start is not None:
            self._ranks = self._start.wait(timeout_s)
        return self

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Who they are, in order: rank, size, host, pid, library. Waits until they are ready."""
        self.wait()
        return self._ranks

    @property
    def client(self) -> Any:
        """The ipyparallel client, for whatever else the engines should do: `cluster.client[:]`, `%px`. Another one after `heal`.

        Raises:
            LaunchError: the cluster was stopped, or detached, or did not start.
        """
        self.wait()
        if self._engines.client is None:
            raise LaunchError(gone_words(self.state, self.id))
        return self._engines.client

    @property
    def run(self) -> RunHandle | None:
        """The training that runs, or the last one; after `attach`, that which ran when the cluster was detached."""
        return self._active

    @property
    def state(self) -> Literal["starting", "ready", "training", "lost", "stopped", "detached"]:
        """ "lost": a rank's process has ended, and the rest of its MPI world with it. Never waits."""
        if self._start is not None and not self._start.done:
            return "starting"
        if self._engines.client is None:
            return "detached" if self._engines.detached else "stopped"
        if not self._engines.alive or len(self._engines.client.ids) < self.num_ranks:
            return "lost"
        return "training" if self._active is not None and not self._active.done else "ready"

    def status(self) -> Table:
        """A row for each rank: host, process, device, step, last beat, memory, bytes sent. Answers while they train."""
        run = self._active
        return status_table(self._engines, self.ranks, run.folder if run is not None else None, repr(self)[1:-1])

    def train(self, algorithm: Algorithm, problem: Problem, **settings: Any) -> RunHandle:
        """Train on all ranks; returns at once. One training at a time: a second one is refused while the first runs.

        Args:
            algorithm: the method.
            problem: model, loss and data; what the notebook defines is sent along.
            settings: of `workbench.settings.Settings`: epochs or steps, batch_size, lr, seed, ...; and resume=, a stopped run.

        Raises:
            ConfigError: bad settings, something that cannot be sent, or a training that still runs.
            LaunchError: the cluster was stopped, or has lost ranks.
        """
        job, info = prepare(algorithm, problem, settings, self.runtime, self.num_ranks)
        self._check_free()
        with deferred_interrupt("the training has begun all the same, and goes on: it is `cluster.run`, end it with .stop()"):
            self._active = self._followed(RunHandle(*submit(self._engines, job, info), self._engines))
        return self._active

    def _followed(self, run: RunHandle, *, from_now: bool = False) -> RunHandle:
        run.quiet = self._quiet
        if echo_wanted(self._quiet):
            run.echo = Echo(run.folder, self.num_ranks, from_now=from_now)
            run.echo.follow(lambda: run.done)
        return run

    def _check_free(self) -> None:
        client, run = self.client, self._active
        if run is not None and run.overdue(RETURN_S):
            raise LaunchError(f"ranks have not come back from {run.id}, which {run.status}: heal() this cluster, or start a new Cluster")
        if run is not None and not run.done:
            raise ConfigError(f"this cluster still trains: {run}. wait() for it, stop() it, or start a second Cluster")
        if not self._engines.alive or len(client.ids) < self.num_ranks:
            raise LaunchError(f"this cluster has lost ranks: heal() it, or start a new Cluster.{self._engines.last_words()}")

    def restart(self) -> Cluster:
        """End all ranks and start as many new ones, under the same id. What they held in memory is lost; a training fails."""
        return self.scale(self.num_ranks)

    def scale(self, n: int) -> Cluster:
        """Restart with `n` ranks.

        Raises:
            ConfigError, LaunchError: so many cannot be; nothing has changed then. Or they did not start.
        """
        self.client  # noqa: B018 - refuses what was stopped
        check_places(launcher := self._engines.launcher, n)
        if self._active is not None:
            self._active.abandon("the cluster was restarted while it trained")
        limit_s = self._timeout_s
        self._launch(lambda engines, progress: engines.restart(launcher, n, limit_s, progress), wait=True)
        return self

    def heal(self) -> Cluster:
        """Start new ranks if some are gone, or do not come back from a run that is over; says what is lost. Else changes nothing."""
        words = self._what_is_lost()
        if words is not None:
            self.restart()
            self._say(words)
        return self

    def _what_is_lost(self) -> str | None:
        present, run = set(self.client.ids), self._active
        gone = [rank for rank in range(self.num_ranks) if rank not in present]
        if self._engines.alive and not gone and (run is None or not run.overdue(RETURN_S)):
            return None
        return lost_words(gone, run.folder if run is not None and run.status == "failed" else None, self.num_ranks)

    def detach(self) -> str:
        """Let go: ranks and training go on when this notebook ends. Returns the name to `attach` by.

        Raises:
            LaunchError: the launcher's ranks cannot outlive this process.
        """
        self.client  # noqa: B018 - refuses what was stopped
        run = self._active
        self._engines.detach(run=str(run.folder) if run is not None else None, ranks=self._ranks)
        self._finalizer.detach()
        if run is not None and not run.done:
            run.readdress(follow_ends(run.folder, None, self._ranks))
        self._say(f"detached: wb.attach({self.id!r}) takes it up again, `workbench cluster stop {self.id}` ends it")
        return self.id

    @classmethod
    def attach(cls, name: str, *, quiet: bool = False) -> Cluster:
        """Take up a cluster that was detached, by its id or the beginning of it; `run` is the training that was left to itself.

        Raises:
            ConfigError: there is none of that name; names those there are.
            LaunchError: somebody holds it, or its processes have ended.
        """
        engines = Engines.attach(entry := register.find(name))
        told = entry.detached or {}
        (cluster := cls.__new__(cls))._hold(engines, entry.record["runtime"], quiet, START_S)
        with or_let_go(engines, told):
            cluster._ranks = told["ranks"]
            if told.get("run") and Path(told["run"]).is_dir():
                folder = Path(told["run"])
                cluster._active = RunHandle(folder, follow_ends(folder, engines, cluster._ranks), engines)
            cluster._say(f"attached to {cluster!r}" + (f"\n{cluster._active}" if cluster._active is not None else ""))
            cluster._active and cluster._followed(cluster._active, from_now=True)
        return cluster

    def _say(self, words: str) -> None:
        if not self._quiet:
            print(words)

    def stop(self) -> None:
        """End all processes of the cluster; a training that runs is recorded as failed. Once is enough."""
        self._finalizer.detach()
        try:
            self._engines.stop()
        finally:
            if self._active is not None and not self._engines.detached:
                self._active.abandon("the cluster was stopped while it trained")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster {self.id}: {count(self.num_ranks)}, {self._engines.launcher.title}, runtime {self.runtime}, {self.state}>"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_() if self.ready else f"<p>{html.escape(repr(self)[1:-1])}</p>"
