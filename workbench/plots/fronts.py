"""Algorithms as points of cost and gain, with their Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analysis.fronts import pareto_front
from workbench.errors import ConfigError
from workbench.plots.line_names import axis_range, names_apart, scaled
from workbench.plots.panels import panel_row, write_right_of
from workbench.plots.studies import round_log_axis
from workbench.plots.style import CYCLE, GREY, TEMPLATE, escape_text, legend_below

HEIGHT, WIDTH = 440, 980
SYMBOLS = ("circle", "diamond", "square", "x")


Points = Mapping[str, Sequence[tuple[float, float]]]  # name -> (cost, gain) of every repetition


def front(algorithms: Points, *, title: str, x: str, y: str, losses: bool = False) -> go.Figure:
    """Draw a point and a bar over repetitions for each algorithm, and the Pareto front of the means.

    Args:
        algorithms: name -> (cost, gain) of every repetition.
        title, x, y: titles of the figure and its axes; less of x and more of y is better.
        losses: y is a loss or an error: less is better, and the axis is logarithmic.
    """
    figure = go.Figure(layout={"template": TEMPLATE, "title": escape_text(title), "hovermode": "closest"})
    figure.add_traces(_points_and_front(algorithms, losses=losses))
    figure.update_xaxes(title=escape_text(x), rangemode="tozero")
    figure.update_yaxes(title=escape_text(y), **({"type": "log", "dtick": "D2"} if losses else {}))
    legend_below(figure, HEIGHT, ["front", *algorithms])
    return figure


def fronts(panels: Mapping[str, Points], *, title: str, x: str, y: str, losses: bool = False) -> go.Figure:
    """Draw a front in each panel, all with the same y axis. Names are next to the points of each panel's front.

    The x axes are logarithmic, because costs differ between panels.

    Args:
        panels: condition, such as a network -> points: see `front`. All panels have the same names.
        title, x, y, losses: as in `front`.

    Raises:
        ConfigError: there are no points.
    """
    if not panels or not all(panels.values()):
        raise ConfigError("no points to draw: give a mapping {panel: {algorithm: [(cost, gain), ...]}}")
    figure = panel_row(panels, title)
    gains = [gain for points in panels.values() for of in points.values() for _, gain in of]
    y_range = axis_range(min(gains), max(gains), log=losses)
    for column, points in enumerate(panels.values(), 1):
        figure.add_traces(_points_and_front(points, losses=losses, legend=column == 1), rows=1, cols=column)
        means, best = _means_and_front(points, losses=losses)
        places = names_apart([scaled(means[name][1], log=losses) for name in best], y_range)
        for name, place in zip(best, places, strict=True):
            write_right_of(figure, column, scaled(means[name][0], log=True), place, escape_text(name))
        costs = [cost for of in points.values() for cost, _ in of]
        how = {"range": axis_range(min(costs), max(costs), log=True, more=0.2), "tickangle": 0, "nticks": 5}
        axis = {**round_log_axis(min(costs), max(costs)), **how}
        figure.update_xaxes(title=escape_text(x), **axis, row=1, col=column)
    figure.update_yaxes(**(round_log_axis(min(gains), max(gains)) if losses else {}), range=y_range)
    figure.update_yaxes(title=escape_text(y), row=1, col=1)
    legend_below(figure, HEIGHT, ["front", *next(iter(panels.values()))])
    return figure


def _means_and_front(algorithms: Points, *, losses: bool) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Return name -> mean cost and gain, and the names on the Pareto front of the means, the cheapest first."""
    means = {
        name: (float(np.mean([cost for cost, _ in of])), float(np.mean([gain for _, gain in of])))
        for name, of in algorithms.items()
    }
    return means, pareto_front({name: (cost, -gain if losses else gain) for name, (cost, gain) in means.items()})


def _points_and_front(algorithms: Points, *, losses: bool, legend: bool = True) -> list[go.Scatter]:
    means, best = _means_and_front(algorithms, losses=losses)
    xs, ys = [means[name][0] for name in best], [means[name][1] for name in best]
    line = {"color": GREY, "width": 1.5, "dash": "dot", "shape": "hv"}
    shown: dict[str, Any] = {"mode": "lines", "line": line, "name": "front", "legendgroup": "front"}
    traces = [go.Scatter(x=xs, y=ys, showlegend=legend, **shown)]
    for position, (name, of) in enumerate(algorithms.items()):
        color, symbol = CYCLE[position % len(CYCLE)], SYMBOLS[position // len(CYCLE) % len(SYMBOLS)]
        mean, bars = means[name], [_bar([pair[way] for pair in of], means[name][way]) for way in (0, 1)]
        look: dict[str, Any] = {
            "mode": "markers",
            "marker": {"size": 11, "color": color, "symbol": symbol},
            "hovertemplate": f"{escape_text(name)}<br>%{{x:.4~g}}: %{{y:.4~g}}<extra></extra>",
            "name": escape_text(name),
            "legendgroup": name,
            "showlegend": legend,
        }
        traces.append(go.Scatter(x=[mean[0]], y=[mean[1]], error_x=bars[0], error_y=bars[1], **look))
    return traces


def _bar(values: Sequence[float], mean: float) -> dict[str, object]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(values) - mean],
        "arrayminus": [mean - min(values)],
        "thickness": 1,
    }
