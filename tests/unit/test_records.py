"""The committed evidence agrees with its numbers, and covers every algorithm."""

from __future__ import annotations

import json
import statistics
from itertools import product
from typing import Any

import pytest

from tests.benchmarks.digits_algorithms import MARGINS, RECORDS, entries, simulate, verdict
from tests.benchmarks.predictions import ALGORITHMS, HOSTS, RATES, prediction
from tests.laws.variants import find_algorithms
from workbench.calibration import Calibration
from workbench.calibration.probe import without_hold_up

ROWS: list[dict[str, Any]] = json.loads((RECORDS / "digits-margins.json").read_text())["rows"]
REFERENCE = next(row for row in ROWS if row["algorithm"] == "SynchronousSGD()")


def test_every_algorithm_was_held_to_a_margin() -> None:
    assert {row["algorithm"].partition("(")[0] for row in ROWS} == {kind.__name__ for kind in find_algorithms()}
    assert {row["algorithm"] for row in ROWS} == {entry.name for entry in entries()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["algorithm"])
def test_the_verdict_is_that_of_the_paired_differences(row: dict[str, Any]) -> None:
    """And the margin is the one that was committed before."""
    entry = next(entry for entry in entries() if entry.name == row["algorithm"])
    assert row["margin"] == MARGINS[entry.margin]
    assert len(row["losses"]) == len(REFERENCE["losses"]) == 10
    mean, half, said = verdict(
        [loss - base for loss, base in zip(row["losses"], REFERENCE["losses"], strict=True)], row["margin"]
    )
    assert (mean, half, said) == (pytest.approx(row["difference"]), pytest.approx(row["half_width"]), row["verdict"])


def test_what_missed_its_margin_is_known() -> None:
    """Eager updates with the default outer step: `EagerDiLoCo` says so, and what to use instead."""
    assert [row["algorithm"] for row in ROWS if row["verdict"] != "met"] == ["EagerDiLoCo(every=12)"]


def test_a_row_is_found_again() -> None:
    found = simulate(entries()[0], seed=0)
    assert found["loss"] == pytest.approx(REFERENCE["losses"][0], rel=1e-4)
    # A ring of 4 ranks sends 2 (p - 1) / p of the gradient, 4 bytes a value
    num_values = REFERENCE["bytes_per_step"] / 4 / (2 * 3 / 4)
    assert found["bytes_per_step"] == REFERENCE["bytes_per_step"] and 17226 < num_values < 17240, (
        "of one rank, and not of the cluster"
    )


def test_verdicts() -> None:
    assert verdict([0.0, 0.01, -0.01, 0.0], 0.1)[2] == "met"
    assert verdict([0.2, 0.21, 0.19, 0.2], 0.1)[2] == "not met"
    assert verdict([0.0, 0.3, -0.3, 0.1], 0.1)[2] == "underpowered"


PREDICTIONS: dict[str, Any] = json.loads((RECORDS / "predictions.json").read_text())


def test_errors_of_predictions_are_those_of_their_rows() -> None:
    """All but the calibrations' own cells; and no algorithm, rate or number of hosts is missing."""
    rows = PREDICTIONS["rows"]
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    errors = sorted(abs(row["error"]) for row in rows if not row["fitted"])
    assert (
        PREDICTIONS["error_median"] == pytest.approx(statistics.median(errors))
        and PREDICTIONS["error_worst"] == errors[-1]
    )
    assert {(row["hosts"], row["rate"], row["algorithm"]) for row in rows} == set(product(HOSTS, RATES, ALGORITHMS))
    assert len(rows) == 2 * len(HOSTS) * len(RATES) * len(ALGORITHMS) and sum(row["fitted"] for row in rows) == 2


def test_predictions_come_true() -> None:
    """5 % at the median, 15 % at worst; and a cell that was measured twice says what it missed by at first."""
    assert PREDICTIONS["error_median"] <= 0.05
    assert PREDICTIONS["error_worst"] <= 0.15
    assert max(abs(error) for error in PREDICTIONS["how"]["measured_again"]["errors_then"].values()) == pytest.approx(
        0.209, abs=1e-3
    )


@pytest.mark.parametrize("name", ["Pipe-SGD, 16-bit hops", "PS-Sync", "layer-wise"])
def test_the_records_predictions_are_those_of_its_calibrations(name: str) -> None:
    """By the present model."""
    row = next(
        row for row in PREDICTIONS["rows"] if (row["algorithm"], row["hosts"], row["rate"]) == (name, 4, "400mbit")
    )
    calibration = without_hold_up(Calibration.from_record(PREDICTIONS["calibrations"][row["model"]]))
    assert prediction(calibration, row)["predicted_s"] == pytest.approx(row["predicted_s"], rel=1e-6)
