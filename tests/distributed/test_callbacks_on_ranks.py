"""Callbacks of real ranks: a thread of rank 0 tells them, also to stop."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest

from tests.distributed.test_rejoin import STEPS_OF_FEWER, rejoins, with_another
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
            file.write(json.dumps([os.getpid(), kind, dict(row)]) + "\n")


def told(file: Path, kind: str) -> list[dict[str, object]]:
    return [row for _, name, row in map(json.loads, file.read_text().splitlines()) if name == kind]


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


@on_real_runtimes
def test_they_are_told_that_the_run_failed(runtime: str, tmp_path: Path) -> None:
    file = tmp_path / "told"
    problem = tiny.problem(tiny.Remembered(partial(tiny.FailsAt, ArithmeticError("on purpose"), 3)))
    with pytest.raises(ArithmeticError, match="on purpose"):
        train(runtime, 2, SynchronousSGD(), problem, replace(HOW, callbacks=[Writes(file)]))
    assert [row["step"] for row in told(file, "step")] == [0, 1, 2]
    assert [row["status"] for row in told(file, "end")] == ["failed"]


def test_they_follow_rank_0_to_another_process(tmp_path: Path) -> None:
    """Rank 0 is killed; rank 1 continues as rank 0; then another process is rank 0. Each tells the whole run, in its turn."""
    file = tmp_path / "told"
    found, came, run = with_another(
        SynchronousSGD(), rejoins, replace(STEPS_OF_FEWER, callbacks=[Writes(file)]), victim=0
    )
    for outcome in [*found.values(), came]:
        assert outcome.error is None, outcome.trace
    by: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for pid, kind, row in map(json.loads, file.read_text().splitlines()):
        by.setdefault(pid, []).append((kind, row))
    fewer, more = run.info["shrunk"][0]["step"], run.info["joined"][0]["step"]
    between, last = [*by.values()][-2:]
    steps = [row["step"] for kind, row in between if kind == "step"]
    assert steps == [*range(len(steps))] and fewer < len(steps), "it is told the steps of two ranks while they train"
    assert between[-1][0] == "end" and between[-1][1]["status"] == "running"
    assert [row for kind, row in last if kind == "step"] == run.steps() and len(run.steps()) > more
    assert last[-1][0] == "end" and last[-1][1]["status"] == "finished"
