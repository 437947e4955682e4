"""Evaluations that wait for a run's end are in its folder: memory stays bounded, and they can be made after a failed run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workbench import problems
from workbench.algorithms import AsyncSGD, SynchronousSGD
from workbench.errors import ConfigError
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.rank.pending_evaluations import PendingEvaluations, evaluate_left, evaluated
from workbench.settings import Settings
from workbench.trace.processes import SILENT_S
from workbench.trace.recorder import FileRecorder
from workbench.trace.run import PENDING_FOLDER, Run
from workbench.trace.store import new_run, update_run

PROBLEM = problems.get("digits-softmax")


def row_of(step: int) -> dict[str, object]:
    return {"step": step, "seconds": 0.1 * step, "samples": 32 * step, "bytes_sent": 100 * step}


def a_worker() -> LocalTraining:
    return LocalTraining(AsyncSGD(), PROBLEM, Settings(steps=9), 0, 2, torch.device("cpu"))


def begin(tmp_path: Path, steps: range) -> tuple[Path, list[dict[str, object]]]:
    """A run of two ranks whose evaluations wait; what each of them is to say."""
    info = {"algorithm": {"name": "AsyncSGD"}, "problem": {"name": PROBLEM.name}, "num_workers": 2}
    folder = new_run(info, tmp_path)
    worker, due, right = a_worker(), PendingEvaluations(folder), []
    for rank in range(2):
        recorder = FileRecorder(folder, rank, {})
        for step in steps:
            recorder.metrics({**row_of(step), "loss": 1.0, "num_samples": 16, "staleness": 0, "lr": 0.1})
        recorder.close()
    for step in steps:
        worker.replica.write_parameters(
            torch.full((worker.replica.layout.parameter_numel,), 0.01).cumsum(0).sin() * step
        )
        due.add(row_of(step), worker.snapshot())
        right.append(evaluated(worker, row_of(step), worker.snapshot()))
    return folder, right


def test_snapshots_lie_in_the_folder_and_not_in_memory(tmp_path: Path) -> None:
    folder, right = begin(tmp_path, range(1, 6))
    assert len(list((folder / PENDING_FOLDER).iterdir())) == 5
    due = PendingEvaluations(folder)
    assert set(vars(due)) == {"_folder", "_lock"}, "nothing else is held"
    found = []
    for number, (row, snapshot) in enumerate(due.take()):
        assert len(list((folder / PENDING_FOLDER).iterdir())) == 5 - number, (
            "a file goes once its evaluation has been recorded"
        )
        found.append(evaluated(a_worker(), row, snapshot))
    assert found == right and len({row["evaluation"]["loss_sum"] for row in found}) == 5
    assert not (folder / PENDING_FOLDER).exists()


def test_a_failed_run_keeps_what_was_evaluated_and_says_how_to_get_the_rest(tmp_path: Path) -> None:
    folder, right = begin(tmp_path, range(1, 6))
    recorder = FileRecorder(folder, 0, {}, extends=True)
    for number, (row, snapshot) in enumerate(PendingEvaluations(folder).take()):
        if number == 2:
            break  # the crash
        recorder.metrics(evaluated(a_worker(), row, snapshot))
        recorder.end_step()
    recorder.close()
    update_run(folder, status="failed", error="a rank was lost")
    run = Run.load(folder)
    assert [row["step"] for row in run.evaluations()] == [1, 2]
    (note,) = run.info["notes"]
    assert (
        note == run.waiting == f"3 evaluations wait in {PENDING_FOLDER}/: `workbench evaluate {folder.name}` makes them"
    )
    with pytest.raises(ConfigError, match="run of AsyncSGD"):
        evaluate_left(folder, SynchronousSGD(), PROBLEM)
    assert evaluate_left(folder, AsyncSGD(), PROBLEM) == 3
    run = Run.load(folder)
    assert not run.info.get("notes")
    found = [row for row in run.metrics[0] if "evaluation" in row]
    assert found == json.loads(json.dumps(right))
    assert [row["step"] for row in run.evaluations()] == [1, 2, 3, 4, 5]


def test_a_lost_run_stays_lost_while_its_evaluations_are_made(tmp_path: Path) -> None:
    folder, _ = begin(tmp_path, range(1, 4))
    update_run(folder, process={"host": "another", "pid": 1})
    damaged = folder / PENDING_FOLDER / "step-00000002.pt"
    kept = damaged.read_bytes()
    damaged.write_bytes(b"")
    long_ago = time.time() - 2 * SILENT_S
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    with pytest.raises(ConfigError, match=r"step-00000002\.pt is damaged"):
        evaluate_left(folder, AsyncSGD(), PROBLEM)
    assert Run.load(folder).info["status"] == "lost"  # its evaluation of step 1 was made
    damaged.write_bytes(kept)
    assert evaluate_left(folder, AsyncSGD(), PROBLEM) == 2
    run = Run.load(folder)
    assert run.info["status"] == "lost" and [row["step"] for row in run.evaluations()] == [1, 2, 3]


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("no zip file")


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_row(path: Path) -> None:
    torch.save({"format": 1}, path)


def a_list(path: Path) -> None:
    torch.save([1, 2], path)


def a_row_without_a_step(path: Path) -> None:
    torch.save({"row": {}, "snapshot": None}, path)


@pytest.mark.parametrize("damage", [nothing, text, half, no_row, a_list, a_row_without_a_step])
def test_a_damaged_file_is_named_and_the_others_are_kept(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder, _ = begin(tmp_path, range(1, 4))
    update_run(folder, status="killed")
    path = folder / PENDING_FOLDER / "step-00000002.pt"
    damage(path)
    with pytest.raises(ConfigError, match=r"step-00000002\.pt is damaged.* remove the file"):
        evaluate_left(folder, AsyncSGD(), PROBLEM)
    path.unlink()
    assert evaluate_left(folder, AsyncSGD(), PROBLEM) == 1
    assert [row["step"] for row in Run.load(folder).evaluations()] == [1, 3]


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """The error does not say to remove the file."""
    folder, _ = begin(tmp_path, range(1, 3))
    update_run(folder, status="killed")
    path = folder / PENDING_FOLDER / "step-00000001.pt"
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        evaluate_left(folder, AsyncSGD(), PROBLEM)


def test_a_draft_of_a_killed_writer_is_no_evaluation(tmp_path: Path) -> None:
    folder, _ = begin(tmp_path, range(1, 3))
    update_run(folder, status="killed")
    (folder / PENDING_FOLDER / "step-00000007.tmp").write_bytes(b"half")
    assert evaluate_left(folder, AsyncSGD(), PROBLEM) == 2
    assert not (folder / PENDING_FOLDER).exists()


def test_no_evaluation_is_made_twice_nor_of_another_model_nor_beside_the_run_itself(tmp_path: Path) -> None:
    folder, right = begin(tmp_path, range(1, 4))
    with pytest.raises(ConfigError, match="makes its evaluations itself"):
        evaluate_left(folder, AsyncSGD(), PROBLEM)
    update_run(folder, status="killed", model={"shapes": [["weight", [1]]]})
    with pytest.raises(ConfigError, match="other sizes"):
        evaluate_left(folder, AsyncSGD(), PROBLEM)
    update_run(folder, model=None)
    recorder = FileRecorder(folder, 0, {}, extends=True)
    recorder.metrics(right[0])  # and then it was killed, before the file was removed
    recorder.close()
    assert evaluate_left(folder, AsyncSGD(), PROBLEM) == 2
    assert [row["step"] for row in Run.load(folder).evaluations()] == [1, 2, 3]
