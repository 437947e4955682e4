"""Metrics of the user's own on real ranks: of shares of the test data, of one rank, and of parameters kept for later."""

from __future__ import annotations

import copyreg
import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws import tiny
from tests.laws.train import on_real_runtimes, train
from workbench.algorithms import AsyncSGD, NoCommunication, SynchronousSGD
from workbench.problems import Metric
from workbench.problems.torchvision_door import torchvision
from workbench.program import Algorithm
from workbench.settings import Settings

HOW = Settings(steps=6, batch_size=3, timeout_s=60, evaluate_every=2)


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def macro_f1() -> Any:
    torchvision()  # torchmetrics imports it
    classification = importlib.import_module("torchmetrics.classification")
    return classification.MulticlassF1Score(tiny.NUM_CLASSES, average="macro")


@on_real_runtimes
@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), AsyncSGD(), NoCommunication()], ids=lambda one: type(one).__name__
)
def test_they_are_those_of_the_whole_test_data(
    algorithm: Algorithm, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of several ranks add up for a mean. F1 is not a mean: one rank measures it on all data.

    F1 on gloo only: each rank takes three seconds to import its library.
    """
    metrics: dict[str, Any] = {"wrong": Metric(function=wrong, better="lower")}
    if runtime == "torch":
        torchvision()
        pytest.importorskip("torchmetrics", reason="needs the extra metrics")
        metrics["f1"] = f1 = macro_f1()
        # A rank imports torchvision first
        monkeypatch.setitem(copyreg.dispatch_table, type(f1), lambda _: (macro_f1, ()))
    problem = replace(tiny.problem(), metrics=metrics, test=tiny.data(19, seed=3))
    run = train(runtime, 2, algorithm, problem, HOW).run
    found = run.evaluations()
    assert [row["step"] for row in found] == [1, 3, 5]
    model = run.model(problem)
    inputs, targets = problem.test
    with torch.no_grad():
        outputs = model(inputs)
    assert found[-1]["wrong"] == pytest.approx(float(wrong(outputs, targets)), abs=1e-12)
    if "f1" in metrics:
        assert found[-1]["f1"] == pytest.approx(float(metrics["f1"](outputs, targets)), abs=1e-6)
    assert all(row["wrong"] == pytest.approx(1 - row["accuracy"]) for row in found)
