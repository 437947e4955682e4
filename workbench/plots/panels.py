"""Curves in panels next to each other, one panel for each condition, with each line's name at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analysis.table import seconds as seconds_text
from workbench.errors import ConfigError
from workbench.plots.line_names import axis_range, names_apart, scaled
from workbench.plots.studies import Series, band_and_line, log_axis, round_log_axis
from workbench.plots.style import BLUE, CYCLE, GREY, INK, TEMPLATE, escape_text

HEIGHT = 430
NAMES_SHARE = {1: 0.16, 2: 0.28, 3: 0.42}  # of a panel's width, for names, by the number of panels
WIDTH = 980
ROW_PIXELS, FRAME_PIXELS = 27, 170  # of `time_to_target`


def curves_in_panels(
    panels: Mapping[str, Mapping[str, Series]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
) -> go.Figure:
    """Draw lines of numbers over numbers in panels with equal axes. A band is from the lowest to the highest repetition.

    Args:
        panels: condition -> name of a line -> x -> y, or the y of every repetition. A name has one colour in all panels.
        title, x, y: titles of the figure and its axes.
        log_x, log_y: logarithmic axes. Points that they do not have, such as step 0, are left out, and so are infinite values.

    Raises:
        ConfigError: there are no curves, or more than three panels.
    """
    panels = {
        panel: {name: _on_axes(series, log_x=log_x, log_y=log_y) for name, series in curves.items()}
        for panel, curves in panels.items()
    }
    if not panels or not any(series for curves in panels.values() for series in curves.values()):
        raise ConfigError("no data to draw: give a mapping {panel: {line: {x: y}}}")
    if len(panels) > max(NAMES_SHARE):
        raise ConfigError(f"{len(panels)} panels: at most {max(NAMES_SHARE)} fit next to each other: draw two figures")
    names = dict.fromkeys(name for curves in panels.values() for name in curves)
    colors = dict(zip(names, [*CYCLE, *[INK, GREY] * len(names)], strict=False))
    figure = panel_row(panels, title)
    figure.update_layout(showlegend=False, height=HEIGHT)
    every = [series for curves in panels.values() for series in curves.values() if series]
    xs = sorted({float(at) for series in every for at in series})
    ys = np.concatenate([np.ravel(np.asarray(value, float)) for series in every for value in series.values()])
    x_range = axis_range(xs[0], xs[-1], log=log_x, more=NAMES_SHARE[len(panels)])
    y_range = axis_range(float(ys.min()) if log_y else min(0.0, float(ys.min())), float(ys.max()), log=log_y)
    for column, curves in enumerate(panels.values(), 1):
        for name, series in curves.items():
            if series:
                figure.add_traces(band_and_line(name, series, colors[name]), rows=1, cols=column)
        ends = {name: max(series) for name, series in curves.items() if series}
        heights = {name: float(np.mean(curves[name][at])) for name, at in ends.items()}
        places = names_apart([scaled(heights[name], log=log_y) for name in ends], y_range)
        for (name, at), place in zip(ends.items(), places, strict=True):
            write_right_of(
                figure, column, scaled(float(at), log=log_x), place, escape_text(name), colors[name], shift=6
            )
    figure.update_xaxes(title=escape_text(x), **(log_axis(xs) if log_x else {}), range=x_range)
    figure.update_yaxes(**(round_log_axis(float(ys.min()), float(ys.max())) if log_y else {}), range=y_range)
    figure.update_yaxes(title=escape_text(y), row=1, col=1)
    return figure


def _on_axes(series: Series, *, log_x: bool, log_y: bool) -> Series:
    """Return the points with finite values that are above zero on logarithmic axes."""
    return {
        at: value
        for at, value in series.items()
        if np.isfinite(value).all() and not (log_x and at <= 0) and not (log_y and np.min(value) <= 0)
    }


def panel_row(titles: Iterable[str], title: str) -> go.Figure:
    """Return a figure with a panel for each title, next to each other, and one y axis for all."""
    titles = list(titles)
    figure = make_subplots(
        rows=1,
        cols=len(titles),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"<b>{escape_text(panel)}</b>" for panel in titles],
    )
    figure.update_annotations(font={"size": 13})
    figure.update_layout(template=TEMPLATE, title=escape_text(title), hovermode="closest", width=WIDTH)
    return figure


def write_right_of(
    figure: go.Figure, column: int, x: float, y: float, text: str, color: str | None = None, shift: int = 8
) -> None:
    """Write a text to the right of a place in a panel.

    Args:
        figure: from `panel_row`.
        column: of the panel, from 1.
        x, y: the place: see `scaled`.
        text: HTML.
        color: that of the figure's text by default.
        shift: pixels between the place and the text.
    """
    font = {"size": 11} if color is None else {"size": 11, "color": color}
    how = {"xanchor": "left", "xshift": shift, "showarrow": False, "row": 1, "col": column}
    figure.add_annotation(x=x, y=y, text=text, font=font, **how)


# -- time to a target --------------------------------------------------------------------------------------------------


def time_to_target(
    seconds: Mapping[str, Mapping[str, Sequence[float]]], *, title: str, x: str = "time to the target (s)"
) -> go.Figure:
    """Draw a row for each algorithm and a panel for each network: mean time to a target, with a bar over repetitions.

    The first algorithm is the one to compare with: a dotted line marks its mean. The fastest of a panel is blue.

    Args:
        seconds: network -> algorithm -> seconds of each repetition; infinite if it never reaches the target. The rows
            are those of the first network.
        title, x: titles of the figure and of its axes.

    Raises:
        ConfigError: there are no times.
    """
    if not seconds or not all(seconds.values()):
        raise ConfigError("no data to draw: give a mapping {network: {algorithm: seconds of each repetition}}")
    rows = list(next(iter(seconds.values())))
    figure = panel_row(seconds, title)
    for column, times in enumerate(seconds.values(), 1):
        reached = {name: of for name, of in times.items() if len(of) and np.isfinite(of).all()}
        means = {name: float(np.mean(of)) for name, of in reached.items()}
        quickest = min(means, key=means.__getitem__, default="")
        low, high = (min(map(min, reached.values())), max(map(max, reached.values()))) if reached else (1.0, 1.0)
        x_range = axis_range(low, high, log=True, more=0.2)
        for place, name in enumerate(rows):
            color = BLUE if name == quickest else INK
            if name in means:
                figure.add_trace(_dot(name, place, times[name], color), row=1, col=column)
            text, at = (seconds_text(means[name]), max(reached[name])) if name in means else ("not reached", low)
            look = (color, 8) if name in means else (GREY, 0)
            write_right_of(figure, column, scaled(at, log=True), place, text, *look)
        if rows[0] in means:  # after the dots: Plotly draws no line in a panel without traces
            figure.add_vline(x=means[rows[0]], line={"color": GREY, "width": 1, "dash": "dot"}, row=1, col=column)
        ticks = {key: value for key, value in round_log_axis(low, high).items() if key != "type"}
        how = {"range": x_range, "title": escape_text(x), "tickangle": 0, "nticks": 5}
        figure.update_xaxes(type="log", **how, **ticks, row=1, col=column)
    names = [f"{escape_text(name)} " for name in rows]
    figure.update_yaxes(
        tickvals=list(range(len(rows))), ticktext=names, range=[len(rows) - 0.5, -0.5], ticks="", showgrid=True
    )
    figure.update_layout(showlegend=False, height=FRAME_PIXELS + ROW_PIXELS * len(rows))
    return figure


def _dot(name: str, place: int, values: Sequence[float], color: str) -> go.Scatter:
    mean = float(np.mean(values))
    bar: dict[str, Any] = {"type": "data", "symmetric": False, "thickness": 1.5, "width": 0, "color": color}
    bar |= {"array": [max(values) - mean], "arrayminus": [mean - min(values)]}
    return go.Scatter(
        x=[mean],
        y=[place],
        mode="markers",
        marker={"size": 10, "color": color},
        error_x=bar,
        hovertemplate=f"{escape_text(name)}: %{{x:.4~g}} s<extra></extra>",
    )
