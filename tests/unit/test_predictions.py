"""The record of predicted and measured steps, as notebooks read it."""

from __future__ import annotations

import json
from statistics import median

import pytest

from workbench import resources
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.codecs import Truncate16
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.papers.studies.predictions import Predictions

RECORD = "records/predictions.json"


def test_cells_are_the_predicted_ones_of_the_papers_algorithms() -> None:
    found = Predictions.read(RECORD)
    content = json.loads((resources.shared("papers").parent / RECORD).read_text())
    told = [row for row in content["rows"] if row["algorithm"] == "Pipe-SGD" and row["hosts"] == 4]
    assert found.errors(4, "Pipe-SGD") == [abs(row["error"]) for row in told]
    assert {cell.algorithm for cell in found.cells} == {"D-Sync", "Pipe-SGD", "Pipe-SGD+T"}
    assert len(found.errors(2)) + len(found.errors(4)) == len(found.cells)
    assert not any(cell.rate_mbit == 200 and cell.hosts == 2 and cell.algorithm == "D-Sync" for cell in found.cells)
    assert set(found.calibrations) == set(found.problems) == set(found.batch_sizes)


def test_the_present_simulator_predicts_the_same_cells() -> None:
    found = Predictions.read(RECORD)
    few = Predictions(
        calibrations=found.calibrations,
        problems=found.problems,
        batch_sizes=found.batch_sizes,
        cells=tuple(cell for cell in found.cells if cell.rate_mbit == 400 and cell.model == "mlp-8mb"),
    )
    again = few.predicted_again(
        {
            "D-Sync": SynchronousSGD(),
            "Pipe-SGD": PipeSGD(),
            "Pipe-SGD+T": PipeSGD(collective=Ring(codec=Truncate16())),
        }
    )
    assert [cell.measured_s for cell in again.cells] == [cell.measured_s for cell in few.cells]
    assert median(abs(cell.error) for cell in again.cells) < 0.3


def test_a_missing_record_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no"):
        Predictions.read("records/nothing.json")
