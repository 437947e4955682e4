"""How notebooks keep figures: as data (about ten kB each), which JupyterLab and VS Code draw.

Plotly's own renderers are not used for that: to import them takes a second, because they import nbformat.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import plotly.graph_objects as go
from IPython.core.getipython import get_ipython
from IPython.display import display

from workbench.machine import in_notebook
from workbench.plots.comparison import use_comparison_html

PLOTLY = "application/vnd.plotly.v1+json"
# The button that saves a figure writes SVG, and there is none that uploads it.
CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["sendChartToCloud"],
    "toImageButtonOptions": {"format": "svg", "filename": "figure"},
}
RENDERER = "plotly_mimetype"  # Plotly's name of what stores data alone


def use_notebook_renderer() -> None:
    """Store figures as data, which JupyterLab and VS Code draw. Tables of `wb.compare` can be sorted.

    Plotly's offline renderer "notebook" stores plotly.js, 5 MB, in every notebook; "notebook_connected" downloads it.
    `export_html` makes an offline page instead.
    """
    if "plotly.io._renderers" in sys.modules:
        import plotly.io as pio

        pio.renderers.default = RENDERER
    os.environ["PLOTLY_RENDERER"] = RENDERER  # for `figure.show()`, which imports them
    if in_notebook():
        shell: Any = get_ipython()
        shell.display_formatter.ipython_display_formatter.for_type(go.Figure, show)
        use_comparison_html(shell.display_formatter.formatters["text/html"])


def show(figure: go.Figure) -> None:
    """Display the figure as data."""
    display(as_data(figure), raw=True)  # type: ignore[no-untyped-call]


def as_data(figure: go.Figure) -> dict[str, Any]:
    """Return the figure as a notebook stores it.

    (`update_display` of the figure itself would add an output, not replace one.)
    """
    return {PLOTLY: {**json.loads(figure.to_json()), "config": CONFIG}}
