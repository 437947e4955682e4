"""Callbacks and loggers: what they are told, and what happens if they fail."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.laws import tiny
from tests.laws.train import make_job
from workbench.callbacks import Callback, TensorBoard, WandB
from workbench.callbacks.base import Notifier, Row
from workbench.callbacks.scalars import scalars
from workbench.cli.main import main
from workbench.clusters.jobs import pickled
from workbench.errors import ConfigError
from workbench.trace.run import Run

HOW: dict[str, Any] = {"workers": 3, "steps": 5, "batch_size": 3, "evaluate_every": 2}


class Told(Callback):
    def __init__(self, stop_at: int = 10**9) -> None:
        self.said: list[tuple[str, Any]] = []
        self.stop_at = stop_at

    def on_begin(self, run: Run) -> None:
        self.said.append(("begin", run.info["algorithm"]["name"]))

    def on_step(self, row: Row) -> bool:
        self.said.append(("step", dict(row)))
        return row["step"] >= self.stop_at

    def on_evaluation(self, row: Row) -> None:
        self.said.append(("evaluation", dict(row)))

    def on_end(self, run: Run) -> None:
        self.said.append(("end", run.info["status"]))


class Broken(Callback):
    def on_step(self, row: Row) -> None:
        raise OSError("the disk is full")


@pytest.fixture(scope="module")
def run() -> Run:
    return wb.simulate(wb.SynchronousSGD(), tiny.problem(), **HOW)


def test_a_simulation_tells_all_that_happened(run: Run) -> None:
    told = Told()
    again = wb.simulate(wb.SynchronousSGD(), tiny.problem(), callbacks=[told], **HOW)
    kinds = [kind for kind, _ in told.said]
    assert kinds == ["begin", "step", "step", "evaluation", "step", "step", "evaluation", "step", "evaluation", "end"]
    assert [row for kind, row in told.said if kind == "step"] == again.steps()
    assert [row for kind, row in told.said if kind == "evaluation"] == again.evaluations()
    assert told.said[-1] == ("end", "finished")


def test_each_row_is_told_once_when_all_ranks_have_it(run: Run) -> None:
    """The run as a reader sees it while it grows, row by row, with ranks that are ahead of others."""
    told = Told()
    notifier = Notifier([told], lambda text: None)
    lengths = [(0, 0, 0), (1, 0, 0), (2, 2, 1), (4, 3, 3), (8, 5, 8), (8, 8, 8)]
    for length in lengths:
        part = {rank: run.metrics[rank][:number] for rank, number in enumerate(length)}
        notifier.update(replace(run, metrics=part))
    notifier.update(run, ended=True)
    notifier.update(run, ended=True)
    assert [row for kind, row in told.said if kind == "step"] == run.steps()
    assert [row for kind, row in told.said if kind == "evaluation"] == run.evaluations()
    assert [kind for kind, _ in told.said].count("end") == 1


def test_steps_of_those_that_remain_are_told_at_once(run: Run) -> None:
    """Rank 2 has left after step 1: its bytes count on, and nobody waits for its rows."""
    told = Told()
    notifier = Notifier([told], lambda text: None)
    shrunk = replace(run, info={**run.info, "shrunk": [{"step": 2, "ranks": [0, 1]}]})
    for number in (2, 6):
        rows = {rank: run.metrics[rank][: 2 if rank == 2 else number] for rank in range(3)}
        now = replace(run if number == 2 else shrunk, metrics=rows)
        notifier.update(now)
    steps = [row for kind, row in told.said if kind == "step"]
    assert [row["step"] for row in steps] == [0, 1, 2], "those before the newest one of the two"
    assert steps == now.steps()[:3]


def test_evaluations_after_an_asynchronous_training_have_all_bytes() -> None:
    """Rank 0 evaluates kept parameters at the end. By then, the steps of that time were told long ago."""

    def row(step: int, **more: Any) -> dict[str, Any]:
        counts = {"samples": 8 * (step + 1), "bytes_sent": 100 * (step + 1)}
        return {"step": step, "seconds": step + 1.0, **counts, "loss": 1.0, "num_samples": 8, **more}

    share = {"count": 4, "loss_sum": 2.0, "correct": 1, "judged": 4, "shares": 1}
    steps = {rank: [row(step) for step in range(6)] for rank in range(3)}
    run = Run(
        info={"algorithm": {"name": "AsyncSGD"}, "status": "running", "clock": "wall"},
        metrics={rank: rows[:5] for rank, rows in steps.items()},
    )
    whole = {**steps, 0: [*steps[0], row(2, evaluation=share), row(5, evaluation=share)]}
    told = Told()
    notifier = Notifier([told], pytest.fail)
    notifier.update(run)
    ended = Run(info={**run.info, "status": "finished"}, metrics=whole)
    notifier.update(ended, ended=True)
    rows = [row for kind, row in told.said if kind == "evaluation"]
    assert rows == ended.evaluations() and [row["bytes_sent"] for row in rows] == [900, 1800]


def test_a_callback_that_fails_ends_alone(run: Run) -> None:
    told, notes = Told(), list[str]()
    Notifier([Broken(), told], notes.append).update(run, ended=True)
    assert notes == ["callback Broken.on_step failed, and is not called again: OSError: the disk is full"]
    assert [row for kind, row in told.said if kind == "step"] == run.steps()
    with pytest.warns(RuntimeWarning, match=r"callback Broken.on_step failed"):
        wb.simulate(wb.SynchronousSGD(), tiny.problem(), callbacks=[Broken()], **HOW)


def test_what_is_no_callback_is_refused() -> None:
    for wrong in ([print], TensorBoard(), "tensorboard", [TensorBoard]):
        with pytest.raises(ConfigError, match=r"give a list of callbacks, such as \[wb.callbacks.TensorBoard\(\)\]"):
            wb.Settings(steps=1, callbacks=wrong)  # type: ignore[arg-type]


def test_tensorboard_has_the_curves(run: Run, tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    Notifier([TensorBoard(tmp_path)], pytest.fail).update(run, ended=True)
    found = loading.EventAccumulator(str(tmp_path / run.id)).Reload()
    read = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert read == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in run.steps()]
    assert [event.step for event in found.Scalars("test/accuracy")] == [row["step"] for row in run.evaluations()]


LOGS = """
import sys
import workbench as wb
from workbench.callbacks import MLflow, WandB

