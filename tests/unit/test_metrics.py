"""Metrics of the user's own: functions and torchmetrics objects, in runs, tables, targets and curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.laws import tiny
from workbench.analysis import compare
from workbench.analysis.summary import time_to
from workbench.errors import ConfigError
from workbench.problems.metrics import Metric
from workbench.problems.torchvision_door import torchvision
from workbench.trace.run import Run

HOW: dict[str, Any] = {"workers": 2, "steps": 6, "batch_size": 3, "evaluate_every": 2}


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def confidence(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.softmax(1).max(1).values.mean())


def trained(algorithm: Any = None, **metrics: Any) -> Run:
    problem = replace(tiny.problem(), metrics=metrics)
    return wb.simulate(algorithm or wb.SynchronousSGD(), problem, **HOW)


def test_a_function_is_averaged_over_the_test_data() -> None:
    run = trained(error=Metric(function=error, better="lower"), confidence=confidence)
    rows = run.evaluations()
    assert run.metric_names == ("error", "confidence")
    assert [row["error"] for row in rows] == pytest.approx([1 - row["accuracy"] for row in rows])
    x, y = run.curve("steps", "error")
    assert y.tolist() == [row["error"] for row in rows] and len(x) == len(rows)
    assert all(0 < row["confidence"] <= 1 for row in rows)


def test_targets_follow_the_direction() -> None:
    run = trained(error=Metric(function=error, better="lower"), confidence=confidence)
    rows = run.evaluations()
    best = min(row["error"] for row in rows)
    met = time_to(run, "error", best)
    assert met is not None and met["error"] == best
    assert time_to(run, "error", best - 1e-9) is None
    assert time_to(run, "confidence", 2.0) is None and time_to(run, "confidence", 0.0) == rows[0]
    with pytest.raises(ConfigError, match="choose one of accuracy, test_loss, error, confidence"):
        time_to(run, "f1", 0.5)


def test_tables_curves_and_frames_show_them() -> None:
    run, plain = trained(error=error), trained()
    table = compare([run, plain])
    assert [row.get("error") for row in table.rows] == [run.evaluations()[-1]["error"], None]
    assert "error" in str(table) and table.time_to("error", 0.0).rows[0]["seconds"] == run.evaluations()[0]["seconds"]
    figure = run.curves(y="error")
    assert figure.layout.yaxis.title.text == "error"
    pytest.importorskip("pandas")
    assert list(run.to_pandas("evaluations")["error"]) == [row["error"] for row in run.evaluations()]


@pytest.mark.parametrize("algorithm", [wb.SynchronousSGD(), wb.AsyncSGD(), wb.LocalSGD(every=2)], ids=str)
def test_torchmetrics_see_all_test_data(algorithm: Any) -> None:
    torchvision()  # torchmetrics imports it
    torchmetrics = pytest.importorskip("torchmetrics")
    rows = trained(
        algorithm,
        share=torchmetrics.Accuracy(task="multiclass", num_classes=3),
        f1=torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
    ).evaluations()
    assert [row["share"] for row in rows] == pytest.approx([row["accuracy"] for row in rows], abs=1e-6)
    assert all(0 <= row["f1"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"top 5": error}, "'top 5' is no name"),
        ({"accuracy": error}, "the name of another column"),
        ({"error": 0.5}, r"a metric is 0.5: give a function of \(outputs, targets\)"),
        (
            {"rows": lambda outputs, targets: outputs},
            r"metric rows returned a tensor of shape \(9, 3\) on a batch of 9",
        ),
        ({"words": lambda outputs, targets: "good"}, "metric words returned 'good'"),
        ({"nan": lambda outputs, targets: torch.tensor(float("nan"))}, "metric nan is nan on a batch of 9 samples"),
    ],
)
def test_what_is_no_number_is_refused(metrics: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(**metrics)


def test_a_direction_that_there_is_not_is_refused() -> None:
    wrong: Any = "best"
    with pytest.raises(ConfigError, match="choose higher or lower"):
        Metric(function=error, better=wrong)
