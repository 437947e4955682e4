"""`Cluster`: ranks for a notebook, which stay alive between trainings."""

from __future__ import annotations

import html
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from workbench.analysis.table import Table
from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.engines.engines import Engines
from workbench.clusters.folder_results import follow_ends
from workbench.clusters.jobs import checkpoints, prepare, submit, takes_settings
from workbench.clusters.launchers.choose import RuntimeName, Where, check_places, choose_launcher, choose_runtime
from workbench.clusters.local.mpi_install import MPIInstall
from workbench.clusters.output import RankOutput, shows_rank_output
from workbench.clusters.run_handle import RunHandle
from workbench.clusters.start import Start, detached_on_error, end_engines
from workbench.clusters.status import status_table
from workbench.clusters.supervision import registry
from workbench.clusters.supervision.start_progress import Progress, count
from workbench.config import value_of
from workbench.errors import ConfigError, LaunchError
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.liveness.interrupts import deferred_interrupt

START_S = 120.0
RETURN_S = 5.0  # how long ranks may take to return after their run has ended


@final
class Cluster:
    """`n` ranks of one world for this program or notebook. Each rank is an IPython engine.

    The ranks end with `stop()`, with the `with` block, or when the object is garbage collected. They also end when the
    program or kernel ends or is killed. No process remains. After `detach()`, `workbench cluster stop` ends the ranks.
    If a process attaches to them, they end with that process.

    Args:
        n: number of ranks. It may exceed the number of cores.
        runtime: library that carries the bytes of `train`: "mpi" (mpi4py) or "torch" (torch.distributed: gloo, NCCL).
            None: MPI if the launcher has it.
        launcher: where the ranks run. None: as `workbench config` says, "local" by default.
            "local": on this machine, in one MPI world. "torch": on this machine, without MPI.
            "ssh:hostA:2,hostB:2": on hosts that share the folder of runs.
            "slurm:partition=debug,time=00:30:00" or a `Slurm`: in a Slurm job.
            "pbs:queue=gpu,walltime=01:00:00,nodes=2", "lsf:...", "sge:...", "htcondor:..." or a `BatchJob`: in a job of
            that scheduler. Tested with stand-ins for their commands; PBS, LSF and HTCondor never ran on a real
            scheduler. "emulated:1gbit": on an emulated network, which ends with the cluster. An `EmulatedNetwork`: you
            close it. Or a `Launcher`.
        name: the cluster's name and id begin with it.
        mpi: folder of the MPI to use (it holds bin/mpiexec), or the result of `find_mpi`. None: look for one.
        oversubscribe: allow more ranks than cores.
        timeout_s: limit for the start, in seconds.
        quiet: print neither progress nor the ranks' output.
        wait: wait until the ranks are ready. If False, they start in the background, and calls that need them wait.

    Raises:
        ConfigError: `n`, `runtime` or `launcher` is not valid.
        LaunchError: this machine has no MPI or cannot emulate a network, or the ranks did not start or did not find
            each other. The message names the fix.

    Example:
        with Cluster(4) as cluster:
            run = cluster.train(SynchronousSGD(), digits_mlp(), epochs=5).wait()
    """

    def __init__(
        self,
        n: int,
        *,
        runtime: RuntimeName | None = None,
        launcher: Where | None = None,
        name: str = "cluster",
        mpi: str | Path | MPIInstall | None = None,
        oversubscribe: bool = True,
        timeout_s: float = START_S,
        quiet: bool = False,
        wait: bool = True,
    ) -> None:
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name={name!r}: letters, digits, - and _ only")
        starts = choose_launcher(launcher or value_of("launcher") or "local", n, mpi, oversubscribe=oversubscribe)
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
            except BaseException:  # an interrupt also ends a start that the caller waits for
                self.stop()
                raise

    @property
    def id(self) -> str:
        """Identifier, unique among clusters."""
        return self._engines.id

    @property
    def name(self) -> str:
        """The name under which JupyterLab's panel, `workbench cluster list` and `wb.attach` know it: its id."""
        return self.id

    @property
    def mark(self) -> str:
        """Name of an environment variable that all processes of the cluster and their descendants have."""
        return self._engines.mark

    @property
    def num_ranks(self) -> int:
        """Number of ranks that were started."""
        return self._engines.num_ranks

    @property
    def emulated(self) -> EmulatedNetwork | None:
        """The emulated network that connects the ranks, if there is one."""
        network: EmulatedNetwork | None = getattr(self._engines.launcher, "network", None)
        return network

    @property
    def ready(self) -> bool:
        """Return True if the ranks have started and are alive. Never waits."""
        return self.state in ("ready", "training")

    def wait(self, timeout_s: float | None = None) -> Cluster:
        """Wait until the ranks are ready.

        Raises:
            LaunchError: the ranks did not start; the message says why.
            TimeoutError: the ranks are not ready after `timeout_s` seconds. The start continues.
        """
        if self._start is not None:
            self._ranks = self._start.wait(timeout_s)
        return self

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """One mapping per rank, in order: rank, size, host, pid, library. Waits until the ranks are ready."""
        self.wait()
        return self._ranks

    @property
    def client(self) -> Any:
        """The ipyparallel client, for other work on the engines: `cluster.client[:]`, `%px`. `heal` replaces it.

        Raises:
            LaunchError: the cluster was stopped or detached, or it did not start.
        """
        self.wait()
        if self._engines.client is None or self._engines.was_removed:
            raise LaunchError(_no_client_message(self.state, self.id))
        return self._engines.client

    @property
    def run(self) -> RunHandle | None:
        """The training that runs, or the last one. After `attach`: the one that ran when the cluster was detached."""
        return self._active

    @property
    def state(
        self,
    ) -> str:  # a Literal here would end the completion of `cluster.` in a notebook, with an error of jedi
        """What the cluster does: "starting", "ready", "training", "lost", "stopped" or "detached". Never waits.

        "lost": a rank's process has ended, and no training continues without it: `heal()` starts new ranks.
        """
        if self._start is not None and not self._start.done:
            return "starting"
        if self._engines.client is None or self._engines.was_removed:
            return "detached" if self._engines.detached else "stopped"
        run = self._active if self._active is not None and not self._active.done else None
        if self._has_lost_ranks and not (run is not None and self._engines.client.ids and run.tolerates_loss):
            return "lost"
        return "ready" if run is None else "training"

    @property
    def _has_lost_ranks(self) -> bool:
        return not self._engines.alive or len(self._engines.client.ids) < self.num_ranks

    def status(self) -> Table:
        """One row per rank: host, process, device, step, last heartbeat, memory, bytes sent.

        Works during a training.
        """
        run = self._active
        return status_table(self._engines, self.ranks, run.folder if run is not None else None, repr(self)[1:-1])

    @takes_settings
    def train(self, algorithm: Algorithm, problem: Problem, **settings: Any) -> RunHandle:
        """Train on all ranks. Returns at once. A second training is refused while the first one runs.

        Args:
            algorithm: how the ranks exchange and apply gradients.
            problem: model, loss and data. Functions and classes of the notebook are sent to the ranks.
            settings: fields of `workbench.settings.Settings`: epochs or steps, batch_size, lr, seed, ... Also
                resume=, the stopped run to continue.

        Raises:
            ConfigError: a setting is not valid, an object cannot be sent to the ranks, or a training still runs.
            LaunchError: the cluster was stopped, or it has lost ranks.
        """
        job, info = prepare(algorithm, problem, settings, self.runtime, self.num_ranks)
        self._check_free()
        with deferred_interrupt("the training has begun and continues: it is `cluster.run`, end it with .stop()"):
            folder, results = submit(self._engines, job, info)
            self._active = self._with_output(RunHandle(folder, results, self._engines, problem))
        return self._active

    def _with_output(self, run: RunHandle, *, from_now: bool = False) -> RunHandle:
        run.quiet = self._quiet
        if shows_rank_output(self._quiet):
            run.output = RankOutput(run.folder, self.num_ranks, from_now=from_now)
            run.output.follow(lambda: run.done)
        return run

    def _check_free(self) -> None:
        run = self._active
        self.client  # noqa: B018 - raises if the cluster was stopped
        if run is not None and run.overdue(RETURN_S):
            raise LaunchError(
                f"ranks have not returned from {run.id} (status: {run.status}): heal() this cluster, or start a new "
                "Cluster"
            )
        if run is not None and not run.done:
            raise ConfigError(f"this cluster still trains: {run}. wait() for it, stop() it, or start a second Cluster")
        if self._has_lost_ranks:
            raise LaunchError(
                f"this cluster has lost ranks: heal() it, or start a new Cluster.{self._engines.last_output()}"
            )

    def restart(self) -> Cluster:
        """End all ranks and start the same number of new ones under the same id.

        The contents of their memory are lost, and a training that runs fails.
        """
        return self.scale(self.num_ranks)

    def scale(self, n: int) -> Cluster:
        """Restart with `n` ranks.

        Raises:
            ConfigError, LaunchError: the launcher has no place for `n` ranks; then nothing has changed. Or the
                new ranks did not start.
        """
        self.client  # noqa: B018 - raises if the cluster was stopped
        launcher = self._engines.launcher
        check_places(launcher, n)
        if self._active is not None:
            self._active.abandon("the cluster was restarted while it trained")
        limit_s = self._timeout_s
        self._launch(lambda engines, progress: engines.restart(launcher, n, limit_s, progress), wait=True)
        return self

    def heal(self) -> Cluster:
        """Restart all ranks if some have ended, or have not returned from a run that has ended. Print what is lost.

        Otherwise nothing changes.
        """
        message = self._what_restart_loses()
        if message is not None:
            self.restart()
            self._print(message)
        return self

    def _what_restart_loses(self) -> str | None:
        present, run = set(self.client.ids), self._active
        gone = [rank for rank in range(self.num_ranks) if rank not in present]
        if self._engines.alive and not gone and (run is None or not run.overdue(RETURN_S)):
            return None
        return _restart_message(
            gone, run.folder if run is not None and run.status == "failed" else None, self.num_ranks
        )

    def detach(self) -> str:
        """Leave the ranks and their training running when this notebook ends.

        Returns:
            The name to give to `attach`.

        Raises:
            LaunchError: the launcher's ranks cannot outlive this process.
        """
        self.client  # noqa: B018 - raises if the cluster was stopped
        run = self._active
        self._engines.detach(run=str(run.folder) if run is not None else None, ranks=self._ranks)
        self._finalizer.detach()
        if run is not None and not run.done:
            run.readdress(follow_ends(run.folder, None, self._ranks))
        self._print(f"detached: wb.attach({self.id!r}) attaches to it, `workbench cluster stop {self.id}` ends it")
        return self.id

    @classmethod
    def attach(cls, name: str = "", *, quiet: bool = False) -> Cluster:
        """Attach to a detached cluster. `run` is the training that continued without a notebook.

        Args:
            name: the cluster's id, or the beginning of the id. Not needed if there is only one cluster.
            quiet: print nothing.

        Raises:
            ConfigError: no cluster has this name; the message names those that exist.
            LaunchError: another process owns the cluster, or its processes have ended.
        """
        entry = registry.find_entry(name)
        engines = Engines.attach(entry)
        left = entry.detached or {}
        cluster = cls.__new__(cls)
        cluster._hold(engines, entry.record["runtime"], quiet, START_S)
        with detached_on_error(engines, left):
            cluster._ranks = left["ranks"]
            if left.get("run") and Path(left["run"]).is_dir():
                folder = Path(left["run"])
                cluster._active = RunHandle(folder, follow_ends(folder, engines, cluster._ranks), engines)
            run = cluster._active
            cluster._print(f"attached to {cluster!r}" + (f"\n{run}" if run is not None else ""))
            if run is not None:
                cluster._with_output(run, from_now=True)
        return cluster

    def _print(self, message: str) -> None:
        if not self._quiet:
            print(message)

    def stop(self) -> None:
        """End all processes of the cluster. A training that runs is recorded as failed. Further calls do nothing."""
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
        client, ranks = self._engines.client, count(self.num_ranks)
        if client is not None and len(client.ids) < self.num_ranks:
            ranks = f"{len(client.ids)} of {ranks}"
        return f"<Cluster {self.id}: {ranks}, {self._engines.launcher.title}, runtime {self.runtime}, {self.state}>"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_() if self.ready else f"<p>{html.escape(repr(self)[1:-1])}</p>"


