"""Staleness of gradients by bucket: as recorded by servers, or as if workers read all parameters when a step begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.trace.run import Run

IntArray = NDArray[np.int64]


def staleness_by_bucket(run: Run, *, skip: float = 0.25) -> dict[int, IntArray]:
    """Return bucket -> staleness of each gradient that servers applied, in updates of that bucket, in order.

    Args:
        skip: share of each bucket's first updates to leave out, because at first no gradient is stale.

    Raises:
        ConfigError: no server recorded an update.
    """
    return {
        bucket: _steady([value for row in rows for value in row["staleness"]], skip)
        for bucket, rows in _by_bucket(run).items()
    }


def staleness_if_read_first(run: Run, *, skip: float = 0.25) -> dict[int, IntArray]:
    """Return the staleness if workers read all parameters when a step begins, not each bucket in reply to its push.

    It is the number of the bucket's updates between the begin of the worker's step and the use of its gradient, in the
    record of one simulated run. If messages of parameters take no time, an earlier read does not change the times of
    the run, so the count is exact. Otherwise the count begins when the step begins, not earlier when the parameters
    are sent.

    Raises:
        ConfigError: the run was on real ranks, whose clocks differ; it has spans of some steps only; or an update did
            not use exactly one gradient.
    """
    if run.info.get("clock") != "virtual":
        raise ConfigError("ranks of a real run have different clocks: give a simulated run")
    began = _step_begins(run)
    found = {}
    for bucket, rows in _by_bucket(run).items():
        if any(len(row["sources"]) != 1 for row in rows):
            raise ConfigError("an update did not use exactly one gradient: give a run of AsyncSGD without a cutoff")
        ends = np.array([row["seconds"] for row in rows])
        taken: dict[int, int] = {}
        counted = []
        for position, row in enumerate(rows):
            source = row["sources"][0]
            step = taken.get(source, 0)
            taken[source] = step + 1
            if step >= len(began.get(source, ())):
                raise ConfigError("spans of all steps are needed: set trace_steps=None")
            counted.append(position - int(np.searchsorted(ends, began[source][step], side="right")))
        found[bucket] = _steady(counted, skip)
    return found


def mean_by_layer(staleness: Sequence[Mapping[int, IntArray]]) -> dict[int, list[float]]:
    """Return layer (counted from the input) -> mean staleness in each run, if every layer is a bucket.

    Bucket 0 is the layer next to the output, whose gradient is computed first.

    >>> mean_by_layer([{0: np.array([1, 3]), 1: np.array([4])}])
    {1: [2.0], 0: [4.0]}
    """
    top = len(staleness[0]) - 1
    return {top - bucket: [float(one[bucket].mean()) for one in staleness] for bucket in staleness[0]}


def _by_bucket(run: Run) -> dict[int, list[dict[str, Any]]]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in run.updates():
        rows.setdefault(row["bucket"], []).append(row)
    if not rows:
        raise ConfigError("no server recorded an update: give a run of an algorithm with parameter servers")
    return dict(sorted(rows.items()))


def _step_begins(run: Run) -> dict[int, NDArray[np.float64]]:
    """Return rank -> the begin of each of its steps, by its first forward span."""
    table = run.spans.table[run.spans.kind_names == "forward"]
    found = {}
    for rank in np.unique(table["rank"]).tolist():
        mine = table[table["rank"] == rank]
        _, first = np.unique(mine["step"], return_index=True)
        found[rank] = np.sort(mine["start_s"][first])
    return found


def _steady(values: list[int], skip: float) -> IntArray:
    return np.array(values[int(skip * len(values)) :], np.int64)


__all__ = ["mean_by_layer", "staleness_by_bucket", "staleness_if_read_first"]
