"""What `Cluster.train` is given, checked and packed for the ranks."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from workbench.clusters.engines import remote
from workbench.errors import ConfigError
from workbench.naming import did_you_mean
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace import new_run
from workbench.trace.store import find_run, read_info

if TYPE_CHECKING:
    from workbench.clusters.engines.engines import Engines


def prepare(algorithm: Algorithm, problem: Problem, settings: dict[str, Any], runtime: Any, num_ranks: int) -> tuple[Any, dict[str, Any]]:
    """The job of a training, still without a folder, and what its record begins with.

    Raises:
        ConfigError: what was given cannot be trained.
    """
    from workbench.replica.local_training import check_what, run_info
    from workbench.runtimes.rank.main import Job

    check_what(algorithm, problem, runtime)
    algorithm.check(num_ranks)
    resume = settings.pop("resume", None)
    chosen = settings_of(settings)
    start = checkpoint_of(resume) if resume is not None else None
    job = Job(algorithm=algorithm, problem=problem, settings=chosen, runtime=runtime, folder="", resume=start)
    return job, run_info(algorithm, problem, chosen, runtime, num_ranks)


def submit(engines: Engines, job: Any, info: dict[str, Any]) -> tuple[Path, list[Any]]:
    """Send the job to all engines: the run's folder, and each rank's pending answer.

    Raises:
        ConfigError: something in the job cannot travel.
    """
    payload = pickled(job)
    folder = new_run(info).resolve()
    engines.begin_training(folder)
    return folder, [engines.client[rank].apply_async(remote.run_job, payload, str(folder)) for rank in range(engines.num_ranks)]


def settings_of(given: dict[str, Any]) -> Settings:
    """The settings of a training.

    Raises:
        ConfigError: one that there is not; names the nearest.
    """
    names = [item.name for item in fields(Settings)]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, [*names, "resume"], cutoff=0.6) or f"there are {', '.join(names)}, and resume"
            raise ConfigError(f"train() has no setting {name!r}: {hint}".rstrip())
    return Settings(**given)


def pickled(job: Any) -> bytes:
    """The job as bytes, what the notebook defines included.

    Raises:
        ConfigError: something in it cannot travel.
    """
    try:
        return bytes(cloudpickle.dumps(job))
    except Exception as error:  # noqa: BLE001 - pickling runs the user's own code, which may raise anything
        raise ConfigError(
            f"this cannot be sent to the ranks: {error}. Open files, locks, generators and connections cannot travel: "
            "make them inside model= or train=, which every rank calls for itself"
        ) from None


def checkpoint_of(resume: Any) -> str:
    """The folder of a run to go on from.

    Args:
        resume: a handle, a run, or what `open_run` takes.

    Raises:
        ConfigError: it kept no checkpoint.
    """
    folder = Path(find_run(getattr(resume, "folder", None) or resume)).resolve()
    if checkpoints(folder) == 0:
        before = read_info(folder).get("resumed")
        hint = f"; it went on from {Path(before).name}, whose checkpoint may be there still" if before else ""
        raise ConfigError(
            f"{folder.name} kept no checkpoint; only a stopped run can be resumed, or one trained with checkpoint_every={hint}"
        )
    return str(folder)


def checkpoints(folder: Path) -> int:
    """How many ranks of a run kept one."""
    from workbench.runtimes.checkpoint.files import num_ranks_kept

    return num_ranks_kept(folder)
