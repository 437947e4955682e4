"""Measurements and their lower limits: panels of lines, and for each line its limit, dotted."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import ConfigError
from workbench.plots.studies import log_axis
from workbench.plots.style import CYCLE, GREY, TEMPLATE, escape_text, legend_below

PANEL_PIXELS, GAP_PIXELS, TITLES_PIXELS = 330, 90, 90
Curves = Mapping[str, Mapping[float, float]]


def compare_with_limits(
    panels: Mapping[str, Curves], limits: Mapping[str, Curves], *, title: str, x: str, y: str
) -> go.Figure:
    """Draw lines in two columns of panels, on shared logarithmic axes.

    A limit has the colour of the line with its name.

    Args:
        panels: panel -> name -> x -> y.
        limits: the same, with the same names.
        title, x, y: titles of the figure and its axes.

    Raises:
        ConfigError: there are no panels.
    """
    if not panels:
        raise ConfigError("no data to draw: give a mapping {panel: {name: {x: y}}}")
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    rows = -(-len(panels) // 2)
    inner = PANEL_PIXELS * rows + GAP_PIXELS * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=min(2, len(panels)),
        subplot_titles=[f"<b>{escape_text(name)}</b>" for name in panels],
        shared_yaxes="all",
        horizontal_spacing=0.05,
        vertical_spacing=GAP_PIXELS / inner if rows > 1 else 0,
    )
    drawn: set[str] = set()
    for number, (panel, curves) in enumerate(panels.items()):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        for name, series in sorted(curves.items(), key=lambda item: names.index(item[0])):
            color, points = CYCLE[names.index(name) % len(CYCLE)], sorted(series.items())
            hover = f"{escape_text(name)}<br>%{{x:.3~g}}: %{{y:.3~g}}<extra></extra>"
            line = {"color": color, "width": 2.2}
            common = {"legendgroup": name, "line": line, "mode": "lines+markers", "hovertemplate": hover}
            xs, ys = zip(*points, strict=True)
            figure.add_trace(
                go.Scatter(x=xs, y=ys, name=escape_text(name), showlegend=name not in drawn, **common), **place
            )
            drawn.add(name)
            if its := sorted(limits.get(panel, {}).get(name, {}).items()):
                xs, ys = zip(*its, strict=True)
                dotted = {"color": color, "width": 1.6, "dash": "dot"}
                figure.add_trace(
                    go.Scatter(x=xs, y=ys, legendgroup=name, showlegend=False, line=dotted, mode="lines"), **place
                )
        figure.update_xaxes(title=escape_text(x), **log_axis(_ticks(curves)), **place)
    figure.add_trace(
        go.Scatter(x=[None], y=[None], name="lower limit", line={"color": GREY, "dash": "dot"}, mode="lines")
    )
    figure.update_yaxes(type="log", tickvals=[1, 1.5, 2, 3, 4, 6, 8, 12, 16])
    for row in range(1, rows + 1):
        figure.update_yaxes(title=escape_text(y), row=row, col=1)
    figure.update_layout(template=TEMPLATE, title=escape_text(title), hovermode="closest", margin={"t": TITLES_PIXELS})
    figure.update_annotations(font={"size": 13})
    legend_below(figure, TITLES_PIXELS + inner + GAP_PIXELS, [*names, "lower limit"])
    figure.update_layout(legend={"y": -52 / inner})
    return figure


def _ticks(curves: Curves) -> list[float]:
    """Return rounded values of x near the measurements."""
    return sorted({float(f"{value:.2g}") for series in curves.values() for value in series})
