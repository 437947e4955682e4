"""The committed evidence says what its numbers say, and is of every method."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.digits_methods import MARGINS, RECORDS, entries, verdict
from tests.laws.variants import find_algorithms

ROWS: list[dict[str, Any]] = json.loads((RECORDS / "digits-margins.json").read_text())["rows"]
REFERENCE = next(row for row in ROWS if row["method"] == "SynchronousSGD()")


def test_every_method_was_held_to_a_margin() -> None:
    assert {row["method"].partition("(")[0] for row in ROWS} == {kind.__name__ for kind in find_algorithms()}
    assert {row["method"] for row in ROWS} == {entry.name for entry in entries()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["method"])
def test_the_verdict_is_that_of_the_paired_differences(row: dict[str, Any]) -> None:
    """And the margin is the one that was committed before."""
    entry = next(entry for entry in entries() if entry.name == row["method"])
    assert row["margin"] == MARGINS[entry.margin]
    assert len(row["losses"]) == len(REFERENCE["losses"]) == 10
    mean, half, said = verdict([loss - base for loss, base in zip(row["losses"], REFERENCE["losses"], strict=True)], row["margin"])
    assert (mean, half, said) == (pytest.approx(row["difference"]), pytest.approx(row["half_width"]), row["verdict"])


def test_what_missed_its_margin_is_known() -> None:
    """Eager updates with the default outer step: `DiLoCo` says so, and what to use instead."""
    assert [row["method"] for row in ROWS if row["verdict"] != "met"] == ["DiLoCo(every=12, eager=True)"]


def test_verdicts() -> None:
    assert verdict([0.0, 0.01, -0.01, 0.0], 0.1)[2] == "met"
    assert verdict([0.2, 0.21, 0.19, 0.2], 0.1)[2] == "not met"
    assert verdict([0.0, 0.3, -0.3, 0.1], 0.1)[2] == "underpowered"
