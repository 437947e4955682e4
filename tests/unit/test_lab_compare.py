"""Runs on the same axes, as the panel in JupyterLab compares them: repetitions are averaged, differences are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.lab_server import write_run
from workbench.errors import RunNotFound
from workbench.lab.compare_runs import Series, differences, group_of, merged, series_of
from workbench.lab.run_rows import RunRows

CREATED = "2026-01-01T00:00:00+00:00"


def info(
    *, seed: int = 0, lr: float = 0.1, status: str = "finished", name: str = "PipeSGD", **more: Any
) -> dict[str, Any]:
    algorithm = {"name": name, "settings": {"width": 2}}
    return {"algorithm": algorithm, "settings": {"lr": lr, "seed": seed}, "status": status, "num_workers": 2, **more}


def test_only_the_seed_may_differ_in_a_group() -> None:
    assert group_of(info(seed=0)) == group_of(info(seed=1, status="failed"))
    others = [
        info(lr=0.2),
        info(num_workers=4),
        info(name="LocalSGD"),
        info(problem={"name": "other"}),
        info(runtime="mpi"),
        info(notes=["simulated: 1 Gbit/s", "simulated: 2 ms"]),
        info(notes=["simulated: 100 Mbit/s", "simulated: 2 ms"]),
    ]
    assert len({group_of(one) for one in [info(), *others]}) == 1 + len(others)


def test_finished_repetitions_are_one_curve_and_the_others_are_alone() -> None:
    infos = [info(seed=0), info(seed=1), info(seed=2, status="failed"), info(lr=0.2, status="running"), info(seed=3)]
    assert series_of(infos) == [
        Series(label="PipeSGD(width=2), lr=0.1", members=(0, 1, 4)),
        Series(label="PipeSGD(width=2), lr=0.1, seed 2, failed", members=(2,)),
        Series(label="PipeSGD(width=2), lr=0.2", members=(3,)),
    ]


def test_equal_labels_have_a_number() -> None:
    """A setting that no label shows distinguishes these."""
    found = series_of([info(), info(settings={"lr": 0.1, "seed": 0, "clip_norm": 1.0})])
    assert [one.label for one in found] == ["PipeSGD(width=2)", "PipeSGD(width=2) (2)"]


def test_a_mean_curve_covers_the_steps_that_all_have() -> None:
    long = {"steps": [10, 20, 30], "seconds": [1.0, 2.0, 3.0], "loss": [3.0, 2.0, 1.0]}
    short = {"steps": [20, 40], "seconds": [4.0, 8.0], "loss": [4.0, 2.0]}
    found = merged([long, short], "loss", 100)
    assert found["steps"] == [20, 30]
    assert found["values"] == [3.0, 2.0] and found["low"] == [2.0, 1.0] and found["high"] == [4.0, 3.0]
    assert found["seconds"] == [3.0, 4.5], "the mean at the same step"


def test_a_curve_alone_has_no_band_and_few_points() -> None:
    steps = list(range(1, 1001))
    found = merged([{"steps": steps, "seconds": steps, "loss": steps}], "loss", 50)
    assert "low" not in found and len(found["steps"]) == 50 and (found["steps"][0], found["steps"][-1]) == (1, 1000)
    nothing = {"steps": [1], "seconds": [1.0], "loss": [float("nan")]}
    assert merged([nothing], "loss", 50)["values"] == []
    assert merged([nothing, {"steps": [1], "seconds": [1.0], "loss": [2.0]}], "loss", 50)["values"] == [2.0]


def test_settings_that_differ_come_first_then_all_results() -> None:
    rows = [
        {"lr": 0.1, "batch_size": 32, "seed": 0, "accuracy": 0.9},
        {"lr": 0.2, "batch_size": 32, "seed": 1, "accuracy": 0.8},
    ]
    found = differences(rows, [Series(label="a", members=(0,)), Series(label="b", members=(1,))])
    assert found == [{"key": "lr", "values": [[0.1], [0.2]]}, {"key": "accuracy", "values": [[0.9], [0.8]]}]


def test_runs_of_a_store_are_compared(tmp_path: Path) -> None:
    rows = RunRows()
    for seed in range(3):
        losses = (2.0, 1.0 + seed, 0.5)
        write_run(tmp_path, f"r{seed}", created=CREATED, losses=losses, settings={"steps": 3, "lr": 0.1, "seed": seed})
    write_run(tmp_path, "other", created=CREATED, settings={"steps": 3, "lr": 0.2, "seed": 0}, steps_per_epoch=2)
    found = rows.compare([tmp_path / name for name in ("r0", "r1", "r2", "other")], 100)
    first, second = found["series"]
    assert (first["label"], first["runs"]) == ("PipeSGD(width=2), lr=0.1", ["r0", "r1", "r2"])
    assert first["curves"]["train_loss"]["values"] == pytest.approx([2.0, 2.0, 0.5])
    assert first["curves"]["train_loss"]["high"] == pytest.approx([2.0, 3.0, 0.5])
    assert first["curves"]["accuracy"]["values"] == [0.9] and second["runs"] == ["other"]
    assert (first["steps_per_epoch"], second["steps_per_epoch"]) == (None, 2.0)
    keys = {one["key"]: one["values"] for one in found["differences"]}
    assert keys["lr"] == [[0.1] * 3, [0.2]] and keys["accuracy"] == [[0.9] * 3, [0.9]] and "seed" not in keys
    with pytest.raises(RunNotFound):
        rows.compare([tmp_path / "gone"], 100)
