"""A rank reports what it does to the ranks that wait for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.laws import tiny
from tests.laws.train import make_job
from workbench.algorithms import SynchronousSGD
from workbench.replica.local_training import LocalTraining
from workbench.replica.replica import Replica
from workbench.runtimes.checkpoint.writer import CheckpointWriter
from workbench.runtimes.execution import interpreter
from workbench.runtimes.execution.endpoint import RankClock
from workbench.runtimes.liveness.failure_detector import FailureDetector, read_heartbeat
from workbench.runtimes.liveness.watchdog import describe_place
from workbench.runtimes.rank.main import run_rank
from workbench.runtimes.transport.base import SoloTransport
from workbench.settings import Settings

HOW = Settings(steps=3, batch_size=4, timeout_s=30, evaluate_every=1, checkpoint_every=1, optimizer=tiny.momentum)


class Noted(RankClock):
    """Keeps what was said."""

    seen: list[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activity":
            self.seen.append(value)
        super().__setattr__(name, value)


def test_each_part_of_a_step_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Noted, "seen", seen, raising=False)
    monkeypatch.setattr(interpreter, "RankClock", Noted)
    run_rank(make_job("torch", 1, SynchronousSGD(), tiny.problem(), HOW), SoloTransport())
    step = ["reading data", "in forward", "in backward", "", "", "in the update", ""]
    assert seen[1 : 1 + len(step)] == step
    assert {"in the evaluation", "keeping a checkpoint"} <= set(seen)
    assert seen[-1] == ""


def test_an_error_in_backward_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Noted, "seen", seen, raising=False)
    monkeypatch.setattr(interpreter, "RankClock", Noted)

    def fails(*_: Any) -> Any:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        run_rank(
            make_job("torch", 1, SynchronousSGD(), replace(tiny.problem(test=None), loss=fails), HOW), SoloTransport()
        )
    assert seen[-2:] == ["in forward", ""]


def test_an_error_while_a_checkpoint_is_kept_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Noted, "seen", seen, raising=False)
    monkeypatch.setattr(interpreter, "RankClock", Noted)

    def fails(_: CheckpointWriter) -> None:
        if seen[-1] == "keeping a checkpoint":
            raise OSError("on purpose")

    monkeypatch.setattr(CheckpointWriter, "finish_writing", fails)
    with pytest.raises(OSError, match="on purpose"):
        run_rank(make_job("torch", 1, SynchronousSGD(), tiny.problem(), HOW), SoloTransport())
    assert seen[-2:] == ["keeping a checkpoint", ""]


@pytest.mark.parametrize(
    ("owner", "call", "error", "last"),
    [
        (Replica, "apply", ArithmeticError, ["in the update", ""]),
        (LocalTraining, "evaluate_at", ArithmeticError, ["in the evaluation", ""]),
        (LocalTraining, "evaluate_at", RuntimeError, ["in the evaluation", "", "shrinking to fewer ranks", ""]),
    ],
)
def test_an_error_ends_what_it_ended(
    owner: type, call: str, error: type[Exception], last: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Noted, "seen", seen, raising=False)
    monkeypatch.setattr(interpreter, "RankClock", Noted)

    def fails(*_: Any, **__: Any) -> Any:
        raise error("on purpose")

    monkeypatch.setattr(owner, call, fails)
    with pytest.raises(error, match="on purpose"):
        run_rank(make_job("torch", 1, SynchronousSGD(), tiny.problem(), HOW), SoloTransport())
    assert seen[-len(last) :] == last


def test_the_heartbeat_holds_activity_and_memory(tmp_path: Path) -> None:
    with FailureDetector(tmp_path, 0, 2) as detector:
        detector.begin_training(lambda: 7, lambda: None, None, lambda: "in backward")
        detector._write()
        row = read_heartbeat(tmp_path, 0)
    assert row is not None
    assert describe_place(row) == "in backward of step 7"
    assert row["memory_bytes"] > 10e6
