"""A stop ends every algorithm within a few steps: asked for by an evaluation, or by a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.laws import tiny
from tests.laws.train import make_job, run_job, run_on_ranks
from tests.laws.variants import name_of
from workbench.algorithms import (
    ADPSGD,
    DPSGD,
    AsyncSGD,
    BackupSGD,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    PartialAllReduce,
    PipeSGD,
    StaleSynchronousSGD,
    SynchronousSGD,
)
from workbench.callbacks import Callback
from workbench.callbacks.base import Row
from workbench.costs import Compute
from workbench.program import Algorithm
from workbench.runtimes.control.commands import STOP, write_command
from workbench.runtimes.rank.callback_thread import POLL_S
from workbench.settings import Settings
from workbench.trace.run import Run

STEP_S = 0.02
# Algorithm -> the most steps from the one after which rank 0 knows of a stop to the last one.
FAMILIES: dict[Algorithm, int] = {
    SynchronousSGD(): 1,
    PipeSGD(width=3): 3,
    LocalSGD(every=4): 4,
    DPSGD(): 2,
    NoLoCo(every=4): 8,
    ADPSGD(): 4,
    NoCommunication(): 1,
    PartialAllReduce(): 4,
    AsyncSGD(): 4,
    BackupSGD(backups=0): 4,
    StaleSynchronousSGD(bound=1): 4,
}


class StopsAt(Callback):
    """Asks to stop at the first evaluation from a step on, and writes that step."""

    def __init__(self, file: Path, step: int) -> None:
        self.file, self.step = str(file), step

    def on_evaluation(self, row: Row) -> bool:
        if row["step"] < self.step:
            return False
        Path(self.file).write_text(json.dumps(row["step"]))
        return True


@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", FAMILIES, ids=name_of)
def test_an_evaluation_stops_the_run(algorithm: Algorithm, tmp_path: Path) -> None:
    """On two ranks: within the steps of one look at the record, and those that a command takes."""
    settings = Settings(
        steps=400,
        batch_size=3,
        evaluate_every=3,
        timeout_s=60,
        compute=Compute(forward_s=STEP_S / 2, backward_s=STEP_S / 2),
        callbacks=[StopsAt(tmp_path / "asked", 5)],
    )
    job = make_job("torch", 2, algorithm, tiny.problem(), settings)
    run_on_ranks(run_job, job, 2)
    run = Run.load(job.folder)
    assert run.info["status"] == "stopped"
    asked = json.loads((tmp_path / "asked").read_text())
    polls = 2 * POLL_S / STEP_S  # before the thread sees the evaluation, and one more on a busy machine
    assert run.info["result"]["last_step"] - asked <= polls + FAMILIES[algorithm], run.info["result"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", FAMILIES, ids=name_of)
def test_a_command_stops_the_run_within_the_steps_that_it_takes(algorithm: Algorithm) -> None:
    """On two ranks, with the command there from the first step on."""
    settings = Settings(
        steps=400, batch_size=3, evaluate_every=0, timeout_s=60, compute=Compute(forward_s=0.002, backward_s=0.002)
    )
    job = make_job("torch", 2, algorithm, tiny.problem(), settings)
    write_command(Path(job.folder), STOP)
    run_on_ranks(run_job, job, 2)
    run = Run.load(job.folder)
    assert run.info["status"] == "stopped"
    assert run.info["result"]["last_step"] <= FAMILIES[algorithm], run.info["result"]
