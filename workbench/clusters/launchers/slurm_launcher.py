"""Ranks under Slurm: a new job, or a step of the job that this process runs in."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, final

from ipyparallel.cluster.launcher import ControllerLauncher, EngineLauncher, NotRunning
from traitlets import Dict, Unicode
from traitlets.config import Config

from workbench.clusters.launchers.base import LOOPBACK, Launcher
from workbench.clusters.launchers.mpi import MPILauncher
from workbench.clusters.local.mpi_install import MPIInstall, rank_environment
from workbench.clusters.slurm import batch_job
from workbench.clusters.slurm.gpus import gpu_warning
from workbench.clusters.slurm.queue import (
    Allocation,
    Watched,
    address_for_nodes,
    cancel,
    end_of_file,
    run_slurm,
    submit,
)
from workbench.clusters.slurm.request import Slurm
from workbench.clusters.supervision.reaper import AT_END
from workbench.errors import ConfigError

SCRIPT = batch_job.__file__
SPEC, LOG = "job.json", "job.log"
SETTLED = ("partition", "account", "time_limit", "gpus_per_rank", "extra")  # options that a running job has fixed
GONE_S = 8.0  # how long a cancelled job may take to end


class _InJob:
    """Base of the two ipyparallel launchers: a job, which either of them may submit."""

    job_id: str
    spec: dict[str, Any]
    script: str
    profile_dir: str
    _watched: Watched | None = None

    @property
    def watched(self) -> Watched:
        if self._watched is None:
            self._watched = Watched(self.job_id)
        return self._watched

    async def submit(self, spec: dict[str, Any]) -> None:
        """Write the job's specification, and submit the job."""
        folder = Path(self.profile_dir)
        path = folder / SPEC
        path.touch(0o600)
        path.write_text(json.dumps(spec))
        self.job_id = await asyncio.to_thread(submit, self.script)
        (folder / AT_END).write_text(json.dumps(["scancel", self.job_id]) + "\n")  # for the reaper

    async def cancel_job(self) -> None:
        """Cancel the job and wait until it has ended."""
        if self.job_id:
            await asyncio.to_thread(cancel, self.job_id)
            deadline = time.monotonic() + GONE_S
            while (await asyncio.to_thread(self.watched.state, now=True)).alive and time.monotonic() < deadline:
                await asyncio.sleep(0.1)

    def output(self) -> str:
        """Return the job's output, and its state if it has ended."""
        text = end_of_file(Path(self.profile_dir) / LOG)
        state = self.watched.state() if self.job_id else None
        if state is None or state.alive:
            return text
        return f"{text.rstrip()}\nSlurm's job {self.job_id}: {state}\n"


@final
class SlurmController(_InJob, ControllerLauncher):  # type: ignore[misc]
    """Launcher of a controller that runs in the job. It submits the job, which also contains the engines."""

    job_id = Unicode().tag(to_dict=True)
    spec = Dict(config=True)
    script = Unicode(config=True)

    def find_args(self) -> list[str]:
        return [*self.controller_cmd, *self.controller_args]

    async def start(self) -> Any:
        await self.submit({**self.spec, "controller": self.args})
        return self.notify_start({"job": self.job_id})

    async def stop(self) -> Any:
        await self.cancel_job()
        return self.notify_stop({"exit_code": 0, "job": self.job_id})

    def poll(self) -> int | None:
        return None if self.watched.state().alive else 1

    def get_output(self, remove: bool = False) -> str:
        return "" if getattr(self.parent, "engines", None) else self.output()  # the engines' launcher returns it

    @classmethod
    def from_dict(cls, d: dict[str, Any], **options: Any) -> Any:
        return _restored(super().from_dict(d, **options))


@final
class SlurmEngines(_InJob, EngineLauncher):  # type: ignore[misc]
    """The engines: in a job that this launcher or the controller's launcher submits."""

    job_id = Unicode().tag(to_dict=True)
    spec = Dict(config=True)
    script = Unicode(config=True)

    def find_args(self) -> list[str]:
        return list(self.spec["command"])

    async def start(self, n: int) -> Any:
        self.n = n
        controller = getattr(self.parent, "controller", None)
        if isinstance(controller, SlurmController):
            self.job_id = controller.job_id
        else:
            await self.submit(self.spec)
        return self.notify_start({"job": self.job_id})

    async def stop(self) -> Any:
        await self.cancel_job()
        return self.notify_stop({"exit_code": 0, "job": self.job_id})

    def signal(self, sig: int) -> None:
        """Send a signal to the job's batch script."""
        run_slurm("scancel", "--batch", f"--signal={int(sig)}", self.job_id)

    def poll(self) -> int | None:
        return None if self.watched.state().alive else 1

    def get_output(self, remove: bool = False) -> str:
        return self.output()

    def _log_output(self, stop_data: Any = None) -> None:
        """Log nothing: the job's output stays in its file, and error messages quote it."""

    @classmethod
    def from_dict(cls, d: dict[str, Any], **options: Any) -> Any:
        return _restored(super().from_dict(d, **options))


def _restored(launcher: Any) -> Any:
    """Put a launcher of a submitted job into the state after `start`."""
    state = launcher.watched.state(now=True)
    if not state.alive:
        raise NotRunning(f"Slurm's job {launcher.job_id}: {state}")
    launcher.notify_start({"job": launcher.job_id})
    return launcher


