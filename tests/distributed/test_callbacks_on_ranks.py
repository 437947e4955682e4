"""Callbacks of real ranks: a thread of rank 0 tells them, also to stop."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import final

import pytest

from tests.laws import tiny
from tests.laws.train import on_real_runtimes, train
from workbench.algorithms import AsyncSGD, SynchronousSGD
from workbench.callbacks import Callback
from workbench.callbacks.base import Row
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.trace.run import Run

HOW = Settings(steps=6, batch_size=3, timeout_s=60, evaluate_every=2)


@final
class Writes(Callback):
    """Writes what it is told into a file; asks to stop after a step."""

    def __init__(self, file: Path, stop_after: int | None = None) -> None:
        self.file, self.stop_after = str(file), stop_after

    def on_step(self, row: Row) -> bool:
        self._write("step", row)
        return row["step"] == self.stop_after

    def on_evaluation(self, row: Row) -> None:
        self._write("evaluation", row)

    def on_end(self, run: Run) -> None:
        self._write("end", {"status": run.info["status"], "pid": os.getpid()})

    def _write(self, kind: str, row: Row) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps([kind, dict(row)]) + "\n")


def told(file: Path, kind: str) -> list[dict[str, object]]:
    return [row for name, row in map(json.loads, file.read_text().splitlines()) if name == kind]


@on_real_runtimes
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), AsyncSGD()], ids=lambda one: type(one).__name__)
def test_they_are_told_what_the_record_says(algorithm: Algorithm, runtime: str, tmp_path: Path) -> None:
    file = tmp_path / "told"
    run = train(runtime, 2, algorithm, tiny.problem(), replace(HOW, callbacks=[Writes(file)])).run
    assert told(file, "step") == run.steps()
    assert told(file, "evaluation") == run.evaluations()
    (end,) = told(file, "end")
    assert end["status"] == "finished" and end["pid"] == run.headers[0]["pid"]


@on_real_runtimes
def test_one_can_stop_the_run(runtime: str, tmp_path: Path) -> None:
    how = replace(HOW, steps=3000, evaluate_every=0, callbacks=[Writes(tmp_path / "told", stop_after=3)])
    run = train(runtime, 2, SynchronousSGD(), tiny.problem(), how).run
    assert run.info["status"] == "stopped" and 4 <= run.info["result"]["steps"] < 3000
