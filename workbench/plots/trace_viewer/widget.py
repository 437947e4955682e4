"""A trace viewer that is redrawn in a notebook; it stays correct if the browser misses drawings."""

from __future__ import annotations

import json
from typing import Any, final

import anywidget
import ipywidgets
import traitlets

from workbench.plots.trace_viewer.script import viewer_js


@final
class MovingViewer:
    """A trace viewer as a widget: `draw` sends all that it shows, as the text of a hidden label (see `MovingFigure`)."""

    def __init__(self) -> None:
        self._source = ipywidgets.Label(value="")
        self.widget = ViewerState(source=self._source.model_id)

    def draw(self, content: dict[str, Any]) -> None:
        """Show the content that `payload` returned. What the user has zoomed into stays."""
        self._source.value = json.dumps(content)


@final
class ViewerState(anywidget.AnyWidget):
    """Draws what a label's text holds.

    Attributes:
        source: id of the label's model.
    """

    _esm = viewer_js()
    source = traitlets.Unicode().tag(sync=True)
