"""Checks the arguments of `Cluster.train` and packs them into a job for the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from workbench.clusters.engines import remote
from workbench.errors import ConfigError
from workbench.naming import did_you_mean
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace import new_run
from workbench.trace.store import read_info
from workbench.user_file import loaded_modules

if TYPE_CHECKING:
    from workbench.clusters.engines.engines import Engines

Method = TypeVar("Method", bound=Callable[..., Any])


def prepare(
    algorithm: Algorithm, problem: Problem, settings: dict[str, Any], runtime: Any, num_ranks: int
) -> tuple[Any, dict[str, Any]]:
    """Return the job of a training, without its folder, and the first content of its `run.json`.

    Raises:
        ConfigError: an argument is not valid.
    """
    from workbench.replica.local_training import check_algorithm_and_problem, run_info
    from workbench.runtimes.rank.main import Job

    check_algorithm_and_problem(algorithm, problem)
    algorithm.check(num_ranks)
    resume = settings.pop("resume", None)
    chosen = settings_of(settings)
    start = checkpoint_of(resume) if resume is not None else None
    job = Job(algorithm=algorithm, problem=problem, settings=chosen, runtime=runtime, folder="", resume=start)
    return job, run_info(algorithm, problem, chosen, runtime, num_ranks)


def submit(engines: Engines, job: Any, info: dict[str, Any]) -> tuple[Path, list[Any]]:
    """Send the job to all engines. Return the run's folder and each rank's pending result.

    Raises:
        ConfigError: an object in the job cannot be pickled.
    """
    payload = pickled(job)
    folder = new_run(info).resolve()
    engines.begin_training(folder)
    results = [
        engines.client[rank].apply_async(remote.run_job, payload, str(folder)) for rank in range(engines.num_ranks)
    ]
    return folder, results


def settings_of(given: dict[str, Any]) -> Settings:
    """Return the settings of a training.

    Raises:
        ConfigError: there is no such setting; the message names the nearest one.
    """
    names = [item.name for item in fields(Settings)]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, [*names, "resume"], cutoff=0.6) or f"there are {', '.join(names)}, and resume"
            raise ConfigError(f"train() has no setting {name!r}: {hint}".rstrip())
    return Settings(**given)


def takes_settings(train: Method) -> Method:
    """Give a method with `**settings` a signature that names them, for completion and `help()`."""
    own = inspect.signature(train)
    explicit = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    of_settings = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in inspect.signature(Settings).parameters.values()
        if each.name not in own.parameters
    ]
    resume = inspect.Parameter(
        "resume", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Run | Path | str | None"
    )
    train.__signature__ = own.replace(parameters=[*explicit, *of_settings, resume])  # type: ignore[attr-defined]
    return train


def pickled(job: Any) -> bytes:
    """Return the job as bytes, including functions and classes that the notebook defines.

    Raises:
        ConfigError: an object in it cannot be pickled.
    """
    for module in loaded_modules():  # the ranks may not have its file
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(job))
    except Exception as error:  # noqa: BLE001 - pickling runs the user's own code, which may raise anything
        for one in job.settings.callbacks:
            if not _can_be_pickled(one):
                raise ConfigError(
                    f"callback {type(one).__name__} cannot be sent to the ranks: {error}. Open its files and "
                    "connections in on_begin, which rank 0 calls"
                ) from None
        raise ConfigError(
            f"this cannot be sent to the ranks: {error}. Open files, locks, generators and connections cannot be "
            "pickled: "
            "make them inside model= or train=, which every rank calls itself"
        ) from None


def _can_be_pickled(one: Any) -> bool:
    try:
        cloudpickle.dumps(one)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def checkpoint_of(resume: Any) -> str:
    """Return the folder of the run to continue from; `folder@200` for its checkpoint after 200 steps.

    Args:
        resume: a handle, a run, or what `open_run` accepts; also as `name@200`.

    Raises:
        ConfigError: the run has no checkpoint, or none after this number of steps.
    """
    from workbench.runtimes.checkpoint.files import find_source, split_source

    given = getattr(resume, "folder", None) or resume
    source = find_source(str(given.absolute()) if isinstance(given, Path) else given)
    folder = Path(split_source(source)[0])
    if checkpoints(folder) == 0:
        before = read_info(folder).get("resumed")
        hint = f"; it continued from {Path(before).name}, which may still have a checkpoint" if before else ""
        raise ConfigError(
            f"{folder.name} has no checkpoint; resume needs a stopped run, or one trained with checkpoint_every={hint}"
        )
    return source


def checkpoints(folder: Path) -> int:
    """Return how many ranks of a run wrote a checkpoint."""
    from workbench.runtimes.checkpoint.files import num_ranks_kept

    return num_ranks_kept(folder)
