"""A measured run above its calibration's prediction, on one time axis that begins with a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from workbench import algorithms
from workbench.analysis.summary import run_overlap
from workbench.analysis.table import seconds
from workbench.calibration.from_run import calibrate
from workbench.calibration.model import Calibration
from workbench.calibration.predict import predicted_run
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.plots.gantt.figures import timelines
from workbench.plots.gantt.layout import step_range
from workbench.program import Algorithm
from workbench.trace.run import Run, as_runs

WARM_UP = 5  # simulated steps before the first one shown: pipelines are then full


def compare_with_prediction(
    run: Run,
    calibration: Calibration | None = None,
    *,
    algorithm: Algorithm | None = None,
    network: Network | str | None = None,
    bandwidth_bytes_per_s: float | None = None,
    steps: slice | None = None,
    ranks: Iterable[int] | None = None,
    links: bool = True,
    critical: bool = False,
) -> go.Figure:
    """Draw some steps of a run, and below them as many simulated steps of the same algorithm on as many workers.

    The simulation uses the run's calibration: where the two differ, the model lacks something. Titles show the mean
    seconds of the steps shown.

    Args:
        run: a run with a trace.
        calibration: None: `workbench.calibration.calibrate(run)`. With its `problem=`, each parameter's share of
            compute is measured too. The calibration of another run shows how far it extrapolates.
        algorithm: the run's algorithm; needed if its record does not hold all its settings.
        network, bandwidth_bytes_per_s: as for `workbench.calibration.predict`; None: as measured.
        steps, ranks, links, critical: as for `timeline`; the steps are those of the run.

    Raises:
        ConfigError: no trace of these steps, no calibration, or unknown settings of the algorithm; the message says
            what to give.
    """
    (run,) = as_runs([run])
    rows = run.spans.table["step"][run.spans.is_kind(["forward"])]
    first, last = step_range(run.id, rows[rows >= 0], steps)
    last = min(last, int(rows.max()) + 1)
    algorithm = algorithm or algorithm_of(run)
    found = calibration or calibrate(run)
    workers = int(run.info.get("num_workers") or len(run.spans.ranks))
    place: dict[str, Any] = {"network": network, "bandwidth_bytes_per_s": bandwidth_bytes_per_s}
    predicted = predicted_run(found, algorithm, workers=workers, steps=WARM_UP + last - first + 1, **place)
    windows = [slice(first, last), slice(WARM_UP, WARM_UP + last - first)]
    names = [
        f"{what}: {run.label}, {seconds(_mean_step_s(one, window))} a step"
        for what, one, window in zip(("measured", "predicted"), (run, predicted), windows, strict=True)
    ]
    return timelines([run, predicted], windows, ranks, links=links, critical=critical, names=names)


def _mean_step_s(run: Run, window: slice) -> float:
    return run_overlap(run, window).per_step().get("window_s", 0.0)


def algorithm_of(run: Run) -> Algorithm:
    """Return the algorithm of a run, from its record.

    Raises:
        ConfigError: the record does not hold all its settings.
    """
    record = run.info.get("algorithm") or {}
    found = algorithms.recorded(record)
    if found is None:
        quiet = record.get("defaults") or ()
        settings = ", ".join(
            f"{name}={value}" for name, value in (record.get("settings") or {}).items() if name not in quiet
        )
        raise ConfigError(
            f"run {run.id} used {record.get('name')}({settings}), and its record does not hold all settings: give "
            "algorithm="
        )
    return found
