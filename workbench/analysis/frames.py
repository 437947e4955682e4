"""Runs as pandas or polars frames: steps, evaluations, metrics of each rank, spans, messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np

from workbench.analysis.export import METRICS, metrics_rows
from workbench.errors import ConfigError
from workbench.trace.run import Run

What = Literal["steps", "evaluations", "metrics", "spans", "messages"]
PACKAGES = ("pandas", "polars")


def frame(run: Run, what: What = "steps", package: str = "pandas") -> Any:
    """Return a frame of a run.

    Args:
        run: the run.
        what: "steps": one row a step, over all ranks; "evaluations": one row an evaluation; "metrics": one row a step
            or evaluation of each rank; "spans": what each rank did when, in seconds on rank 0's clock; "messages": one
            row for each message whose send and receive are recorded.
        package: "pandas" or "polars".

    Raises:
        ConfigError: the package is missing, or there is no such frame.

    Example:
        >>> import workbench as wb
        >>> run = wb.simulate(wb.SynchronousSGD(), wb.problems.get("digits-softmax"), workers=2, steps=3)
        >>> frame(run, "steps")["step"].tolist()
        [0, 1, 2]
    """
    if what not in COLUMNS:
        raise ConfigError(f"what={what!r}: choose one of {', '.join(get_args(What))}")
    try:
        made = import_module(package)
    except ModuleNotFoundError:
        raise ConfigError(f"{package} is missing: pip install 'sgd-workbench[{package}]'") from None
    return made.DataFrame(dict(COLUMNS[what](run)))


def _of_rows(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _metrics(run: Run) -> dict[str, list[Any]]:
    rows = list(metrics_rows(run))
    return {name: [row[name] for row in rows] for name in (*METRICS, *run.metric_names)}


def _spans(run: Run) -> dict[str, Any]:
    spans = run.spans
    table = spans.table
    plain = {name: table[name] for name in ("rank", "start_s", "end_s", "step", "bucket", "bytes", "peer")}
    return {**plain, "kind": spans.kind_names.tolist(), "lane": spans.lane_names.tolist()}


def _messages(run: Run) -> dict[str, Any]:
    sent, received = run.messages
    out, back = run.spans.table[sent], run.spans.table[received]
    return {
        "from_rank": out["rank"],
        "to_rank": back["rank"],
        "step": out["step"],
        "bucket": out["bucket"],
        "bytes": out["bytes"],
        "send_start_s": out["start_s"],
        "send_end_s": out["end_s"],
        "receive_start_s": back["start_s"],
        "receive_end_s": back["end_s"],
    }


COLUMNS: Mapping[str, Callable[[Run], Mapping[str, list[Any] | np.ndarray]]] = {
    "steps": lambda run: _of_rows(run.steps()),
    "evaluations": lambda run: _of_rows(run.evaluations()),
    "metrics": _metrics,
    "spans": _spans,
    "messages": _messages,
}
