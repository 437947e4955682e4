"""Metrics of the user's own: functions and torchmetrics objects, in runs, tables, targets and curves."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.laws import tiny
from workbench.analysis import compare
from workbench.analysis.export import METRICS, export_runs
from workbench.analysis.runs_table import BASE, RESULTS, runs_table
from workbench.analysis.summary import time_to
from workbench.errors import ConfigError
from workbench.problems.metrics import TAKEN, Metric
from workbench.problems.torchvision_door import torchvision
from workbench.trace.run import Run

HOW: dict[str, Any] = {"workers": 2, "steps": 6, "batch_size": 3, "evaluate_every": 2}


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def confidence(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.softmax(1).max(1).values.mean())


def trained(algorithm: Any = None, **metrics: Any) -> Run:
    problem = replace(tiny.problem(), metrics=metrics)
    return wb.simulate(algorithm or wb.SynchronousSGD(), problem, **HOW)


def test_a_function_is_averaged_over_the_test_data() -> None:
    run = trained(wrong=Metric(function=wrong, better="lower"), confidence=confidence)
    rows = run.evaluations()
    assert run.metric_names == ("wrong", "confidence")
    assert [row["wrong"] for row in rows] == pytest.approx([1 - row["accuracy"] for row in rows])
    x, y = run.curve("steps", "wrong")
    assert y.tolist() == [row["wrong"] for row in rows] and len(x) == len(rows)
    assert all(0 < row["confidence"] <= 1 for row in rows)


def test_targets_follow_the_direction() -> None:
    run = trained(wrong=Metric(function=wrong, better="lower"), confidence=confidence)
    rows = run.evaluations()
    best = min(row["wrong"] for row in rows)
    met = time_to(run, "wrong", best)
    assert met is not None and met["wrong"] == best
    assert time_to(run, "wrong", best - 1e-9) is None
    assert (
        time_to(run, "confidence", 2.0) is None and (time_to(run, "confidence", 0.0) or {}).items() >= rows[0].items()
    )
    with pytest.raises(ConfigError, match="choose one of accuracy, test_loss, wrong, confidence"):
        time_to(run, "f1", 0.5)


def test_tables_curves_and_frames_show_them() -> None:
    run, plain = trained(wrong=wrong), trained()
    table = compare([run, plain])
    assert [row.get("wrong") for row in table.rows] == [run.evaluations()[-1]["wrong"], None]
    assert "wrong" in str(table) and table.time_to("wrong", 0.0).rows[0]["seconds"] == run.evaluations()[0]["seconds"]
    figure = run.curves(y="wrong")
    assert figure.layout.yaxis.title.text == "wrong"
    pytest.importorskip("pandas")
    assert list(run.to_pandas("evaluations")["wrong"]) == [row["wrong"] for row in run.evaluations()]


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
        ({"top 5": wrong}, "'top 5' is no name"),
        ({"accuracy": wrong}, "the name of another column"),
        ({"wrong": 0.5}, r"a metric is 0.5: give a function of \(outputs, targets\)"),
        ({"error": wrong}, "'error' is the name of another column: choose a different one, such as error_of_model"),
        ({"batch_size": wrong}, "'batch_size' is the name of another column"),
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
    direction: Any = "best"
    with pytest.raises(ConfigError, match="choose higher or lower"):
        Metric(function=wrong, better=direction)


def test_no_column_of_a_table_can_be_a_metric() -> None:
    run = trained()
    columns = {*RESULTS, *BASE, *METRICS, *run.summary(), *run.steps()[0], *run.evaluations()[0], *run.info["settings"]}
    assert columns <= TAKEN


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two runs that measure something of their own, and one that does not."""
    made = {"first": trained(wrong=wrong), "second": trained(wrong=wrong, confidence=confidence), "plain": trained()}
    for name, run in made.items():
        run.save(tmp_path / name)
    return tmp_path


def test_a_table_of_runs_shows_selects_and_sorts_by_them(store: Path) -> None:
    table = runs_table(root=store, sort="-confidence")
    assert next(iter(table))["run"] == "second"
    titles = [column.key for column in table.columns]
    assert titles[-3:] == ["confidence", "wrong", "seconds"]
    assert {row["run"] for row in runs_table(root=store, where=["confidence>0"])} == {"second"}
    assert [column.key for column in runs_table(root=store, where=["run=plain"]).columns][-2:] == ["loss", "seconds"]


def test_exports_have_them(store: Path, tmp_path: Path) -> None:
    runs, metrics = export_runs(runs_table(root=store).rows, tmp_path / "csv", "csv")
    rows = list(csv.DictReader(metrics.read_text().splitlines()))
    second = Run.load(store / "second")
    shares = [row for row in rows if row["run"] == "second" and row["kind"] == "evaluation" and row["step"] == "5"]
    means = [float(row["wrong"]) for row in shares]
    sizes = [int(row["num_samples"]) for row in shares]
    found = sum(mean * size for mean, size in zip(means, sizes, strict=True)) / sum(sizes)
    assert found == pytest.approx(second.evaluations()[-1]["wrong"])
    assert {row["wrong"] for row in rows if row["run"] == "plain"} == {""}
    assert {row["run"]: row["wrong"] for row in csv.DictReader(runs.read_text().splitlines())}["plain"] == ""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra export")
    _, file = export_runs(runs_table(root=store).rows, tmp_path / "parquet", "parquet")
    assert parquet.read_table(file).column("confidence").null_count < len(rows)


def test_figures_of_runs_with_and_without_them(store: Path) -> None:
    runs = [Run.load(store / name) for name in ("first", "second", "plain")]
    figure = wb.plots.curves(runs, y="confidence")
    assert [*figure.data[-1].y] == [row["confidence"] for row in runs[1].evaluations()], "of the run that has it"
    assert wb.plots.convergence(runs).layout.yaxis2.title.text == "test accuracy"
    assert wb.plots.convergence(runs, right="wrong").layout.yaxis2.title.text == "wrong"
    axes = [axis.label for axis in wb.plots.parallel(runs_table(root=store), axes=()).data[0].dimensions]
    assert axes[:3] == ["accuracy", "loss", "wrong"] and "confidence" in axes


def test_a_live_view_lets_choose_among_them() -> None:
    view = wb.plots.LiveCurves(x="steps")
    view.update([trained()], force=True)
    assert view._axes.right.layout.display == "none"
    view.update([trained(wrong=wrong)], force=True)
    assert view._axes.right.layout.display is None
    assert view._axes.right.options == (("test accuracy", "accuracy"), ("wrong", "wrong"), ("test loss", "test_loss"))
    view._axes.right.value = "wrong"
    assert view._figure.layout.yaxis2.title.text == "wrong"
    view.update([trained(wrong=wrong, confidence=confidence)], force=True)
    assert view._axes.right.value == "wrong" and view.static().layout.yaxis2.title.text == "wrong"
