"""Figures of studies: scaling with workers, parts of a step, values over two parameters, curves."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analysis.summary import steady_overlap
from workbench.analysis.table import seconds, slept_words, three_digits
from workbench.errors import ConfigError
from workbench.plots.line_names import name_line_ends
from workbench.plots.overlap import PARTS, step_parts
from workbench.plots.style import (
    AXIS_PIXELS,
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    LIGHT_GREY,
    LINE_PIXELS,
    TEMPLATE,
    VERMILION,
    escape_text,
    faded,
    ink_on,
    legend_below,
)
from workbench.trace.run import Run

HEIGHT = 430
MOST_NAMES = 6  # lines with names at their ends
DASHES = ("solid", "dash", "dot", "dashdot")
PART_COLORS = (BLUE, GREEN, VERMILION, LIGHT_GREY, *CYCLE[3:6])
BAR_PIXELS, ROW_GAP_PIXELS, TITLES_PIXELS = 30, 96, 84

Series = Mapping[Any, float | Sequence[float]]  # x -> y, or y of every repetition


def scaling(curves: Mapping[str, Series], *, title: str = "Scaling") -> go.Figure:
    """Draw speed-up and efficiency over the number of workers, with a band from the lowest to the highest repetition.

    Args:
        curves: name -> workers -> samples a second, or those of every repetition. A name without values keeps its
            colour for other figures. All are compared with one worker's share of the best mean rate at the fewest
            workers.
        title: title of the figure.

    Raises:
        ConfigError: there are no rates.
    """
    known = [series for series in curves.values() if series]
    if not known:
        raise ConfigError("no data to draw: give a mapping {name: {workers: samples per second}}")
    fewest, most = min(map(min, known)), max(map(max, known))
    alone = max(float(np.mean(series[fewest])) for series in known if fewest in series) / fewest
    speedups = {name: {p: np.asarray(rate) / alone for p, rate in series.items()} for name, series in curves.items()}
    shares = {name: {p: speedup / p for p, speedup in series.items()} for name, series in speedups.items()}
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    figure.update_layout(template=TEMPLATE, title=escape_text(title), hovermode="closest")
    ideal = go.Scatter(
        x=[fewest, most],
        y=[fewest, most],
        mode="lines",
        name="ideal",
        line={"color": GREY, "width": 1.5, "dash": "dot"},
    )
    figure.add_trace(ideal, row=1, col=1)
    figure.add_traces(_lines(speedups, "%{x} workers: speed-up %{y:.4~g}"), rows=1, cols=1)
    figure.add_traces(_lines(shares, "%{x} workers: efficiency %{y:.1%}", legend=False), rows=1, cols=2)
    figure.update_xaxes(title="workers", **log_axis(sorted({p for series in known for p in series})))
    figure.update_yaxes(title="speed-up over one worker", type="log", dtick=1, row=1, col=1)
    highest = max(float(np.max(share)) for series in shares.values() for share in series.values())
    figure.update_yaxes(title="efficiency", tickformat=".0%", range=[0, 1.04 * max(1.0, highest)], row=1, col=2)
    legend_below(figure, HEIGHT, [name for name, series in curves.items() if series] + ["ideal"])
    return figure


def curves_of(
    curves: Mapping[str, Series],
    points: Mapping[str, Series] | None = None,
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, float] | None = None,
    reference: float | None = None,
    circles: str = "simulated",
) -> go.Figure:
    """Draw lines of numbers over numbers, with a band from the lowest to the highest repetition if there are several.

    Up to six lines without circles have their names at their ends, more lines have a legend.

    Args:
        curves: name -> x -> y, or the y of every repetition.
        points: the same, with the same names: simulated or measured values, drawn as circles in the colour of their
            line.
        title, x, y: titles of the figure and its axes.
        log_x, log_y: logarithmic axes.
        marks: name -> x of a point of that line to mark, for example its best.
        reference: y of a horizontal line.
        circles: name of the points in the legend.
    """
    figure = go.Figure(layout={"template": TEMPLATE, "title": escape_text(title), "hovermode": "closest"})
    colors = {name: CYCLE[position % len(CYCLE)] for position, name in enumerate(curves)}
    figure.add_traces(_lines(curves, "%{x:.4~g}: %{y:.4~g}"))
    for name, series in (points or {}).items():
        figure.add_trace(_circles(name, series, colors.get(name, GREY)))
    if points:
        figure.add_trace(go.Scatter(x=[None], y=[None], name=circles, **_circle(GREY)))
    for name, at in (marks or {}).items():
        height = float(np.mean(curves[name][at]))
        marker = {"symbol": "star", "size": 14, "color": colors[name], "line": {"color": "white", "width": 1}}
        figure.add_scatter(x=[at], y=[height], mode="markers", marker=marker, showlegend=False, hoverinfo="skip")
    if reference is not None:
        figure.add_hline(y=reference, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(
        title=escape_text(x), **(log_axis(sorted({at for series in curves.values() for at in series})) if log_x else {})
    )
    figure.update_yaxes(title=escape_text(y), **(_log_y(curves) if log_y else {"rangemode": "tozero"}))
    drawn = {name: series for name, series in curves.items() if series}
    if drawn and not points and len(drawn) <= MOST_NAMES:
        ends = {name: (max(series), float(np.mean(series[max(series)]))) for name, series in drawn.items()}
        xs = sorted({at for series in drawn.values() for at in series})
        ys = [float(value) for series in drawn.values() for at in series for value in np.ravel(series[at])]
        lowest = (xs[0], min(ys) if log_y else min(0.0, *ys))
        how = {"log_x": log_x, "log_y": log_y}
        name_line_ends(figure, ends, colors, lowest=lowest, highest=(xs[-1], max(ys)), **how)
        figure.update_layout(showlegend=False, height=HEIGHT)
    else:
        figure.update_layout(showlegend=True)
        legend_below(figure, HEIGHT, [*curves, "simulated"])
    return figure


def step_bars(
    groups: Mapping[str, Mapping[str, Run]], *, title: str = "Time of a step", one_scale: bool = False
) -> go.Figure:
    """Draw a stacked bar for each run, as `overlap_bars`, in groups next to each other.

    The title says if ranks slept for their compute. If only some runs did, their entries say it.

    Args:
        groups: group -> entry -> run.
        title: title of the figure.
        one_scale: whether all groups have the same axis, to compare them.

    Raises:
        ConfigError: there are no runs.
    """
    if not groups or not all(groups.values()):
        raise ConfigError("no runs to draw: give a mapping {group: {entry: run}}")
    all_slept = all(run.slept for group in groups.values() for run in group.values())

    def entry_name(entry: str, run: Run) -> str:
        return entry + slept_words(slept=run.slept and not all_slept)

    entries = [(name, entry_name(entry, run), run) for name, group in groups.items() for entry, run in group.items()]
    bars: dict[str, dict[str, dict[str, float]]] = {name: {} for name in groups}
    for (name, entry, _), parts in zip(entries, step_parts([steady_overlap(run) for *_, run in entries]), strict=True):
        bars[name][entry] = parts
    return stacked_bars(
        bars,
        title=title + slept_words(slept=all_slept),
        one_scale=one_scale,
    )


def stacked_bars(
    groups: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    title: str,
    of: str = "a step",
    one_scale: bool = False,
) -> go.Figure:
    """Draw a stacked bar for each entry, in groups next to each other.

    An entry is in the same row of each group.

    Args:
        groups: group -> entry -> part -> seconds, with the same parts.
        title: title of the figure.
        of: what takes the seconds.
        one_scale: whether all groups have the same axis, to compare them. By default each has its own.

    Raises:
        ConfigError: there are no entries.
    """
    if not groups or not all(groups.values()):
        raise ConfigError("no data to draw: give a mapping {group: {entry: {part: seconds}}}")
    found = groups
    entries = list(dict.fromkeys(entry for group in found.values() for entry in group))
    parts = list(next(iter(next(iter(found.values())).values())))
    columns = 2 if len(groups) == 4 else min(3, len(groups))
    rows = -(-len(groups) // columns)
    inner = BAR_PIXELS * len(entries) * rows + ROW_GAP_PIXELS * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_yaxes=True,
        subplot_titles=[f"<b>{escape_text(name)}</b>" for name in groups],
        horizontal_spacing=0.035,
        vertical_spacing=ROW_GAP_PIXELS / inner if rows > 1 else 0,
    )
    longest = [max((sum(entry.values()) for entry in group.values()), default=0.0) for group in found.values()]
    for number, group in enumerate(found.values()):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        longest_s = max(longest) if one_scale else longest[number]
        unit, factor = ("µs", 1e6) if longest_s < 2e-3 else ("ms", 1e3) if longest_s < 10 else ("s", 1.0)
        for part, color in zip(parts, PART_COLORS, strict=False):
            lengths_s = [group.get(entry, {}).get(part, 0.0) for entry in entries]
            shown = PARTS.get(part, color)
            figure.add_trace(_stacked_part(part, shown, entries, lengths_s, factor, legend=number == 0), **place)
        figure.update_xaxes(
            title=f"time of {of} ({unit})", range=[0, longest_s * factor * 1.04 or 1], nticks=5, **place
        )
    figure.update_yaxes(autorange="reversed", ticks="", showgrid=False)
    figure.update_annotations(font={"size": 12})
    figure.update_layout(
        template=TEMPLATE, title=escape_text(title), barmode="stack", bargap=0.3, legend={"traceorder": "normal"}
    )
    figure.update_layout(uniformtext={"mode": "hide", "minsize": 9}, margin={"t": TITLES_PIXELS})
    legend_below(figure, TITLES_PIXELS + inner + AXIS_PIXELS + LINE_PIXELS, parts)
    figure.update_layout(legend={"y": -AXIS_PIXELS / inner})
    return figure


def heat_map(
    values: Sequence[Sequence[float | None]],
    xs: Sequence[Any],
    ys: Sequence[Any],
    *,
    title: str,
    x: str,
    y: str,
    around: float | None = None,
    number: Callable[[float], str] = three_digits,
) -> go.Figure:
    """Draw a table of two parameters with a number and a colour in each cell.

    Args:
        values: (len(ys), len(xs)); None for a missing value.
        xs, ys: values of the parameters; `ys` from top to bottom.
        title, x, y: titles of the figure and its axes.
        around: for positive values, the value that is white; larger values are blue, smaller ones red, by their ratio.
            None: larger is darker.
        number: format of the numbers.
    """
    shown = np.array([[np.nan if value is None else value for value in row] for row in values], float)
    ratios = shown if around is None else np.log(shown / around)
    colors: dict[str, Any] = {"colorscale": "Blues"}
    if around is not None:
        most = float(np.nanmax(np.abs(ratios), initial=1e-9))
        colors = {"colorscale": "RdBu", "zmin": -most, "zmax": most}
    letters = min(12, 84 // max(len(xs), 1))  # 84 letters of a label fit next to each other
    heat = go.Heatmap(
        z=ratios,
        x=[_wrapped(value, letters) for value in xs],
        y=[f"{escape_text(value)} " for value in ys],
        text=[["" if np.isnan(value) else number(value) for value in row] for row in shown.tolist()],
        texttemplate="%{text}",
        textfont={"size": 11},
        hovertemplate=f"{escape_text(x)} %{{x}}<br>{escape_text(y)} %{{y}}<br>%{{text}}<extra></extra>",
        hoverongaps=False,
        showscale=False,
        xgap=1,
        ygap=1,
        **colors,
    )
    figure = go.Figure(heat)
    figure.update_layout(template=TEMPLATE, title=escape_text(title), height=170 + 32 * len(ys))
    figure.update_xaxes(title=escape_text(x), type="category", showgrid=False, ticks="", tickangle=0)
    figure.update_yaxes(title=escape_text(y), type="category", autorange="reversed", showgrid=False, ticks="")
    return figure


def _wrapped(value: Any, letters: int) -> str:
    """Wrap a label into lines of at most this number of letters. A longer word stays whole."""
    return "<br>".join(textwrap.wrap(escape_text(value), max(letters, 1), break_long_words=False)) or " "


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at these values; with more than ten, at round values."""
    if len(values) > 10:
        return round_log_axis(min(values), max(values))
    return {"type": "log", "tickvals": list(values), "ticktext": [f"{value:,.6g}" for value in values]}