@final
class SlurmLauncher(Launcher):
    """Ranks in a new Slurm job, started there by mpiexec or srun. The controller runs here or in the job.

    Args:
        install: the MPI, at the same path on the nodes.
        options: the job's resources.
    """

    engine_set = SlurmEngines
    is_here = False  # the job's resources limit the number of ranks

    def __init__(self, install: MPIInstall, options: Slurm) -> None:
        self.install, self.options = install, options
        self._folder: Path | None = None
        if options.controller == "job":
            self.controller = SlurmController

    @property
    def title(self) -> str:
        where = f" {self.options.partition}" if self.options.partition else ""
        return f"Slurm{where}, {self.install}"

    @property
    def starter(self) -> str:
        return "Slurm's job"

    def check_num_ranks(self, num_ranks: int) -> None:
        self.options.check_num_ranks(num_ranks)
        run_slurm("sbatch", "--version")

    @cached_property
    def _address(self) -> str:
        return address_for_nodes()

    def controller_ip(self) -> str:
        return "*" if self.options.controller == "job" else self._address

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        self._folder, name = folder, folder.name
        starts = self.options.start_command(num_ranks, self.install.mpiexec, self.install.args)
        spec = {
            "command": [*starts, *config.EngineLauncher.engine_cmd, *config.EngineLauncher.engine_args, "--mpi"],
            "environment": {
                **self.install.env,
                "IPP_CLUSTER_ID": name,
                "IPP_PROFILE_DIR": str(folder),
                **environment,
            },
            "folder": str(folder),
            "controller": None,
            "connection": str(folder / "security" / f"ipcontroller-{name}-engine.json"),
            "on_warning": "command",
            "requeue": False,
        }
        command = [sys.executable, "-P", SCRIPT, str(folder / SPEC)]
        script = self.options.script(num_ranks, name=name, output=str(folder / LOG), command=command)
        for launcher in (config.SlurmEngines, config.SlurmController):
            launcher.spec, launcher.script = spec, script

    def waits(self, engine_set: Any) -> str | None:
        return engine_set.watched.state().waits if getattr(engine_set, "job_id", "") else None

    def alive(self, engine_set: Any) -> bool:
        return engine_set is not None and engine_set.state == "running" and engine_set.watched.state().alive

    def last_output(self, engine_set: Any) -> str:
        return engine_set.get_output() if engine_set is not None else ""

    def why_not_detach(self) -> str | None:
        """Return None: the job and its controller continue without this process."""
        return None

    def clear(self) -> None:
        path = self._folder / AT_END if self._folder else None
        if path is not None and path.exists():
            cancel(json.loads(path.read_text())[1])


@final
class StepLauncher(MPILauncher):
    """Ranks as a step of the job that this process runs in.

    Args:
        install: the MPI.
        options: how the ranks start.
        allocation: the job.
    """

    is_here = False

    def __init__(self, install: MPIInstall, options: Slurm, allocation: Allocation) -> None:
        super().__init__(install)
        self.options, self.allocation = options, allocation

    @property
    def title(self) -> str:
        return f"Slurm's job {self.allocation.job}, {self.install}"

    def check_num_ranks(self, num_ranks: int) -> None:
        self.options.check_num_ranks(num_ranks)
        settled = [name for name in SETTLED if getattr(self.options, name)]
        settled += ["nodes"] if self.options.nodes not in (None, len(self.allocation.nodes)) else []
        settled += ["controller"] if self.options.controller == "job" else []
        if settled:
            raise ConfigError(
                f"this process is in Slurm's job {self.allocation.job}, and ranks start in it. A running job cannot "
                "change "
                f"{', '.join(settled)}: leave out (launcher='slurm'), or start outside of a job"
            )
        most = max(self.allocation.num_ranks, sum(self.allocation.nodes))
        if num_ranks > most:
            raise ConfigError(
                f"{num_ranks} ranks in Slurm's job {self.allocation.job}, which has {len(self.allocation.nodes)} nodes "
                "with "
                f"{sum(self.allocation.nodes)} CPUs: start at most {most}, or request more with `salloc "
                f"--ntasks={num_ranks}`"
            )

    def controller_ip(self) -> str:
        return LOOPBACK if len(self.allocation.nodes) == 1 and self._on_node else self._address

    @property
    def _on_node(self) -> bool:
        """Return True if this process runs on a node of the job, and not on the machine that called salloc."""
        return "SLURMD_NODENAME" in os.environ or "SLURM_NODEID" in os.environ

    @cached_property
    def _address(self) -> str:
        return address_for_nodes()

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        command = self.options.start_command(num_ranks, self.install.mpiexec, self.install.args)
        if self.options.mpi != "mpiexec":
            command = [*command, "--overlap"]  # an interactive shell is a step that occupies the whole job
            command += ["--overcommit"] if num_ranks > self.allocation.num_ranks else []
        place = command.index("-n")
        config.MPIEngineSetLauncher.mpi_cmd = command[:place]
        config.MPIEngineSetLauncher.mpi_args = command[place + 2 :]
        ranks = rank_environment(self.install, num_ranks)
        config.MPIEngineSetLauncher.environment = {**environment, **ranks, **batch_job.for_steps(os.environ, command)}


def slurm_launcher(given: str | Slurm, install: MPIInstall) -> Launcher:
    """Make the launcher for `launcher="slurm:..."`: a new job, or a step of the job that this process runs in.

    Raises:
        ConfigError: there is no such option.
    """
    options = given if isinstance(given, Slurm) else Slurm.parse(given)
    allocation = Allocation.here()
    if allocation is not None:
        return StepLauncher(install, options, allocation)
    if warning := gpu_warning(options, "gpus-per-task="):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return SlurmLauncher(install, options)
