"""What a run writes at its end is tried before its first step: a checkpoint, the folder, the room in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.laws import tiny
from workbench.algorithms import SynchronousSGD
from workbench.errors import ConfigError, WorkbenchError
from workbench.replica.local_training import LocalTraining, run_info
from workbench.runtimes.rank import rehearsal
from workbench.runtimes.rank.main import Job, run_rank
from workbench.runtimes.transport.base import SoloTransport
from workbench.settings import Settings
from workbench.trace.run import Run
from workbench.trace.store import new_run

steps: list[int] = []


class Model(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(tiny.NUM_FEATURES, tiny.NUM_CLASSES, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            steps.append(len(steps))
        return super().forward(x)


class Unknown:
    """An object that no checkpoint may hold."""


class Unsafe(torch.optim.SGD):
    """SGD with such an object among its settings."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["owner"] = Unknown()


def train(folder: Path, **settings: Any) -> Run:
    """Train on one real rank, in this process."""
    steps.clear()
    problem, how = tiny.problem(Model), Settings(steps=3, **settings)
    run = new_run(run_info(SynchronousSGD(), problem, how, "torch", 1), folder)
    job = Job(algorithm=SynchronousSGD(), problem=problem, settings=how, runtime="torch", folder=str(run))
    run_rank(job, SoloTransport())
    return Run.load(run)


def test_an_optimizer_whose_state_cannot_be_read_back_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(state\.replica\.optimizer\.param_groups\.0\.owner is a Unknown\).*leave"):
        train(tmp_path, optimizer=Unsafe, checkpoint_every=2)
    assert not steps


def test_without_checkpoints_it_trains_and_the_record_says_so(tmp_path: Path) -> None:
    run = train(tmp_path, optimizer=Unsafe)
    assert len(steps) == 3
    assert any("this run cannot be resumed" in note and "Unknown" in note for note in run.info["notes"])


def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=21 * 8 * 4 - 1))
    train(tmp_path)  # the weights have room
    with pytest.raises(WorkbenchError, match="1 times the weights and 3 checkpoints"):
        train(tmp_path, checkpoint_every=2)
    assert not steps


@pytest.mark.parametrize("settings", [{}, {"checkpoint_every": 2, "ema_decay": 0.9}], ids=["plain", "checkpoints"])
def test_it_leaves_nothing_and_changes_no_number(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(tmp_path, optimizer=tiny.momentum, **settings)
    monkeypatch.setattr("workbench.runtimes.rank.main.rehearse_files", lambda *_: [])
    second = train(tmp_path, optimizer=tiny.momentum, **settings)
    assert first.folder is not None and not list(first.folder.glob(".rehearsal*"))
    losses = [[row.get("loss") for row in run.metrics[0]] for run in (first, second)]
    assert losses[0] == losses[1]
    assert [row["test_loss"] for row in first.evaluations()] == [row["test_loss"] for row in second.evaluations()]


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def test_it_takes_less_than_50_ms(tmp_path: Path) -> None:
    """The fastest of five, of a model of 1 MB."""
    problem = tiny.problem(lambda: torch.nn.Sequential(torch.nn.Linear(6, 10_000), torch.nn.Linear(10_000, 3)).double())
    worker = LocalTraining(SynchronousSGD(), problem, Settings(steps=1), 0, 1, torch.device("cpu"))
    files = min(seconds(lambda: rehearsal.rehearse_files(SynchronousSGD(), worker, 0, 1, tmp_path)) for _ in range(5))
    batch = min(seconds(worker._rehearse_evaluation) for _ in range(5))
    assert files + batch < 0.05
