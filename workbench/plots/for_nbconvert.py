"""Let plain `jupyter nbconvert --to html` show figures: a notebook stores only their data, which nbconvert cannot draw.

`jupyter_nbconvert_config.json`, which the wheel puts into the environment's Jupyter configuration, names this
preprocessor.
"""

from __future__ import annotations

from typing import Any, final

from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

from workbench.plots.html import figure_division
from workbench.plots.renderer import PLOTLY


@final
class DrawFigures(Preprocessor):
    """Adds HTML to each Plotly figure that has none, and plotly.js to the first one. No network is needed."""

    def preprocess(self, nb: Any, resources: Any) -> tuple[Any, Any]:
        """Convert the figures; nbconvert calls this with a copy of the notebook."""
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
