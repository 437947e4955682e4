"""Python for a notebook's cell: attach to a cluster, open a run, continue or repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench import problems
from workbench.resources import PACKAGE
from workbench.runtimes.checkpoint.files import complete_checkpoints
from workbench.trace.info import settings_changes

# The defaults of `Settings`, which imports torch; a test compares them.
DEFAULTS: dict[str, Any] = {
    "num_micro": 1,
    "precision": "fp32",
    "compile": False,
    "seed": 0,
    "on_bad_gradient": "stop",
    "timeout_s": 120.0,
    "trace_steps": 2000,
    "progress": "auto",
    "on_failure": "stop",
    "keep_checkpoints": 2,
    "check_replicas": 1_024,
}
OBJECTS = ("optimizer", "schedule", "compute")  # a record has only their description
IMPORT = "import workbench as wb"


def attach_code(cluster_id: str) -> str:
    """Return the line that attaches to a detached cluster.

    >>> attach_code("cluster-3f2a")
    'cluster = wb.Cluster.attach("cluster-3f2a")'
    """
    return f'cluster = wb.Cluster.attach("{cluster_id}")'


def run_code(folder: Path, info: dict[str, Any], num_steps: int | None = None) -> dict[str, str]:
    """Return Python by purpose: "open", "repeat", and "continue" if the run has a checkpoint.

    Args:
        folder: the run's folder.
        info: its `run.json`.
        num_steps: "branch" continues from the checkpoint after this number of steps.
    """
    found = {"open": f"{IMPORT}\n\nrun = wb.open_run({str(folder)!r})\nwb.plots.watch(run)"}
    if info.get("runtime") in ("mpi", "torch"):
        found["repeat"] = _train(info, {})
        if any(folder.glob("checkpoint*")):
            newest = max((one.num_steps for one in complete_checkpoints(folder)), default=None)
            found["continue"] = _train(_changed_until(info, newest), {"resume": str(folder)})
            if num_steps is not None:
                found["branch"] = _train(_changed_until(info, num_steps), {"resume": f"{folder}@{num_steps}"})
    return found


def _changed_until(info: dict[str, Any], num_steps: int | None) -> dict[str, Any]:
    """Return the record with the settings that the run had at a checkpoint, which were steered until then."""
    algorithm, settings = dict(info.get("algorithm") or {}), dict(info.get("settings") or {})
    for _, changes in settings_changes(info, num_steps):
        own = {name: value for name, value in changes.items() if name != "lr"}
        algorithm["settings"] = {**(algorithm.get("settings") or {}), **own}
        algorithm["defaults"] = [name for name in algorithm.get("defaults") or () if name not in own]
        settings |= {name: value for name, value in changes.items() if name == "lr"}
    return {**info, "algorithm": algorithm, "settings": settings}


def _train(info: dict[str, Any], more: dict[str, Any]) -> str:
    algorithm, problem = info.get("algorithm") or {}, info.get("problem") or {}
    unknown = []
    arguments = []
    for name, value in (algorithm.get("settings") or {}).items():
        if name in (algorithm.get("defaults") or ()):
            continue
        if isinstance(value, str) and "(" in value:  # the description of an object
            unknown.append(f"{name}={value}")
        else:
            arguments.append(f"{name}={value!r}")
    settings = []
    for name, value in (info.get("settings") or {}).items():
        if value == DEFAULTS.get(name):
            continue
        if name in OBJECTS:
            unknown.append(f"{name}={value}")
        else:
            settings.append(f"{name}={value!r}")
    settings += [f"{name}={value!r}" for name, value in more.items()]
    name, title = str(algorithm.get("name")), str(problem.get("name"))
    own = f"{name} as {name}" not in (PACKAGE / "__init__.pyi").read_text()  # to import algorithms would import torch
    lines = [IMPORT, ""]
    lines += [f"# The record describes these, set them too: {', '.join(unknown)}"] if unknown else []
    lines += [f"# {name} is your own class: import it here"] if own else []
    lines += [f"algorithm = {'' if own else 'wb.'}{name}({', '.join(arguments)})"]
    if title in problems.names():
        lines += [f"problem = wb.problems.get({title!r})"]
    else:
        lines += [f"problem = ...  # your own problem {title!r}"]
    runtime = ", runtime='torch'" if info.get("runtime") == "torch" else ""  # without it, MPI where there is one
    lines += [f"cluster = wb.Cluster({info.get('num_workers') or 2}{runtime})  # leave this out if you have a cluster"]
    lines += [f"run = cluster.train(algorithm, problem, {', '.join(settings)})", "run"]
    return "\n".join(lines)
