"""A figure that is redrawn in a notebook; it stays correct if the browser misses drawings."""

from __future__ import annotations

from functools import cache
from typing import Any, final

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

# plotly.js as a separate module, apart from other copies; then the code of the widget.
_SCRIPT = """
const Plotly = (function () {
  const module = { exports: {} }, exports = module.exports, define = undefined;
  %s
  return module.exports && module.exports.react ? module.exports : globalThis.Plotly;
}).call(globalThis);

async function render({ model, el }) {
  const source = await model.widget_manager.get_model(model.get("source"));
  const place = document.createElement("div");
  el.appendChild(place);
  const draw = () => {
    const { data, layout } = JSON.parse(source.get("value"));
    Plotly.react(place, data, layout, { responsive: true, displaylogo: false });
  };
  const fit = new ResizeObserver(() => place.data && Plotly.Plots.resize(place));
  source.on("change:value", draw);
  fit.observe(el);
  draw();
  return () => { source.off("change:value", draw); fit.disconnect(); Plotly.purge(place); };
}
export default { render };
"""


@final
class MovingFigure:
    """A Plotly figure as a widget: `draw` sends the complete figure, so a missed drawing does not matter.

    The figure is sent as the text of a hidden label, which loads at once. Plotly's `FigureWidget` is not used: if the
    browser takes more than two seconds to load its five megabytes, it ignores all later messages (anywidget). Any thread
    may draw, one at a time.
    """

    def __init__(self, figure: go.Figure | None = None) -> None:
        self.figure = figure if figure is not None else go.Figure()
        self._source = ipywidgets.Label(value=_as_text(self.figure))
        self.widget: Any = _widget_class()(source=self._source.model_id)

    def draw(self, figure: go.Figure) -> None:
        """Show this figure. The user's zoom stays."""
        self.figure = figure
        self._source.value = _as_text(figure)


def _as_text(figure: go.Figure) -> str:
    state: dict[str, Any] = figure.to_dict()
    state["layout"] |= {"autosize": True, "uirevision": "same"}
    return str(to_json_plotly(state))


@cache
def _widget_class() -> type:
    """Make the class at first use: its text holds plotly.js."""

    class PlotlyState(anywidget.AnyWidget):
        _esm = _SCRIPT % get_plotlyjs()
        source = traitlets.Unicode().tag(sync=True)  # id of the label's model

    return PlotlyState
