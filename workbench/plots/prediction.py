"""A run as it was measured, above what its calibration predicts for the same method: one time axis, from the begin of a step."""

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
from workbench.plots.gantt import timelines
from workbench.plots.layout import step_range
from workbench.program import Algorithm
from workbench.trace.run import Run, as_runs

WARM_UP = 5  # simulated steps before the first that is shown: pipelines are full by then


def beside_prediction(
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
    """The timeline of some steps of a run, and below it as many steps of the same method on as many workers, simulated.

    What is simulated is what was calibrated: where both differ, the model misses something that the run had. Names tell the mean
    seconds of the steps shown.

    Args:
        run: with a trace.
        calibration: None: `workbench.calibration.calibrate(run)`; with its `problem=`, each parameter's part of compute is measured
            too, and one of another run tells how far it carries.
        algorithm: the run's method; needed where its record does not tell all its settings.
        network, bandwidth_bytes_per_s: as for `workbench.calibration.predict`; None: the one that was measured.
        steps, ranks, links, critical: as for `timeline`; steps are the run's.

    Raises:
        ConfigError: no trace there, no calibration of it, or a method that the record does not tell; says what to give.
    """
    (run,) = as_runs([run])
    rows = run.spans.table["step"][run.spans.is_kind(["forward"])]
    first, last = step_range(run.id, rows[rows >= 0], steps)
    last = min(last, int(rows.max()) + 1)
    method = algorithm or method_of(run)
    found = calibration or calibrate(run)
    workers = int(run.info.get("num_workers") or len(run.spans.ranks))
    place: dict[str, Any] = {"network": network, "bandwidth_bytes_per_s": bandwidth_bytes_per_s}
    predicted = predicted_run(found, method, workers=workers, steps=WARM_UP + last - first + 1, **place)
    windows = [slice(first, last), slice(WARM_UP, WARM_UP + last - first)]
    names = [
        f"{what}: {run.label}, {seconds(_mean_step_s(one, window))} a step"
        for what, one, window in zip(("measured", "predicted"), (run, predicted), windows, strict=True)
    ]
    return timelines([run, predicted], windows, ranks, links=links, critical=critical, names=names)


def _mean_step_s(run: Run, window: slice) -> float:
    return run_overlap(run, window).per_step().get("window_s", 0.0)


def method_of(run: Run) -> Algorithm:
    """The method of a run, from its record.

    Raises:
        ConfigError: the record does not tell all of it.
    """
    record = run.info.get("method") or {}
    found = algorithms.recorded(record)
    if found is None:
        quiet = record.get("defaults") or ()
        told = ", ".join(f"{name}={value}" for name, value in (record.get("settings") or {}).items() if name not in quiet)
        raise ConfigError(f"run {run.id} is of {record.get('name')}({told}), of which its record does not tell all: give algorithm=")
    return found
