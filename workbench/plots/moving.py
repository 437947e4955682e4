"""A figure that can be drawn again and again in a notebook, whatever the browser missed meanwhile."""

from __future__ import annotations

from functools import cache
from typing import Any, final

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

# Plotly's program as a module of its own, so that it meets nobody else's; then what the widget does with it.
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
    """A Plotly figure as a widget: `draw` sends the whole figure, so what the browser missed does not matter.

    The figure travels as the text of a label that nobody sees. anywidget, and Plotly's own `FigureWidget` with it, is deaf for good
    to what is sent to it if the browser took more than two seconds to read its five megabytes, as on a busy machine: what it drew at
    first is all it ever shows. A label is read at once. Any thread may draw, one at a time.
    """

    def __init__(self, figure: go.Figure | None = None) -> None:
        self.figure = figure if figure is not None else go.Figure()
        self._source = ipywidgets.Label(value=_as_text(self.figure))
        self.widget: Any = _widget_class()(source=self._source.model_id)

    def draw(self, figure: go.Figure) -> None:
        """Show this figure. What the user has zoomed into stays."""
        self.figure = figure
        self._source.value = _as_text(figure)


def _as_text(figure: go.Figure) -> str:
    state: dict[str, Any] = figure.to_dict()
    state["layout"] |= {"autosize": True, "uirevision": "same"}
    return str(to_json_plotly(state))


@cache
def _widget_class() -> type:
    """Made when first needed: its text holds Plotly's program."""

    class PlotlyState(anywidget.AnyWidget):
        _esm = _SCRIPT % get_plotlyjs()
        source = traitlets.Unicode().tag(sync=True)  # id of the label's model

    return PlotlyState
