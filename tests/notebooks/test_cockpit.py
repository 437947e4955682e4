"""The cockpit's notebook, run from start to end without a user."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.from_records import accuracy_of, step_seconds_of
from workbench import resources
from workbench.experiments.notebooks import run_notebook, tagged_text

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]

PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"


@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_seeds_are_bands_and_live_views_leave_pictures(tmp_path: Path, runs: Path) -> None:
    done = run_notebook(
        resources.notebook("01-cockpit"), tmp_path / "cockpit.ipynb", {"epochs": 1, "seeds": [0, 1]}, timeout_s=240
    )
    cells = nbformat.read(done, as_version=4).cells
    bundles = [output.data for cell in cells for output in cell.get("outputs", []) if "data" in output]
    assert not any(WIDGET in data for data in bundles)
    figures = [data[PLOTLY] for data in bundles if PLOTLY in data]
    assert len(figures) == 3, "the live view, and two that were asked for"
    for figure in figures:
        names = [trace["name"] for trace in figure["data"] if trace.get("name")]
        assert {"SynchronousSGD (mean of 2)", "PipeSGD(width=2) (mean of 2)"} <= set(names)
        assert any(trace.get("fill") == "toself" for trace in figure["data"])
    assert any("Dashboard, closed" in data.get("text/html", "") for data in bundles)
    answer = tagged_text(done, "answer")
    assert "over 2 seeds on 2 ranks" in answer
    for words, algorithm in (("Synchronous", "SynchronousSGD"), ("Pipe-SGD of width 2", "PipeSGD")):
        infos = {path.parent: json.loads(path.read_text()) for path in runs.glob("*/run.json")}
        folders = [folder for folder, info in infos.items() if info["algorithm"]["name"] == algorithm]
        assert len(folders) == 2
        told = re.search(rf"{words}: ([\d.]+) to ([\d.]+) ms a step, accuracy ([\d.]+)% to ([\d.]+)%", answer)
        assert told is not None
        steps, accuracies = [1e3 * step_seconds_of(one) for one in folders], [100 * accuracy_of(one) for one in folders]
        assert [float(told[1]), float(told[2])] == pytest.approx([min(steps), max(steps)], abs=0.0051)
        assert [float(told[3]), float(told[4])] == pytest.approx([min(accuracies), max(accuracies)], abs=0.051)
