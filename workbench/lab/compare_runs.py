"""Compare runs: curves averaged over runs that differ only in their seed, and the settings in which they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.labels import distinct_labels
from workbench.plots.differences import settings_of
from workbench.trace.run import Run

Floats = NDArray[np.float64]
RESULTS = ("accuracy", "loss", "train_loss", "seconds", "bytes_sent", "steps")
# Entries of a row that are neither results nor settings, or that the label has
OTHERS = frozenset(
    [
        "run",
        "folder",
        "created",
        "cell",
        "sweep",
        "error",
        "label",
        "status",
        "num_steps",
        "left_s",
        "samples",
        "group",
        "seed",
    ]
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Runs that make one curve.

    Attributes:
        members: positions of its runs among the compared runs.
    """

    label: str
    members: tuple[int, ...]


def group_of(info: Mapping[str, Any]) -> str:
    """Return a key of a run's settings, equal for runs that differ only in their seed.

    Args:
        info: the run's `run.json`.
    """
    facts = {name: value for name, value in settings_of(Run(info=dict(info), metrics={})).items() if name != "seed"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def series_of(infos: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Return the curves: finished repetitions make one, and each other run is alone, as in `wb.plots.curves`.

    Args:
        infos: each run's `run.json`, with its true status.
    """
    groups: dict[str, list[int]] = {}
    for position, info in enumerate(infos):
        groups.setdefault(group_of(info), []).append(position)
    first = [Run(info=dict(infos[members[0]]), metrics={}) for members in groups.values()]
    found: list[Series] = []
    for label, members in zip(distinct_labels(first, repetitions=False), groups.values(), strict=True):
        whole = [one for one in members if len(members) == 1 or infos[one].get("status") == "finished"]
        if whole:
            found.append(Series(label=label, members=tuple(whole)))
        for one in members:
            if one not in whole:
                seed = (infos[one].get("settings") or {}).get("seed")
                found.append(Series(label=f"{label}, seed {seed}, {infos[one].get('status')}", members=(one,)))
    labels = [series.label for series in found]
    return [
        Series(label=f"{one.label} ({number})" if (number := labels[: place + 1].count(one.label)) > 1 else one.label,
               members=one.members)
        for place, one in enumerate(found)
    ]  # fmt: skip


def merged(curves: Sequence[Mapping[str, Sequence[Any]]], name: str, max_points: int) -> dict[str, list[Any]]:
    """Return the mean curve over steps, and a band from the lowest to the highest.

    It covers the steps that all curves have. Its seconds are means at the same step.

    Args:
        curves: of each run, equally long lists of `steps`, `seconds` and `name`.
        name: of the values.
        max_points: largest number of points.

    Returns:
        Lists of `steps`, `seconds`, `values`, and for several curves `low` and `high`.
    """
    columns = [[np.array(curve[key], float) for key in ("steps", "seconds", name)] for curve in curves]
    filled = [(steps[good], seconds[good], values[good])
              for steps, seconds, values in columns if (good := np.isfinite(values)).any()]  # fmt: skip
    if not filled:
        return {"steps": [], "seconds": [], "values": []}
    first, last = max(steps[0] for steps, _, _ in filled), min(steps[-1] for steps, _, _ in filled)
    grid: Floats = np.unique(np.clip(filled[0][0], first, max(first, last)))
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, min(len(grid), max_points)).astype(int))]
    seconds = np.array([np.interp(grid, steps, times) for steps, times, _ in filled]).mean(0)
    values = np.array([np.interp(grid, steps, heights) for steps, _, heights in filled])
    found = {"steps": grid.tolist(), "seconds": seconds.tolist(), "values": values.mean(0).tolist()}
    band = {"low": values.min(0).tolist(), "high": values.max(0).tolist()} if len(filled) > 1 else {}
    return {**found, **band}


def differences(rows: Sequence[Mapping[str, Any]], series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the settings in which the curves' runs differ, then the results.

    Args:
        rows: of the compared runs, see `RunRows`.
        series: the curves.

    Returns:
        For each entry its `key`, and `values`: for each curve the values of its runs.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in OTHERS))
    found = []
    for key in [*(key for key in keys if key not in RESULTS), *RESULTS]:
        values = [[rows[member].get(key) for member in one.members] for one in series]
        present = [value for group in values for value in group if value is not None]
        if not present or isinstance(present[0], dict | list):
            continue
        if key in RESULTS or len({json.dumps(group[0], default=str) for group in values}) > 1:
            found.append({"key": key, "values": values})
    return found
