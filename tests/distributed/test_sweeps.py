"""Sweeps with real processes: finished cells are skipped, unfinished ones run again, no process is left, the exit status is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forked
from tests.waiting import within
from workbench.experiments import read_grid, sweep
from workbench.experiments.sweep_result import states
from workbench.trace import list_runs
from workbench.trace.info import read_info
from workbench.trace.processes import process_is_alive

QUICK = {"problem": "digits-mlp", "runtime": "simulated", "timing_only": True, "steps": 3}
pytestmark = pytest.mark.usefixtures("forked_starts", "runs", "no_process_left")


def sweeper(grid: str, *options: str) -> subprocess.Popen[str]:
    """`workbench sweep`."""
    command = forked("-m", "workbench", "sweep", grid, *options)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write(folder: Path, grid: dict[str, Any]) -> str:
    path = folder / "grid.yaml"
    path.write_text(json.dumps(grid))  # JSON is YAML
    return str(path)


def cells(runs: Path, name: str = "grid") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((runs / "sweeps" / name).glob("*-???.json"))]


@pytest.mark.timeout(200)
def test_a_sweep_runs_each_cell_once_and_goes_on_where_it_stopped(runs: Path, tmp_path: Path) -> None:
    long = {"timing_only": False, "steps": 40, "algorithm": "synchronous-sgd", "evaluate_every": 0}
    grid = {
        "name": "study",
        "base": QUICK,
        "axes": {"algorithm": ["dear", {"pipe-sgd": {"width": 3}}]},
        "include": [{**long, "lr": 1e30}],
    }
    first = sweep(grid, jobs=2)
    assert [item.state for item in first.cells] == ["finished", "finished", "failed"]
    assert "Diverged" in first.failed[0].error or "learning rate" in first.failed[0].error
    assert first.exit_status == 1
    told = {run.id: run.info["sweep"] for run in list_runs()}
    assert told[first.cells[1].runs[0]] == {
        "id": "study",
        "cell": first.cells[1].cell.key,
        "attempt": 0,
        "axes": {"algorithm": "pipe-sgd", "timing_only": True, "steps": 3, "set.width": 3},
    }
    again = sweep(grid)
    assert [item.runs for item in again.cells] == [item.runs for item in first.cells], "nothing is run twice"
    shutil.rmtree(runs / first.cells[0].runs[0])
    third = sweep({**grid, "include": [*grid["include"], {"algorithm": "local-sgd"}]}, retry_failed=True)  # type: ignore[misc]
    assert [item.state for item in third.cells] == ["finished", "finished", "failed", "finished"]
    assert [item.attempt.number for item in third.cells if item.attempt] == [1, 0, 1, 0]


@pytest.mark.mpi
@pytest.mark.timeout(200)
def test_killed_interrupted_and_too_slow(runs: Path, tmp_path: Path) -> None:
    """A cell without an end: the sweeper is killed, then interrupted, then the cell reaches its time limit."""
    base = {"algorithm": "dear", "runtime": "mpi", "workers": 2, "steps": 10**6, "evaluate_every": 0}
    for number, sign, status in ((0, signal.SIGKILL, -signal.SIGKILL), (1, signal.SIGINT, 130)):
        process = subprocess.Popen(
            [*forked("-m", "workbench", "sweep"), write(tmp_path, {"base": base})], stderr=subprocess.PIPE, text=True
        )
        wait_for_steps(runs, number, process)
        process.send_signal(sign)
        process.communicate(timeout=60)
        assert process.returncode == status
    assert [cell["status"] for cell in cells(runs)] == ["running", "interrupted"], (
        "nobody was left to say that it was killed"
    )
    grid = read_grid({"name": "grid", "base": base, "timeout_s": 6})
    assert [item.state for item in states(grid)] == ["open"]
    (found,) = sweep(grid).failed
    assert "not ended after 6 s" in found.error
    assert [cell["status"] for cell in cells(runs)][2:] == ["failed"]
    assert {run.status for run in list_runs()} == {"failed"}, "no run says that it is running"


@pytest.mark.timeout(200)
def test_simulated_cells_end_with_a_sweeper_that_is_killed(runs: Path, tmp_path: Path) -> None:
    """They are children of a server, not of the sweeper; what they were doing is done by the next."""
    long = {"problem": "digits-mlp", "runtime": "simulated", "algorithm": "dear", "steps": 10**6}
    process = sweeper(write(tmp_path, {"base": long}))
    names = within(90, lambda: [path.read_text().strip() for path in (runs / "sweeps" / "grid").glob("*.runs")], any)
    cell = read_info(runs / names[0])["process"]
    process.kill()
    process.communicate(timeout=60)
    assert within(60, lambda: not process_is_alive(cell)), (
        "the server ends the cell; until then it may write that it starts"
    )
    found = sweep({"name": "grid", "base": long, "timeout_s": 4})
    assert [(item.state, item.attempt.number) for item in found.cells if item.attempt] == [("failed", 1)]
    assert "not ended after 4 s" in found.failed[0].error
    assert {run.status for run in list_runs()} == {"failed"}


@pytest.mark.timeout(200)
def test_two_sweepers_share_the_cells(runs: Path, tmp_path: Path) -> None:
    grid = write(tmp_path, {"base": {**QUICK, "algorithm": "dear"}, "axes": {"seed": list(range(6))}})
    both = [sweeper(grid, "--json") for _ in range(2)]
    for process in both:
        out, told = process.communicate(timeout=150)
        assert process.returncode == 0, told
        assert [json.loads(line)["state"] for line in out.splitlines()] == ["finished"] * 6
    assert len(cells(runs)) == len(list_runs()) == 6
    assert len({cell["pid"] for cell in cells(runs)}) == 2, "both took part"


@pytest.mark.notebooks
@pytest.mark.timeout(200)
def test_a_sweep_of_a_notebook(runs: Path, tmp_path: Path) -> None:
    import nbformat

    parameters = nbformat.v4.new_code_cell(
        "one: int = 1  # any\nword: str = ''  # any", metadata={"tags": ["parameters"]}
    )
    code = nbformat.v4.new_code_cell("assert one < 3\nprint(one + 1, type(word))")
    notebook = nbformat.v4.new_notebook(cells=[parameters, code])
    notebook.metadata["kernelspec"] = {"name": "workbench", "display_name": "Workbench", "language": "python"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    grid = {"name": "books", "notebook": str(tmp_path / "in.ipynb"), "base": {"word": "2"}, "axes": {"one": [2, 3]}}
    found = sweep(grid, jobs=2)
    assert [item.state for item in found.cells] == ["finished", "failed"]
    assert "AssertionError" in found.failed[0].error
    executed = runs / "sweeps" / "books" / f"{found.cells[0].cell.key}-000.ipynb"
    assert nbformat.read(executed, as_version=4).cells[-1].outputs[0]["text"] == "3 <class 'str'>\n"
    assert sweep(grid).cells[0].attempt == found.cells[0].attempt, "done is done"


def wait_for_steps(runs: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Wait until the run of that attempt has taken steps."""
    deadline = time.monotonic() + 90
    while True:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        for path in (runs / "sweeps" / "grid").glob(f"*-{number:03d}.runs"):
            metrics = runs / path.read_text().strip() / "metrics-00000.jsonl"
            if metrics.exists() and os.stat(metrics).st_size > 2000:
                return
        time.sleep(0.1)
