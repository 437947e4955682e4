"""Parallel coordinates: an axis for each setting that varies and for each result, a line for each run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import plotly.graph_objects as go

from workbench.analysis.runs_table import RESULTS, add_results, key_of, row_of
from workbench.analysis.table import Table
from workbench.errors import ConfigError
from workbench.plots.style import TEMPLATE, escape_text
from workbench.settings import Settings
from workbench.trace.info import MEASURED
from workbench.trace.run import Run
from workbench.trace.store import StoredRun, runs_root

FIRST = ("algorithm", "problem", "runtime", "workers", "network")
SIMULATED = ("stragglers", "timing_only", "detail", "failures")  # of `simulate`, next to the network and the compute
SHOWN_RESULTS = ("accuracy", "loss", "seconds", "bytes_sent")
OF_RANKS = ("departures", "remaining")
# Entries of a record that are no settings.
NOT_SETTINGS = ("run", "created", "label", "folder", "cell", "sweep", "status", "steered", "error", *RESULTS, *OF_RANKS)
MISSING = "\N{EN DASH}"


def parallel(
    runs: Table | Iterable[Any],
    *,
    axes: Iterable[str] = (),
    color: str = "accuracy",
    title: str = "Runs, settings and results",
) -> go.Figure:
    """Draw parallel coordinates over runs. In the browser, drag along an axis to keep the runs within the range.

    Args:
        runs: a table of `runs_table`, a listing, or runs.
        axes: keys to show, from left to right; by default the settings that vary, then accuracy, loss, the problems'
            own metrics, seconds and bytes.
        color: key of the number that colours the lines; no colours if no run has it.
        title: title of the figure.

    Raises:
        ConfigError: there are no runs, or no run has a key.
    """
    rows = _rows(runs)
    if not rows:
        raise ConfigError("no runs to show: give some, such as runs_table(sweep=NAME)")
    known = list(dict.fromkeys(name for row in rows for name in row))
    settings = [name for name in (*FIRST, *known) if name in known and _is_setting(name) and _varies(rows, name)]
    metrics = [name for name in known if not _is_setting(name) and name not in NOT_SETTINGS]  # the problems' own
    keys = list(map(key_of, axes)) or [
        *dict.fromkeys(settings),
        *(
            name
            for name in (*SHOWN_RESULTS[:2], *metrics, *SHOWN_RESULTS[2:])
            if any(row.get(name) is not None for row in rows)
        ),
    ]
    for name in keys:
        if name not in known:
            raise ConfigError(f"no run has {name!r}: choose among {', '.join(known)}")
    values = [row.get(color) for row in rows]
    line: dict[str, Any] = {"color": "#0072B2"}
    if all(isinstance(value, int | float) for value in values) and len(set(values)) > 1:
        line = {"color": values, "colorscale": "Viridis", "showscale": True, "colorbar": {"title": escape_text(color)}}
    figure = go.Figure(go.Parcoords(dimensions=[_axis(rows, name) for name in keys], line=line))
    figure.update_layout(template=TEMPLATE, title=escape_text(title), height=480, margin={"t": 110, "l": 90, "r": 60})
    return figure


def _is_setting(name: str) -> bool:
    """Return whether this key of a row is a setting of the algorithm or the run."""
    return name in (*FIRST, "optimizer", *SIMULATED) or name.startswith("set.") or name in Settings.__slots__


def _rows(runs: Table | Iterable[Any]) -> list[dict[str, Any]]:
    items = list(runs)
    stored = [item if isinstance(item, dict) else row_of(_stored(item)) for item in items]
    rows = add_results(stored, runs_root()) if any("train_loss" not in row for row in stored) else stored
    measured = {"compute": MEASURED}  # measured seconds differ between repetitions, and are no setting
    return [row | measured if str(row.get("compute")).startswith(MEASURED) else row for row in rows]


def _stored(item: Any) -> StoredRun:
    if isinstance(item, StoredRun):
        return item
    run = item if isinstance(item, Run) else item.run
    if run.folder is None:
        raise ConfigError(f"{run.id} is not in a store: save it first, run.save(folder)")
    return StoredRun(run.folder, run.info)


def _varies(rows: list[dict[str, Any]], name: str) -> bool:
    return len({str(row.get(name)) for row in rows}) > 1


def _axis(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    values = [row.get(name) for row in rows]
    if all(map(_is_number, values)):
        return {"label": escape_text(name), "values": values}
    numbers = sorted({value for value in values if _is_number(value)})  # 1 and 1.0 are one number
    texts = sorted({str(value) for value in values if value is not None and not _is_number(value)})
    words = [*map(str, numbers), *texts, *([MISSING] if None in values else [])]
    places = [
        numbers.index(value) if _is_number(value) else words.index(MISSING if value is None else str(value))
        for value in values
    ]
    return {
        "label": escape_text(name),
        "values": places,
        "tickvals": list(range(len(words))),
        "ticktext": [escape_text(word) for word in words],
    }


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
