"""Algorithms as points of cost and gain, with their Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.fronts import pareto_front
from workbench.plots.style import CYCLE, GREY, TEMPLATE, escape_text, legend_below

HEIGHT = 440
SYMBOLS = ("circle", "diamond", "square", "x")


def front(
    algorithms: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x: str, y: str, losses: bool = False
) -> go.Figure:
    """Draw a point and a bar over repetitions for each algorithm, and the Pareto front of the means.

    Args:
        algorithms: name -> (cost, gain) of every repetition.
        title, x, y: titles of the figure and its axes; less of x and more of y is better.
        losses: y is a loss or an error: less is better, and the axis is logarithmic.
    """
    figure = go.Figure(layout={"template": TEMPLATE, "title": escape_text(title), "hovermode": "closest"})
    means = {
        name: (float(np.mean([cost for cost, _ in of])), float(np.mean([gain for _, gain in of])))
        for name, of in algorithms.items()
    }
    best = pareto_front({name: (cost, -gain if losses else gain) for name, (cost, gain) in means.items()})
    line = {"color": GREY, "width": 1.5, "dash": "dot", "shape": "hv"}
    figure.add_scatter(
        x=[means[name][0] for name in best], y=[means[name][1] for name in best], mode="lines", line=line, name="front"
    )
    for position, (name, of) in enumerate(algorithms.items()):
        color, symbol = CYCLE[position % len(CYCLE)], SYMBOLS[position // len(CYCLE) % len(SYMBOLS)]
        mean, bars = means[name], [_bar([pair[way] for pair in of], means[name][way]) for way in (0, 1)]
        hover = f"{escape_text(name)}<br>%{{x:.4~g}}: %{{y:.4~g}}<extra></extra>"
        look = {"mode": "markers", "marker": {"size": 11, "color": color, "symbol": symbol}, "hovertemplate": hover}
        figure.add_scatter(x=[mean[0]], y=[mean[1]], error_x=bars[0], error_y=bars[1], name=escape_text(name), **look)
    figure.update_xaxes(title=escape_text(x), rangemode="tozero")
    figure.update_yaxes(title=escape_text(y), **({"type": "log"} if losses else {}))
    legend_below(figure, HEIGHT, ["front", *algorithms])
    return figure


def _bar(values: Sequence[float], mean: float) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(values) - mean],
        "arrayminus": [mean - min(values)],
        "thickness": 1,
    }
