"""A figure that is redrawn in a notebook; it stays correct if the browser misses drawings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from plotly.io.json import to_json_plotly

from workbench.plots.live.buttons import answer_while_busy
from workbench.plots.plotly_js import plotly_js

# Classes of a widget around a figure, which has the second one while it shows something; `still.STYLE` has their rules
VIEW_CLASS, LIVE_CLASS = "workbench-view", "workbench-live"


@final
class MovingFigure:
    """A Plotly figure as a widget: `draw` sends the complete figure, so a missed drawing does not matter.

    The figure is sent as the text of a hidden label, which loads at once. Plotly's `FigureWidget` is not used: its state
    holds the five megabytes of plotly.js, once for each figure; and if the browser takes more than two seconds to load
    them, it ignores all later messages (anywidget). Any thread may draw, one at a time.
    """

    def __init__(self, figure: go.Figure | None = None) -> None:
        self.figure = figure if figure is not None else go.Figure()
        self._source = ipywidgets.Label(value=_as_text(self.figure))
        self.widget = PlotlyState(source=self._source.model_id)
        answer_while_busy(self.widget)

    @property
    def was_removed(self) -> bool:
        """Whether every page that showed the figure has removed it: its cell was run again, or its notebook closed."""
        return self.widget.was_removed

    def draw(self, figure: go.Figure) -> None:
        """Show this figure. The user's zoom stays."""
        self.figure = figure
        self._source.value = _as_text(figure)


def _as_text(figure: go.Figure) -> str:
    state: dict[str, Any] = figure.to_dict()
    state["layout"] |= {"autosize": True, "uirevision": "same"}
    return str(to_json_plotly(state))


@final
class PlotlyState(anywidget.AnyWidget):
    """Draws a figure. The page loads plotly.js once, from the Jupyter server, else from the kernel.

    From the kernel it travels in a message, so that no saved notebook holds it.

    Attributes:
        source: id of the label's model.
        was_removed: see `MovingFigure.was_removed`.
    """

    _esm = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    source = traitlets.Unicode().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self._num_shown = 0  # places on pages; a page that is reloaded does not say that it had one
        self.was_removed = False
        self.on_msg(self._answer)

    def _answer(self, _: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("want") == "plotly":
            self.send({"plotly": True}, buffers=[plotly_js().encode()])
        if "shown" in content:
            self._num_shown += content["shown"]
            self.was_removed = self._num_shown <= 0
