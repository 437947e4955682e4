"""Figures as small SVG images in HTML: what a saved notebook shows of a run that still trains."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.analysis.table import num_bytes, percent, three_digits

WIDTH, HEIGHT = 860, 400  # of the image; next to it, a live figure is about as high
LEFT, RIGHT, TOP, PLOT = 62, 14, 46, 270  # pixels around and of a panel
MAX_POINTS = 120  # of a curve
# What a saved notebook keeps is in an element of the class workbench-still. These rules hold next to it:
# - It is not shown if the next output is a live widget (see moving_figure.js and viewer.js).
# - What JupyterLab writes where a widget is not there, or not yet, is not shown: "Loading widget", "model not found".
# - A widget whose kernel has ended is not shown; nor is a widget's header, until its figure is drawn.
STYLE = """<style>
.jp-OutputArea-child:has(+ .jp-OutputArea-child .workbench-live) .workbench-still,
.jp-OutputArea:has(.workbench-still) .jp-OutputArea-output.lm-Panel:not(:has(*)),
.jp-OutputArea .workbench-view.workbench-ended,
.jp-OutputArea .workbench-view:not(.workbench-live) > .workbench-header { display: none }
</style>"""
INK, LINE = "#767676", "#A8A8A8"  # readable on white and on black
NUM_TICKS = 5
Floats = NDArray[np.float64]


def still(content: str) -> str:
    """Return HTML that a saved notebook keeps and that is not shown next to a live widget."""
    return f'<div class="workbench-still">{STYLE}{content}</div>'


def picture(figure: go.Figure) -> str:
    """Return the curves of `lines.convergence` as an `<img>`, a few kB: lines, bands, axes, titles and names."""
    layout = figure.to_dict()["layout"]
    drawn = [text(LEFT, 20, layout.get("title", {}).get("text", ""), size=15)]
    for number in ("", "2"):
        traces = [trace for trace in figure.data if (trace.xaxis or "x") == f"x{number}" and not _is_faint(trace)]
        drawn += _panel(traces, layout.get(f"xaxis{number}", {}), layout.get(f"yaxis{number}", {}))
    drawn += _legend([trace for trace in figure.data if trace.showlegend is not False and trace.name])
    return image(drawn, HEIGHT, "curves so far")


def image(drawn: Iterable[str], height: float, alt: str) -> str:
    """Return SVG elements as an `<img>` of this height, `WIDTH` wide."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="12" fill="{INK}">{"".join(drawn)}</svg>'
    )
    encoded = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{alt}" style="max-width: 100%" src="data:image/svg+xml;base64,{encoded}">'


def as_of() -> str:
    """Return the time, to write below a picture."""
    return f'<br><small style="color: {INK}">as of {time.strftime("%H:%M:%S")}</small>'


def _is_faint(trace: Any) -> bool:
    return trace.showlegend is False and trace.fill is None and trace.hoverinfo == "skip"