def _log_y(curves: Mapping[str, Series]) -> dict[str, Any]:
    """Return a logarithmic axis with round ticks."""
    found = np.concatenate([np.ravel(np.asarray(list(series.values()), float)) for series in curves.values() if series])
    return round_log_axis(float(found.min()), float(found.max()))


def round_log_axis(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at powers of ten; at 1, 2, 5, 10, ... if it spans less than two of them."""
    if not 0 < low <= high < 100 * low:
        return {"type": "log", "dtick": 1}
    first = math.floor(math.log10(low))
    steps = [float(f"{step}e{power}") for power in range(first, first + 4) for step in (1, 2, 5)]
    ticks = [step for step in steps if 0.9 * low <= step <= 1.1 * high]
    if len(ticks) < 2:
        return {"type": "log"}
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.6g}" for tick in ticks]}


def _lines(curves: Mapping[str, Series], hover: str, *, legend: bool = True) -> list[go.Scatter]:
    """Return the traces of each name: a line with points, and a band of its repetitions.

    A name without numbers keeps its colour.
    """
    traces: list[go.Scatter] = []
    for position, (name, series) in enumerate(curves.items()):
        if series:
            dash = DASHES[position // len(CYCLE) % len(DASHES)]
            traces += band_and_line(name, series, CYCLE[position % len(CYCLE)], hover, dash=dash, legend=legend)
    return traces


def band_and_line(
    name: str,
    series: Series,
    color: str,
    hover: str = "%{x:.4~g}: %{y:.4~g}",
    *,
    dash: str = "solid",
    legend: bool = True,
) -> list[go.Scatter]:
    """Return the traces of a line with points and, if there are repetitions, of a band from the lowest to the highest.

    Args:
        name: of the line.
        series: x -> y, or the y of every repetition; not empty.
        color: of both.
        hover: text of a point, in Plotly's form.
        dash: of the line.
        legend: whether the legend has it.
    """
    traces: list[go.Scatter] = []
    xs = sorted(series)
    ys = [np.atleast_1d(np.asarray(series[at], float)) for at in xs]
    common: dict[str, Any] = {"legendgroup": name, "hoverlabel": {"namelength": -1}}
    if any(len(values) > 1 for values in ys):
        edge = [values.max() for values in ys] + [values.min() for values in reversed(ys)]
        fill = {"fill": "toself", "fillcolor": faded(color, 0.2), "line": {"width": 0}, "mode": "lines"}
        traces.append(go.Scatter(x=xs + xs[::-1], y=edge, hoverinfo="skip", showlegend=False, **fill, **common))
    how: dict[str, Any] = {
        "mode": "lines+markers" if len(xs) <= 40 else "lines",
        "line": {"color": color, "width": 2.2, "dash": dash},
        "marker": {"size": 6, "color": color},
        "hovertemplate": f"%{{fullData.name}}<br>{hover}<extra></extra>",
    }
    middle = [float(values.mean()) for values in ys]
    traces.append(go.Scatter(x=xs, y=middle, name=escape_text(name), showlegend=legend, **how, **common))
    return traces


def _circles(name: str, series: Series, color: str) -> go.Scatter:
    middle = [float(np.mean(value)) for value in series.values()]
    hover = f"{escape_text(name)}, simulated<br>%{{x:.4~g}}: %{{y:.4~g}}<extra></extra>"
    return go.Scatter(
        x=list(series), y=middle, legendgroup=name, showlegend=False, hovertemplate=hover, **_circle(color)
    )


def _circle(color: str) -> dict[str, Any]:
    return {"mode": "markers", "marker": {"size": 11, "symbol": "circle-open", "color": color, "line": {"width": 2}}}


def _stacked_part(
    part: str, color: str, entries: Sequence[str], lengths_s: Sequence[float], factor: float, *, legend: bool
) -> go.Bar:
    return go.Bar(
        orientation="h",
        y=[f"{escape_text(entry)} " for entry in entries],
        x=[length_s * factor for length_s in lengths_s],
        name=escape_text(part),
        legendgroup=part,
        showlegend=legend,
        marker={"color": color, "line": {"color": "white", "width": 0.5}},
        text=[seconds(length_s) for length_s in lengths_s],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": ink_on(color), "size": 11},
        hovertemplate=f"<b>{escape_text(part)}</b> of %{{y}}<br>%{{text}} a step<extra></extra>",
    )
