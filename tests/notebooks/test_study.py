"""The notebook that asks how much an algorithm would help, with small models."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from workbench import resources
from workbench.experiments.notebooks import run_notebook, tagged_text

pytestmark = [pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = {
    "minutes": 0.25,
    "width": 32,
    "depth": 1,
    "gpt_width": 32,
    "workers": [2],
    "target_loss": 2.25,
    "gpt_loss": 5.3,
    "checked": [2],
}


@pytest.mark.usefixtures("forked_kernels", "no_process_left")
def test_it_answers_draws_and_checks(tmp_path: Path, runs: Path) -> None:
    executed = run_notebook(
        resources.notebook("03-how-much-would-it-help"), tmp_path / "study.ipynb", SMALL, timeout_s=240
    )
    answer = tagged_text(executed, "study")
    assert "2 workers, 1 Gbit/s" in answer and "bound by" in answer
    assert "predicted step" in tagged_text(executed, "check")
    assert "2 workers" in tagged_text(executed, "study-gpt")
    assert "Exposed communication is" in tagged_text(executed, "record")
    assert "2 workers" in tagged_text(executed, "study-plain")
    cells = nbformat.read(executed, as_version=4).cells
    trained = {"figure-front": "study", "figure-gpt": "study-gpt"}  # on a busy machine the minutes may not suffice
    for tag in ("figure-timelines", "figure-front", "figure-sensitivity", "figure-gpt"):
        (cell,) = (cell for cell in cells if tag in cell.metadata.get("tags", []))
        figures = [o.data["application/vnd.plotly.v1+json"] for o in cell.outputs if "data" in o]
        expected = tag not in trained or "seeds at the target" in tagged_text(executed, trained[tag])
        assert [bool(figure["data"]) for figure in figures] == [True] * expected