def _panel(traces: Sequence[Any], x_axis: dict[str, Any], y_axis: dict[str, Any]) -> Iterator[str]:
    begin, end = x_axis.get("domain") or (0.0, 1.0)
    left, right = LEFT + begin * (WIDTH - LEFT - RIGHT), LEFT + end * (WIDTH - LEFT - RIGHT)
    bottom = TOP + PLOT
    yield f'<path d="M{left:.0f} {TOP}V{bottom}H{right:.0f}" fill="none" stroke="{LINE}"/>'
    yield text((left + right) / 2, bottom + 36, _title(x_axis), anchor="middle")
    yield text(left, TOP - 8, _title(y_axis))
    xs, ys = ([np.asarray(trace[name], float) for trace in traces] for name in ("x", "y"))
    log_x, log_y = (axis.get("type") == "log" for axis in (x_axis, y_axis))
    x_span, y_span = _span(xs, log_x, from_zero=True), _span(ys, log_y, from_zero=False)
    if x_span is None or y_span is None:
        return
    (low_x, high_x), (low_y, high_y) = x_span, y_span

    def place_x(values: Floats) -> Floats:
        return left + (_scaled(values, log_x) - low_x) / (high_x - low_x) * (right - left)

    def place_y(values: Floats) -> Floats:
        return bottom - (_scaled(values, log_y) - low_y) / (high_y - low_y) * PLOT

    for value in _ticks(low_x, high_x, log_x):
        yield text(place_x(np.array(value)), bottom + 17, _number(value, x_axis), anchor="middle")
    for value in _ticks(low_y, high_y, log_y):
        y = float(place_y(np.array(value)))
        yield f'<path d="M{left:.0f} {y:.1f}H{right:.0f}" stroke="{LINE}" stroke-opacity="0.35"/>'
        yield text(left - 6, y + 4, _number(value, y_axis), anchor="end")
    for trace, curve_x, curve_y in zip(traces, xs, ys, strict=True):
        chosen = _chosen(len(curve_x), log_x and not trace.fill)
        points = np.stack([place_x(curve_x[chosen]), place_y(curve_y[chosen])], 1)
        points = points[np.isfinite(points).all(1)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if trace.fill:
            yield f'<polygon points="{path}" fill="{escape(trace.fillcolor)}"/>'
            continue
        color = escape(trace.line.color)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        if "markers" in (trace.mode or ""):
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points)


def _chosen(number: int, log: bool) -> NDArray[np.int64]:
    """Return which points of a curve are drawn: more of the first ones for a logarithmic axis."""
    if number <= MAX_POINTS:
        return np.arange(number)
    places = np.geomspace(1, number, MAX_POINTS) - 1 if log else np.linspace(0, number - 1, MAX_POINTS)
    return np.unique(places.round().astype(np.int64))


def _scaled(values: Floats, log: bool) -> Floats:
    """Return the values of an axis; on a logarithmic one, NaN for values that it does not have."""
    return np.log10(np.where(values > 0, values, np.nan)) if log else values


def _span(curves: Sequence[Floats], log: bool, *, from_zero: bool) -> tuple[float, float] | None:
    """Return the ends of an axis, as `_scaled` gives them; None without a value."""
    values = _scaled(np.concatenate([np.zeros(0), *curves]), log)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if from_zero and not log:
        low = min(low, 0.0)
    margin = 0.05 * (high - low) or 0.05 * (abs(high) or 1.0)
    return (low if from_zero else low - margin), high + margin


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Return round values between the ends of an axis.

    >>> _ticks(0.0, 10.0, False), _ticks(-2.1, 0.3, True)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.01, 0.1, 1.0])
    """
    if log:
        powers = [10.0**power for power in range(int(np.ceil(low)), int(np.floor(high)) + 1)]
        return powers if len(powers) > 1 else [10**low, 10**high]
    rough = (high - low) / NUM_TICKS
    unit = 10 ** np.floor(np.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= 0.999 * rough)
    return [
        round(float(value), 12) for value in np.arange(np.ceil(low / step), np.floor(high / step + 1e-9) + 1) * step
    ]


def _number(value: float, axis: dict[str, Any]) -> str:
    if axis.get("ticksuffix") == "B":
        return num_bytes(value)
    if axis.get("tickformat") == ".0%":
        return percent(value)
    return f"{value:g}" if abs(value) < 1e5 else three_digits(value)


def _title(axis: dict[str, Any]) -> str:
    title = axis.get("title") or ""
    return str(title if isinstance(title, str) else title.get("text", ""))


def _legend(traces: Sequence[Any]) -> Iterator[str]:
    x, y = float(LEFT), TOP + PLOT + 62
    for trace in traces:
        name = str(trace.name)  # `curve_traces` has escaped it
        wide = 34 + 7.0 * len(name)
        if x > LEFT and x + wide > WIDTH:
            x, y = float(LEFT), y + 18
        yield f'<path d="M{x:.0f} {y - 4}h18" stroke="{escape(trace.line.color)}" stroke-width="3"/>'
        yield text(x + 24, y, name)
        x += wide


def text(x: Any, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    """Return a line of text that is escaped already."""
    return f'<text x="{float(x):.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}">{words}</text>'
