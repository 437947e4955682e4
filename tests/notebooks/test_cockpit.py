"""The cockpit's notebook, run from start to end with nobody there to press anything."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from workbench import resources
from workbench.experiments.notebooks import run_notebook, tagged_text

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]

PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"


@pytest.mark.usefixtures("no_process_left", "runs")
def test_seeds_are_bands_and_live_views_leave_pictures(tmp_path: Path) -> None:
    done = run_notebook(resources.notebook("01-cockpit"), tmp_path / "cockpit.ipynb", {"epochs": 1, "seeds": [0, 1]}, timeout_s=240)
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
    assert "over 2 seeds on 2 ranks" in tagged_text(done, "answer")