place = sys.argv[1]
logger = {logger}
how = {{"workers": 2, "steps": 3, "compute": wb.costs.Compute(forward_s=1.0, backward_s=2.0), "callbacks": [logger]}}
print([row["loss"] for row in wb.simulate(wb.SynchronousSGD(), wb.problems.get("digits-softmax"), **how).steps()])
"""


def logged(logger: str, place: Path, **variables: str) -> list[float]:
    """Log a simulation in a process of its own, because the loggers leave hooks and open files. Return its losses."""
    command = [sys.executable, "-c", LOGS.format(logger=logger), str(place)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def test_weights_and_biases_logs_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    own = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    logged('WandB("tests", mode="offline", dir=place)', tmp_path, **own, WANDB_SILENT="true")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"test/accuracy" in content and b"SynchronousSGD" in content


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="no MLflow: pip install mlflow")
def test_mlflow_logs_into_a_database(tmp_path: Path) -> None:
    losses = logged('MLflow("tests", tracking_uri="sqlite:///" + place + "/mlflow.db")', tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        rows = database.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
        assert rows == list(enumerate(losses))
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
        assert ("algorithm", "SynchronousSGD") in database.execute("select key, value from params").fetchall()


def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    notes = list[str]()
    Notifier([WandB("tests")], notes.append).update(run, ended=True)
    assert "pip install 'sgd-workbench[wandb]'" in notes[0]


def test_tags_leave_out_what_is_missing() -> None:
    assert scalars({"step": 1, "seconds": 0.5, "samples": 8, "bytes_sent": 4, "loss": None}) == {
        "train/samples": 8.0,
        "train/bytes_sent": 4.0,
    }


def test_the_command_line_logs_to_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    how = ["--runtime", "simulated", "--problem", "digits-softmax", "--workers", "2", "--steps", "3"]
    seconds = ["--compute", "forward_s=1", "--compute", "backward_s=2"]
    assert main(["train", "synchronous-sgd", *how, *seconds, "--log", "tensorboard"]) == 0
    (folder,) = tmp_path.glob("*/tensorboard")
    found = loading.EventAccumulator(str(folder)).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [0, 1, 2]
    began_s = datetime.fromisoformat(Run.load(folder.parent).info["created"]).timestamp()
    assert found.Scalars("train/loss")[0].wall_time == pytest.approx(began_s, abs=60), "TensorBoard shows the date"


def test_a_logger_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "synchronous-sgd", "--runtime", "simulated", "--log", "tensorbord"]) == 2
    assert "did you mean tensorboard" in capsys.readouterr().err


def test_a_callback_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    broken = Told()
    with (tmp_path / "log").open("w") as file:
        broken.said.append(("file", file))
        job = make_job(
            "torch", 2, wb.SynchronousSGD(), tiny.problem(), wb.Settings(steps=1, callbacks=[Told(), broken])
        )
        with pytest.raises(ConfigError, match=r"callback Told cannot be sent to the ranks: .*in on_begin"):
            pickled(job)
        other = replace(job, problem=replace(job.problem, loss=lambda *_: file), settings=wb.Settings(steps=1))
        with pytest.raises(ConfigError, match=r"this cannot be sent to the ranks: .*inside model= or train="):
            pickled(other)
