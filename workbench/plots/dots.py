"""Repetitions of several entries as points, one row each, with their mean and interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.plots.studies import round_log_axis
from workbench.plots.style import BLUE, GREY, INK, TEMPLATE, escape_text, faded

ROW_PIXELS, FRAME_PIXELS = 34, 150
JITTER = 0.16  # rows by which repetitions are apart, so that equal values do not cover each other


def dot_plot(
    values: Mapping[str, Sequence[float]],
    *,
    title: str,
    x: str,
    intervals: Mapping[str, tuple[float, float]] | None = None,
    reference: float | None = None,
    log_x: bool = False,
) -> go.Figure:
    """Draw a row for each entry: a circle for each repetition, and the mean as a line with its interval.

    Args:
        values: entry -> the value of each repetition.
        title, x: titles of the figure and of its axis.
        intervals: entry -> ends of the interval of its mean; None for no interval.
        reference: x of a vertical line, such as the value of no effect.
        log_x: a logarithmic axis. Otherwise the axis shows the values, not zero.
    """
    figure = go.Figure(
        layout={"template": TEMPLATE, "title": escape_text(title), "hovermode": "closest", "showlegend": False}
    )
    for row, (name, found) in enumerate(values.items()):
        mean = float(np.mean(found))
        places = row + JITTER * np.linspace(-1, 1, len(found)) if len(found) > 1 else [row]
        figure.add_scatter(
            x=list(found),
            y=list(places),
            mode="markers",
            marker={"size": 8, "color": faded(BLUE, 0.35), "line": {"color": BLUE, "width": 1}},
            hovertemplate=f"{escape_text(name)}: %{{x:.4~g}}<extra></extra>",
        )
        low, high = (intervals or {}).get(name, (mean, mean))
        bar = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low], "thickness": 2}
        figure.add_scatter(
            x=[mean],
            y=[row],
            mode="markers",
            marker={"symbol": "line-ns", "size": 16, "line": {"color": INK, "width": 3}},
            error_x={**bar, "color": INK},
            hovertemplate=f"{escape_text(name)}: mean %{{x:.4~g}}<extra></extra>",
        )
    if reference is not None:
        figure.add_vline(x=reference, line={"color": GREY, "width": 1, "dash": "dot"})
    every = [value for found in values.values() for value in found]
    figure.update_xaxes(title=escape_text(x), **(round_log_axis(min(every), max(every)) if log_x else {}))
    names = [f"{escape_text(name)} " for name in values]
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.5, -0.5], ticks="")
    figure.update_layout(height=FRAME_PIXELS + ROW_PIXELS * len(names))
    return figure
