"""A Jupyter-centric research workbench for distributed SGD.

Public names, in reading order. Each is imported at first use, so `import workbench` is cheap.
"""

from __future__ import annotations

import os
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
        "StreamingDiLoCo": "workbench.algorithms",
        "EagerDiLoCo": "workbench.algorithms",
        "StaleSGD": "workbench.algorithms",
        "NoCommunication": "workbench.algorithms",
        "SerialSGD": "workbench.algorithms",
        "ApplyOrder": "workbench.algorithms",
        "algorithms": "",
        "collectives": "",
        "codecs": "",
        "schedules": "",
        "Settings": "workbench.settings",
        # where
        "Cluster": "workbench.clusters",
        "attach": "workbench.clusters",
        "simulate": "workbench.runtimes.simulator.simulate",
        "costs": "",
        "replay": "workbench.runtimes.simulator.replay",
        "Trainer": "workbench.runtimes.user_loop.trainer",
        "ddp_hook": "workbench.runtimes.user_loop.ddp_hook",
        "Dashboard": "workbench.dashboard",
        # results
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
        # to write an algorithm
        "Algorithm": "workbench.program",
        "Context": "workbench.program",
        "ops": "",
        "units": "",
    }
)

__all__ = ["__version__", *_NAMES]  # noqa: PLE0604 - the names are all strings

_FILES = frozenset(
    """
    __pycache__ _share __init__.py __main__.py algorithms analysis bench calibration catalogue.py cli clusters codecs collectives
    costs dashboard doctor errors.py experiments gradients.py installation.py kernel machine.py naming.py ops.py papers plots
    problems program.py py.typed replica resources.py rng.py run_spec.py runtimes schedules.py settings.py streams.py theory trace
    units.py
    """.split()  # noqa: SIM905 - a list of strings would take a line each
)


def _warn_of_foreign_files() -> None:
    """Warn if this folder holds files of another distribution, which has the same import name."""
    try:
        found = os.listdir(os.path.dirname(__file__))
    except OSError:  # imported from an archive
        return
    if not _FILES.issuperset(found):
        import_module("workbench.installation").warn_if_mixed()


_warn_of_foreign_files()


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    home = _NAMES[name]
    value = getattr(import_module(home), name) if home else import_module(f"workbench.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
