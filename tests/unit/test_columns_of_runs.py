"""Each argument of a training that varies is a column of the table of runs, of its export and of its frame."""

from __future__ import annotations

import csv
import inspect
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.laws import tiny
from workbench import costs
from workbench.analysis.export import export_runs
from workbench.plots.differences import differences
from workbench.settings import Settings
from workbench.trace.store import runs_root

NO_RESULT = {"created", "run", "folder", "seconds"}
COMPUTE = costs.Compute(forward_s=1e-3, backward_s=1e-3)
BASE: dict[str, Any] = {
    "algorithm": wb.AsyncSGD(),
    "problem": tiny.problem(),
    "workers": 3,
    "network": costs.ethernet_1g,
    "compute": COMPUTE,
    "steps": 2,
    "trace_steps": 0,
    "save": True,
    "optimizer": partial(torch.optim.SGD, lr=0.1),
}
CHANGES: dict[str, Any] = {
    "algorithm": wb.AsyncSGD(shards=2),
    "problem": replace(tiny.problem(), name="another"),
    "workers": 2,
    "network": replace(costs.ethernet_1g, encode_s_per_byte=1e-9),
    "compute": replace(COMPUTE, stragglers=(costs.Lognormal(sigma=0.1),)),
    "timing_only": True,
    "detail": "messages",
    "failures": {2: 0.001},
}
LATER = ("save", "settings")  # no quantity; the settings are varied by `Settings`


def saved(**changes: Any) -> None:
    wb.simulate(**{**BASE, **changes})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    return tmp_path


def varied(store: Path) -> set[str]:
    """Return the columns of the export that differ between the two runs, without results."""
    rows = wb.runs_table(columns=["run"]).rows
    export_runs(rows, store / "out", "csv")
    with (store / "out" / "runs.csv").open() as file:
        first, second = csv.DictReader(file)
    results = {"accuracy", "loss", "train_loss", "samples", "bytes_sent", "seconds", "created", "run", "folder"}
    return {name for name in first if first[name] != second[name]} - results


@pytest.mark.parametrize("name", CHANGES)
def test_each_argument_of_a_simulation_is_a_column(name: str, store: Path) -> None:
    assert {*CHANGES, *LATER} == set(inspect.signature(wb.simulate).parameters), "a new argument needs a change here"
    saved()
    saved(**{name: CHANGES[name]})
    columns = varied(store)
    assert columns, f"{name} varied, and no column shows it"
    expected = {"algorithm": "set.shards", "workers": "workers"}.get(name, name)
    assert expected in columns
    runs = [wb.open_run(row["run"]) for row in wb.runs_table(columns=["run"]).rows]
    assert any(differences(runs)[0]), "a comparison shows it, too"


def test_lambdas_differ_by_their_content(store: Path) -> None:
    for lr in (0.1, 0.2):
        saved(optimizer=lambda parameters, lr=lr: torch.optim.SGD(parameters, lr=lr))
    assert "optimizer" in varied(store)


def test_every_setting_is_a_column(store: Path) -> None:
    saved()
    (row,) = wb.runs_table(columns=["run"]).rows
    assert {item.name for item in fields(Settings)} - {"callbacks"} <= set(row)
    assert row["network"] == str(costs.ethernet_1g) and row["compute"] == str(COMPUTE)
    assert runs_root() == store
    assert wb.runs_table(where=["network~Ethernet"]).rows
