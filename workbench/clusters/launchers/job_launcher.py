"""Base of launchers of ranks in a batch job: `JobLauncher`, and ipyparallel's launchers of a job's engines and controller."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

from ipyparallel.cluster.launcher import ControllerLauncher, EngineLauncher, NotRunning
from traitlets import Any as AnyTrait
from traitlets import Dict, HasTraits, Unicode
from traitlets.config import Config

from workbench.clusters.launchers.base import Launcher
from workbench.clusters.local.mpi_install import MPIInstall
from workbench.clusters.schedulers.job import Scheduler, Watched, end_of_file
from workbench.clusters.schedulers.request import BatchJob
from workbench.clusters.slurm import batch_job
from workbench.clusters.slurm.request import Slurm
from workbench.clusters.supervision.reaper import AT_END, run_last

SCRIPT = batch_job.__file__
SPEC, LOG = "job.json", "job.log"
GONE_S = batch_job.GRACE_S + 3.0  # how long a cancelled job may take to end


class _InJob(HasTraits):
    """Base of the two ipyparallel launchers: a job, which either of them may submit."""

    job_id = Unicode().tag(to_dict=True)
    scheduler = AnyTrait(config=True)  # a `Scheduler`
    spec = Dict(config=True)
    script = Unicode(config=True)
    profile_dir: str
    notify_start: Callable[[dict[str, Any]], Any]
    notify_stop: Callable[[dict[str, Any]], Any]
    _watched: Watched | None = None

    @property
    def watched(self) -> Watched:
        if self._watched is None:
            self._watched = Watched(partial(self.scheduler.state, self.job_id))
        return self._watched

    async def submit(self, spec: dict[str, Any]) -> None:
        """Write the job's specification, and submit the job."""
        folder = Path(self.profile_dir)
        path = folder / SPEC
        path.touch(0o600)
        path.write_text(json.dumps(spec))
        self.job_id = await asyncio.to_thread(self.scheduler.submit, self.script)
        cancel = self.scheduler.cancel_command(self.job_id)
        (folder / AT_END).write_text(json.dumps(cancel) + "\n")  # for the reaper

    async def stop(self) -> Any:
        """Cancel the job and wait until it has ended."""
        if self.job_id:
            await asyncio.to_thread(self.scheduler.cancel, self.job_id)
            deadline = time.monotonic() + GONE_S
            while (await asyncio.to_thread(self.watched.state, now=True)).alive and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
        return self.notify_stop({"exit_code": 0, "job": self.job_id})

    def poll(self) -> int | None:
        return None if self.watched.state().alive else 1

    @classmethod
    def from_dict(cls, d: dict[str, Any], **options: Any) -> Any:
        """Return a launcher of a submitted job, in the state after `start`."""
        launcher = super().from_dict(d, **options)  # type: ignore[misc]  # ipyparallel's
        state = launcher.watched.state(now=True)
        if not state.alive:
            raise NotRunning(f"{launcher.scheduler.name}'s job {launcher.job_id}: {state}")
        launcher.notify_start({"job": launcher.job_id})
        return launcher

    def output(self) -> str:
        """Return the job's output, and its state if it has ended."""
        text = end_of_file(Path(self.profile_dir) / LOG)
        state = self.watched.state() if self.job_id else None
        if state is None or state.alive:
            return text
        return f"{text.rstrip()}\n{self.scheduler.name}'s job {self.job_id}: {state}\n"


@final
class JobController(_InJob, ControllerLauncher):  # type: ignore[misc]
    """Launcher of a controller that runs in the job. It submits the job, which also contains the engines."""

    def find_args(self) -> list[str]:
        return [*self.controller_cmd, *self.controller_args]

    async def start(self) -> Any:
        await self.submit({**self.spec, "controller": self.args})
        return self.notify_start({"job": self.job_id})

    def get_output(self, remove: bool = False) -> str:
        return "" if getattr(self.parent, "engines", None) else self.output()  # the engines' launcher returns it


@final
class JobEngines(_InJob, EngineLauncher):  # type: ignore[misc]
    """The engines: in a job that this launcher or the controller's launcher submits."""

    def find_args(self) -> list[str]:
        return list(self.spec["command"])

    async def start(self, n: int) -> Any:
        self.n = n
        controller = getattr(self.parent, "controller", None)
        if isinstance(controller, JobController):
            self.job_id = controller.job_id
        else:
            await self.submit(self.spec)
        return self.notify_start({"job": self.job_id})

    def get_output(self, remove: bool = False) -> str:
        return self.output()

    def _log_output(self, stop_data: Any = None) -> None:
        """Log nothing: the job's output stays in its file, and error messages quote it."""


class JobLauncher(Launcher):
    """Ranks in a new batch job. The controller runs here or in the job.

    Args:
        install: the MPI, at the same path on the nodes.
        options: the job's resources.
    """

    engine_set = JobEngines
    is_here = False  # the job's resources limit the number of ranks
    options: Slurm | BatchJob
    scheduler: Scheduler
    warn_after_s: float | None = None  # seconds of the job after which the training is asked to stop

    def __init__(self, install: MPIInstall, options: Slurm | BatchJob) -> None:
        self.install = install
        self.options = options
        self._folder: Path | None = None
        if options.controller == "job":
            self.controller = JobController

    @property
    def title(self) -> str:
        return f"{' '.join(filter(None, (self.scheduler.name, self.queue)))}, {self.install}"

    @property
    def starter(self) -> str:
        return f"{self.scheduler.name}'s job"

    @property
    @abstractmethod
    def queue(self) -> str | None:
        """The queue, in the scheduler's words; None if the site decides."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The address at which the nodes reach a controller on this machine."""

    @abstractmethod
    def start_command(self, num_ranks: int, variables: dict[str, str]) -> list[str]:
        """Return the beginning of the command that starts ranks inside the job; the ranks' own command follows.

        Args:
            num_ranks: number of ranks.
            variables: environment that the command gets in addition, and that all ranks must have.
        """

    def controller_ip(self) -> str:
        return "*" if self.options.controller == "job" else self.address

    def configure(self, config: Config, num_ranks: int, environment: dict[str, str], folder: Path) -> None:
        self._folder, name = folder, folder.name
        variables = {**self.install.env, "IPP_CLUSTER_ID": name, "IPP_PROFILE_DIR": str(folder), **environment}
        starts = self.start_command(num_ranks, variables)
        spec = {
            "command": [*starts, *config.EngineLauncher.engine_cmd, *config.EngineLauncher.engine_args, "--mpi"],
            "environment": variables,
            "folder": str(folder),
            "controller": None,
            "connection": str(folder / "security" / f"ipcontroller-{name}-engine.json"),
            "on_warning": "command",
            "warn_after_s": self.warn_after_s,
            "requeue": False,
        }
        command = [sys.executable, "-P", SCRIPT, str(folder / SPEC)]
        script = self.options.script(num_ranks, name=name, output=str(folder / LOG), command=command)
        for launcher in (config.JobEngines, config.JobController):
            launcher.scheduler, launcher.spec, launcher.script = self.scheduler, spec, script

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
        if self._folder is not None:
            run_last(str(self._folder))
