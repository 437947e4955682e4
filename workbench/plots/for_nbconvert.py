"""Plain `jupyter nbconvert --to html` shows our figures: a notebook keeps their data, and nbconvert does not know how they are drawn.

`jupyter_nbconvert_config.json`, which the wheel puts into the environment's Jupyter configuration, names this preprocessor.
"""

from __future__ import annotations

from typing import Any, final

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

from workbench.plots.html import PLOTLY, figure_division


@final
class DrawFigures(Preprocessor):
    """Gives each Plotly figure that has no HTML of its own one, and Plotly's program to the first of them: no network is needed."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        """Called by nbconvert; changes the copy of the notebook that it is given."""
        program = f"<script>{get_plotlyjs()}</script>"
        number = 0
        for cell in nb.cells:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if PLOTLY in data and "text/html" not in data:
                    number += 1
                    drawn = {"text/html": program + figure_division(data[PLOTLY], f"workbench-figure-{number}")}
                    output.data = NotebookNode(drawn)  # type: ignore[no-untyped-call] # nbformat's annotations are partial
                    program = ""
        return nb, resources