def attach(name: str = "", *, quiet: bool = False) -> Cluster:
    """Attach to a detached cluster and its training: see `Cluster.attach`.

    Args:
        name: the cluster's id, or a beginning of the id that no other cluster shares. Not needed if there is only one
            cluster.
        quiet: print nothing.

    Raises:
        ConfigError: no cluster has this name; the message names those that exist.
        LaunchError: another process owns the cluster, or its processes have ended.
    """
    return Cluster.attach(name, quiet=quiet)


def _no_client_message(state: str, name: str) -> str:
    """Return the message for a cluster without a client: the reason, and what to do."""
    if state == "detached":
        return f"this cluster was detached: wb.attach({name!r}) attaches to it"
    return "this cluster was stopped: start a new Cluster"


def _restart_message(gone: list[int], run: Path | None, num_ranks: int) -> str:
    """Return the message that says what is lost when all ranks restart."""
    plural = "s" if len(gone) != 1 else ""
    why = f"rank{plural} {', '.join(map(str, gone))} had ended" if gone else "ranks did not return"
    message = f"{why}: {count(num_ranks)} were restarted, and the contents of their memory are lost."
    if run is None:
        return message
    if checkpoints(run) == num_ranks:
        return f"{message} train(..., resume={run.name!r}) continues {run.name} from its checkpoint"
    return f"{message} {run.name} has no checkpoint: its metrics are kept, its parameters are lost"
