"""The numbers that loggers and exports show, by their tags."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

STEP_TAGS = {"train/loss": "loss", "train/samples": "samples", "train/bytes_sent": "bytes_sent"}
NO_RESULTS = ("step", "seconds", "samples", "bytes_sent")


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return tag -> number of a row of `Run.steps` or `Run.evaluations`, without missing ones.

    >>> scalars({"step": 3, "seconds": 0.1, "samples": 64, "bytes_sent": 8, "test_loss": 0.5, "accuracy": 0.9, "f1": None})
    {'test/loss': 0.5, 'test/accuracy': 0.9}
    """
    if "test_loss" in row:
        found = {f"test/{name.removeprefix('test_')}": value for name, value in row.items() if name not in NO_RESULTS}
    else:
        found = {tag: row.get(name) for tag, name in STEP_TAGS.items()}
    return {tag: float(value) for tag, value in found.items() if value is not None}


def began_s(info: Mapping[str, Any]) -> float:
    """Return when a run was created, in seconds since 1970; 0 for a simulated run that is not stored."""
    created = info.get("created")
    return datetime.fromisoformat(created).timestamp() if created else 0.0


def config(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat description of a run for a logger: algorithm, problem, settings, runtime, number of workers."""
    algorithm = info.get("algorithm") or {}
    found = {
        "algorithm": algorithm.get("name"),
        "problem": (info.get("problem") or {}).get("name"),
        "runtime": info.get("runtime"),
        "workers": info.get("num_workers"),
        **{f"algorithm.{name}": value for name, value in (algorithm.get("settings") or {}).items()},
        **{f"settings.{name}": value for name, value in (info.get("settings") or {}).items()},
    }
    return {name: value for name, value in found.items() if value is not None}
