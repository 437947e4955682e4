"""The notebooks that come with the package: how they are written, and that they run on real engines."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path

import nbformat
import numpy as np
import pytest
from scipy import stats

from tests.forked import forked
from tests.notebooks.from_records import accuracy_of, step_seconds_of
from workbench import resources
from workbench.experiments.notebooks import run_notebook, tagged_text

NOTEBOOKS = [resources.notebook(name) for name in resources.notebooks()]
SMALL = {"workers": 2, "steps": 12, "pairs": 2, "compute_ms": 20.0, "target": 0.3, "simulated_workers": 16}
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
    figures = [
        output.data["application/vnd.plotly.v1+json"]
        for cell in nbformat.read(executed, as_version=4).cells
        for output in cell.get("outputs", [])
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert len(figures) >= 7, "two live curves, two comparisons, two timelines, one of overlap"
    assert all(figure["data"] for figure in figures)
    assert executed.stat().st_size < 1_000_000
    found = [json.loads(path.read_text()) for path in runs.glob("*/run.json")]
    assert Counter(info["algorithm"]["name"] for info in found) == {
        "SynchronousSGD": 2,
        "PipeSGD": 2,
        "LayerwiseSGD": 1,
    }
    assert all(info["status"] == "finished" for info in found)
    check_answer(runs, tagged_text(executed, "answer"))


def check_answer(runs: Path, answer: str) -> None:
    """The sentence's numbers, from the records of the pairs of trainings."""
    named = {path.parent: json.loads(path.read_text()) for path in runs.glob("*/run.json")}
    in_turn = sorted(named, key=lambda folder: named[folder]["created"])
    synchronous, pipe = (
        [folder for folder in in_turn if named[folder]["algorithm"]["name"] == name]
        for name in ("SynchronousSGD", "PipeSGD")
    )
    ratios = [step_seconds_of(one) / step_seconds_of(other) for one, other in zip(synchronous, pipe, strict=True)]
    pattern = r"is ([\d.]+) \[(-?[\d.]+), ([\d.]+)\] times as fast .* accuracy is ([\d.]+) points (lower|higher)"
    told = re.search(pattern, answer.replace("\n", " "))
    assert told is not None, answer
    interval = stats.t.interval(0.95, len(ratios) - 1, np.mean(ratios), stats.sem(ratios))
    assert [float(told[place]) for place in (1, 2, 3)] == pytest.approx([np.mean(ratios), *interval], abs=0.0051)
    lost = 50 * sum(accuracy_of(one) - accuracy_of(other) for one, other in zip(synchronous, pipe, strict=True))
    assert float(told[4]) == pytest.approx(abs(lost), abs=0.051)
    assert told[5] == ("lower" if lost > 0 else "higher")
    assert "It reaches an accuracy of 30% in" in answer


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_the_tour_runs_under_plain_papermill(runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "tour.ipynb"
    smaller = {**SMALL, "pairs": 1, "hidden": 32}  # what it shows has been judged above
    options = [word for name, value in smaller.items() for word in ("-p", name, str(value))]
    command = forked("-m", "papermill", str(resources.notebook("00-tour")), str(output), "--no-progress-bar", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "PipeSGD" in tagged_text(output, "table")
