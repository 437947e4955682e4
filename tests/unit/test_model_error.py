"""Bands of predictions contain later measurements: on the committed record, and on new simulated runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.analysis.summary import step_seconds
from workbench.calibration import calibrate, predict
from workbench.calibration.model_error import RESIDUALS, band
from workbench.costs import Compute, Lognormal, Network

RECORDS = Path(__file__).parents[2] / "records"
ROWS: list[dict[str, Any]] = [
    {**row, "session": session}
    for session in ("predictions", "predictions-second")
    for row in json.loads((RECORDS / f"{session}.json").read_text())["rows"]
    if not row["fitted"]
]


def residual(row: dict[str, Any]) -> float:
    return math.log(row["measured_s"] / row["predicted_s"])


def test_the_residuals_are_those_of_the_records() -> None:
    assert pytest.approx([residual(row) for row in ROWS], abs=6e-5) == list(RESIDUALS)


@pytest.mark.parametrize(
    "left_out", [("session",), ("model", "hosts", "rate"), ("algorithm",), ("model",), ("hosts",)], ids=" ".join
)
def test_four_of_five_cells_of_a_configuration_left_out_are_in_the_band(left_out: tuple[str, ...]) -> None:
    """Nominal 80 %; two standard deviations of a share of 156 are 6 %. A band of the calibration's uncertainty alone contained 15 of 80."""
    inside = 0
    for row in ROWS:
        others = [residual(other) for other in ROWS if any(other[name] != row[name] for name in left_out)]
        low, high = band(row["predicted_s"], residuals=others)
        inside += low <= row["measured_s"] <= high
    assert inside / len(ROWS) >= 0.74
    assert inside < len(ROWS)  # a band that holds all is too wide to be of use


def test_each_cause_widens_the_band() -> None:
    plain = band(1.0, residuals=[0.05, 0.02, -0.04])
    assert plain[0] < 1 < plain[1]
    varied, drawn = (
        band(1.0, step_sd=0.5, residuals=[0.05, 0.02, -0.04]),
        band(1.0, [0.7, 1.4], residuals=[0.05, 0.02, -0.04]),
    )
    assert varied[0] < plain[0] < plain[1] < varied[1] and drawn[0] < plain[0] < plain[1] < drawn[1]
    assert band(2.0, residuals=()) == (2.0, 2.0)


def test_fresh_runs_are_in_the_band() -> None:
    """Other seeds, workers and algorithms than the calibration had."""
    network = Network(latency_s=2e-4, bandwidth_bytes_per_s=2e7)
    given: dict[str, Any] = {
        "network": network,
        "compute": Compute(forward_s=0.01, backward_s=0.02, stragglers=(Lognormal(sigma=0.2),)),
        "timing_only": True,
    }
    problem = wb.problems.digits_mlp()
    found = calibrate(wb.simulate(wb.LayerwiseSGD(bucket_bytes=0), problem, workers=2, steps=40, **given))
    inside = []
    for algorithm in (wb.SynchronousSGD(), wb.PipeSGD()):
        for workers in (2, 6):
            said = predict(found, algorithm, workers=workers)
            for seed in (11, 12, 13):
                mean_s = step_seconds(
                    wb.simulate(algorithm, problem, workers=workers, steps=9, seed=seed, **given)
                ).mean()
                inside.append(bool(said.low_s <= mean_s <= said.high_s))
    assert sum(inside) >= 0.8 * len(inside)
