"""Runs that earlier versions wrote, of real ranks (gloo, MPI) and simulated: their metrics and traces are read as any run's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import workbench as wb
from workbench.analysis.runs_table import runs_table
from workbench.runtimes.simulator.recorded_answers import RecordedAnswers
from workbench.trace.index import state_of
from workbench.trace.run import Run
from workbench.trace.store import INDEX_NAME, update_run

RUNS = sorted((Path(__file__).parent / "old_runs").iterdir())
EXPECTED = {  # label, number of ranks
    "asyncsgd": ("AsyncSGD", 2),
    "diloco": ("DiLoCo(every=2, eager)", 2),
    "pipesgd": ("PipeSGD(width=2)", 2),
}


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_an_old_run_is_shown(folder: Path) -> None:
    run = Run.load(folder)
    label, num_ranks = EXPECTED[folder.name]
    assert (run.label, len(run.metrics), run.info["status"]) == (label, num_ranks, "finished")
    assert [row["step"] for row in run.metrics[0] if "evaluation" not in row] == [0, 1, 2, 3]
    shown = run.summary()
    assert (shown["steps"], shown["workers"], shown["accuracy"]) == (4, num_ranks, run.evaluations()[-1]["accuracy"])
    for view in (run.overlap, run.critical_path, run.parts, run.timeline, run.per_step, run.curves):
        assert view() is not None
    assert label in str(wb.compare([run]))


def test_an_old_run_has_the_answers_of_each_task() -> None:
    events = Run.load(Path(__file__).parent / "old_runs" / "asyncsgd").events
    recorded = RecordedAnswers(events[0], rank=0, task=1)
    assert [recorded.source() for _ in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, -1]


def test_the_method_of_an_old_run_is_its_algorithm(tmp_path: Path) -> None:
    """Format 1 calls it `method`, in `run.json` and in the cache of the store."""
    cached = []
    for folder in RUNS:
        file = shutil.copytree(folder, tmp_path / folder.name) / "run.json"
        os.utime(file, (1e9, 1e9))
        old = json.loads(file.read_text())
        assert "method" in old and "algorithm" not in old, "these files stay as they were written"
        assert Run.load(folder).info["algorithm"] == old["method"]
        assert "method" not in Run.load(folder).info
        cached.append(json.dumps([1, folder.name, [state_of(file)], old]))
    (tmp_path / INDEX_NAME).write_text("\n".join(cached) + "\n")
    for _ in range(2):  # read, and from the cache
        rows = runs_table(where=["algorithm!=none"], sort="algorithm", root=tmp_path).rows
        assert [row["algorithm"] for row in rows] == ["AsyncSGD", "DiLoCo", "PipeSGD"]
    update_run(tmp_path / "pipesgd", notes=[])
    new = json.loads((tmp_path / "pipesgd" / "run.json").read_text())
    assert (new["algorithm"]["name"], "method" in new, new["format"]) == ("PipeSGD", False, 2)
