"""A Jupyter-centric research workbench for distributed SGD.

Public names, in reading order; each is loaded when it is first used, so that `import workbench` costs nothing.
An import does not look for files that another package of the same name has left in this folder: `workbench doctor` does.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"

_NAMES = MappingProxyType(
    {
        # what is trained
        "Problem": "workbench.problems.base",
        "problems": "",
        # how
        "SynchronousSGD": "workbench.algorithms",
        "LayerwiseSGD": "workbench.algorithms",
        "DeAR": "workbench.algorithms",
        "PipeSGD": "workbench.algorithms",
        "DelayedSGD": "workbench.algorithms",
        "AdaptiveDelaySGD": "workbench.algorithms",
        "PartialAllReduce": "workbench.algorithms",
        "ParameterServerSGD": "workbench.algorithms",
        "BackupSGD": "workbench.algorithms",
        "AsyncSGD": "workbench.algorithms",
        "StaleSynchronousSGD": "workbench.algorithms",
        "SoftsyncSGD": "workbench.algorithms",
        "DelayCompensatedSGD": "workbench.algorithms",
        "LocalSGD": "workbench.algorithms",
        "DiLoCo": "workbench.algorithms",
        "StaleSGD": "workbench.algorithms",
        "NoCommunication": "workbench.algorithms",
        "SerialSGD": "workbench.algorithms",
        "ApplyOrder": "workbench.algorithms",
        "algorithms": "",
        "collectives": "",
        "codecs": "",
        "TorchHook": "workbench.runtimes.torch_hook",
        "schedules": "",
        "Settings": "workbench.settings",
        # where
        "Cluster": "workbench.clusters",
        "attach": "workbench.clusters",
        "simulate": "workbench.runtimes.simulate",
        "costs": "",
        "replay": "workbench.runtimes.replay",
        "Trainer": "workbench.trainer",
        "ddp_hook": "workbench.runtimes.ddp_hook",
        "Dashboard": "workbench.dashboard",
        # what came of it
        "Run": "workbench.trace.run",
        "open_run": "workbench.trace",
        "list_runs": "workbench.trace.store",
        "trace": "",
        "compare": "workbench.analysis",
        "summary": "workbench.analysis",
        "runs_table": "workbench.analysis",
        "plots": "",
        "experiments": "",
        "papers": "",
        # to write a method of one's own
        "Algorithm": "workbench.program",
        "Context": "workbench.program",
        "ops": "",
        "units": "",
    }
)

__all__ = ["__version__", *_NAMES]  # noqa: PLE0604 - the names are all strings


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    home = _NAMES[name]
    value = getattr(import_module(home), name) if home else import_module(f"workbench.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
