"""The notebooks that come with the package: how they are written, and that they run on real engines."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from tests.forked import forked
from tests.notebooks.from_records import accuracy_of, step_seconds_of
from workbench import resources
from workbench.experiments.notebooks import run_notebook, tagged_text

NOTEBOOKS = [resources.notebook(name) for name in resources.notebooks()]
SMALL = {"workers": 2, "epochs": 2, "simulated_workers": 16}
PARAMETER = re.compile(r"^[a-z_]+: (int|float|str|bool|dict|(list|dict)\[[\w\[\], ]+\]) = .+  # \S.*$")

pytestmark = pytest.mark.notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_written_as_the_house_wants_it(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == ("workbench-mpi" if "mpi-kernel" in path.stem else "workbench")
    assert path.stat().st_size < 500_000
    assert notebook.cells[0].cell_type == "markdown"
    assert "?" in notebook.cells[0].source.splitlines()[0], "a notebook asks one question first"
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    for line in parameters.source.splitlines():
        assert PARAMETER.match(line), f"{line!r}: a parameter has a type and says what it is"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_the_tour_runs_and_shows_what_it_promises(runs: Path, tmp_path: Path) -> None:
    executed = run_notebook(resources.notebook("00-tour"), tmp_path / "tour.ipynb", SMALL, timeout_s=240)
    table = tagged_text(executed, "table")
    for algorithm in ("SynchronousSGD", "LayerwiseSGD", "PipeSGD"):
        assert algorithm in table
        assert algorithm in tagged_text(executed, "simulated")
    assert "On 2 ranks here" in tagged_text(executed, "answer")
    figures = [
        output.data["application/vnd.plotly.v1+json"]
        for cell in nbformat.read(executed, as_version=4).cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(figures) >= 7, "one curve a run, two comparisons, two timelines, one of overlap"
    assert all(figure["data"] for figure in figures)
    assert executed.stat().st_size < 1_000_000
    found = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    assert sorted(info["algorithm"]["name"] for info in found) == [
        "LayerwiseSGD",
        "PipeSGD",
        "PipeSGD",
        "SynchronousSGD",
    ]
    assert all(info["status"] == "finished" for info in found)
    check_answer(runs, tagged_text(executed, "answer"))


def check_answer(runs: Path, answer: str) -> None:
    """The sentence's numbers, from the records of the synchronous run and of the first of Pipe-SGD."""
    named = {path.parent: json.loads(path.read_text()) for path in sorted(runs.glob("*/run.json"))}
    in_time = sorted(named, key=lambda folder: named[folder]["created"])
    (synchronous,) = (folder for folder in in_time if named[folder]["algorithm"]["name"] == "SynchronousSGD")
    pipe = next(
        folder
        for folder in in_time
        if named[folder]["algorithm"]["name"] == "PipeSGD" and named[folder]["runtime"] != "simulated"
    )
    told = re.search(r"step is ([\d.]+) times as fast .* accuracy ([\d.]+) points (lower|higher|away)", answer)
    assert told is not None
    assert float(told[1]) == pytest.approx(step_seconds_of(synchronous) / step_seconds_of(pipe), abs=0.0051)
    lost = 100 * (accuracy_of(synchronous) - accuracy_of(pipe))
    assert float(told[2]) == pytest.approx(abs(lost), abs=0.051)
    assert told[3] == ("lower" if lost > 0 else "higher" if lost < 0 else "away")
    virtual = re.search(r"simulated workers on .* it is ([\d.]+) times as fast", answer)
    assert virtual is not None
    assert 1.0 <= float(virtual[1]) <= 2.0, (
        "width 2 hides communication behind compute or the other way round: at most twice as fast"
    )


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_the_tour_runs_under_plain_papermill(runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "tour.ipynb"
    smaller = {**SMALL, "epochs": 1, "simulated_workers": 4}  # what it shows has been judged above
    options = [word for name, value in smaller.items() for word in ("-p", name, str(value))]
    command = forked("-m", "papermill", str(resources.notebook("00-tour")), str(output), "--no-progress-bar", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PipeSGD" in tagged_text(output, "table")
