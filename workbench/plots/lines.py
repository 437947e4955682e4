"""Convergence: loss and accuracy of several runs over steps, seconds, samples or bytes."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from workbench.analysis.labels import distinct_labels
from workbench.plots.differences import differences
from workbench.plots.style import CYCLE, LINE_PIXELS, TEMPLATE, TOP_PIXELS, escape_text, faded, legend_below
from workbench.trace.run import X_FIELDS, Run, as_runs
from workbench.trace.views import XAxis, YAxis

MAX_POINTS = 1000  # about the resolution of a screen; the faint raw curve has half of it
HEIGHT = 430
Floats = NDArray[np.float64]

X_TITLES: dict[XAxis, str] = {
    "steps": "step",
    "epochs": "epoch",
    "seconds": "training time (s)",
    "samples": "samples seen",
    "bytes": "bytes sent, all ranks together",
}
HOVER_TEXTS: dict[XAxis, str] = {
    "steps": "step %{x:.0f}",
    "epochs": "epoch %{x:.2f}",
    "seconds": "%{x:.3f} s",
    "samples": "%{x:.4s} samples",
    "bytes": "%{x:.4s}B sent",
}
Y_TITLES = {
    "loss": "training loss",
    "test_loss": "test loss",
    "accuracy": "test accuracy",
    "consensus_distance": "distance of replicas from their mean",
}
LOSSES = ("loss", "test_loss")  # may have a logarithmic axis
SMOOTH = 0.02  # share of a curve over which the minibatch loss is averaged


def curves(
    runs: Sequence[Run],
    x: XAxis = "seconds",
    y: YAxis = "loss",
    *,
    smooth: float = SMOOTH,
    log_x: bool = False,
    log_y: bool = False,
    max_points: int = MAX_POINTS,
) -> go.Figure:
    """Draw one curve for each algorithm.

    Runs that differ only in their seed become a mean and a band from lowest to highest.

    Args:
        runs: runs to compare; handles of `Cluster.train` are allowed.
        x: "steps", "epochs", "seconds" (of training, without evaluation), "samples" or "bytes" (sent by all ranks).
        y: "loss" (minibatches), "test_loss" or "accuracy" (evaluations), or one of the problem's metrics.
        smooth: share of a curve over which the minibatch loss is averaged; the raw loss is drawn faintly behind it.
            0: no average.
        log_x, log_y: logarithmic axes.
        max_points: a curve with more keeps its ends and extremes (`decimate`).
    """
    runs = as_runs(runs)
    figure = go.Figure(layout={"template": TEMPLATE, "hovermode": "closest"})
    figure.add_traces(curve_traces(runs, x, y, smooth=smooth, max_points=max_points))
    figure.update_xaxes(**x_axis(runs, x, log_x))
    figure.update_yaxes(**y_axis(y, log_y))
    figure.update_layout(title=escape_text(_title(runs, Y_TITLES.get(y, y))), showlegend=True)
    legend_below(figure, HEIGHT, [trace.name for trace in figure.data if trace.name])
    _show_failures(figure, runs)
    return figure


def measured_axes(runs: Sequence[Run]) -> list[YAxis]:
    """Return what the runs measure on the test data: accuracy if they do, their problems' own metrics, the test loss."""
    runs = as_runs(runs)
    accuracy: list[YAxis] = ["accuracy"] if any(len(run.curve("steps", "accuracy")[0]) for run in runs) else []
    return [*accuracy, *dict.fromkeys(name for run in runs for name in run.metric_names), "test_loss"]


def offered_axes(runs: Sequence[Run]) -> list[XAxis]:
    """Return the x axes that all runs have: epochs only if their length is known."""
    return [x for x in X_FIELDS if x != "epochs" or all(run.steps_per_epoch for run in as_runs(runs))]


def convergence(
    runs: Sequence[Run],
    x: XAxis = "seconds",
    *,
    right: YAxis | None = None,
    smooth: float = SMOOTH,
    log_x: bool = False,
    log_y: bool = False,
    max_points: int = MAX_POINTS,
) -> go.Figure:
    """Draw the training loss next to a curve on the test data. A point's hover text has its step, bytes and seconds.

    Args:
        runs: runs to compare.
        x: as in `curves`.
        right: "accuracy", "test_loss", or one of the problems' own metrics. None: the accuracy if it is measured, else
            the first metric, else the test loss.
        smooth, max_points: as in `curves`.
        log_x: logarithmic x axes.
        log_y: logarithmic axes of the losses.
    """
    runs = as_runs(runs)
    right = measured_axes(runs)[0] if right is None else right
    figure = go.Figure(_two_panels())
    panels: tuple[YAxis, YAxis] = ("loss", right)
    for column, y in enumerate(panels, 1):
        traces = curve_traces(runs, x, y, smooth=smooth, max_points=max_points, details=True)
        for trace in traces:
            trace.showlegend = trace.showlegend is not False and column == 1
        figure.add_traces(traces, rows=1, cols=column)
    below = x_axis(runs, x, log_x)
    axes = {
        "xaxis": below,
        "yaxis": y_axis("loss", log_y),
        "xaxis2": below,
        "yaxis2": y_axis(right, log_y and right in LOSSES),
    }
    figure.update_layout(title=escape_text(_title(runs, "convergence")), **axes)
    legend_below(figure, HEIGHT, [trace.name for trace in figure.data if trace.showlegend])
    _show_failures(figure, runs)
    return figure


@cache
def _two_panels() -> go.Figure:
    """Return the empty figure, made once: Plotly needs 10 ms for it, and a live view draws five times a second."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    return figure.update_layout(template=TEMPLATE, hovermode="closest", showlegend=True)


def curve_traces(
    runs: Sequence[Run],
    x: XAxis,
    y: YAxis,
    *,
    smooth: float = SMOOTH,
    max_points: int = MAX_POINTS,
    details: bool = False,
) -> list[go.Scatter]:
    """Return the curves' traces: for each group of repetitions a line, and a band or the faint raw curve.

    `details`: the hover text of a single run has all its x axes, and the number of ranks.
    """
    groups = _repetitions(runs)
    own = {name for run in runs for name in run.metric_names}
    traces: list[go.Scatter] = []
    for position, (label, members) in enumerate(groups.items()):
        color = CYCLE[position % len(CYCLE)]
        name = escape_text(label) + (f" (mean of {len(members)})" if len(members) > 1 else "")
        common = {"legendgroup": label, "hoverlabel": {"namelength": -1}}
        # another run may not measure this run's metric
        measured = [(run, run.curve_rows(y)) for run in members if y not in own or y in run.metric_names]
        xs, middle, low, high = _merge(
            [(run.abscissa(rows, x), np.array([row[y] for row in rows], float)) for run, rows in measured]
        )
        if y == "loss" and smooth > 0:
            window = max(1, round(smooth * len(xs)))
            if len(members) == 1 and window > 1:
                raw_x, raw_y = decimate(xs, middle, max_points // 2)
                faint = {"color": faded(color, 0.25), "width": 1}
                traces.append(
                    go.Scatter(x=raw_x, y=raw_y, mode="lines", line=faint, showlegend=False, hoverinfo="skip", **common)
                )
            middle, low, high = (moving_average(values, window) for values in (middle, low, high))
        if len(members) > 1:
            traces.append(_band(xs, low, high, color, max_points, common))
        line_x, line_y = decimate(xs, middle, max_points)
        mode = "lines+markers" if len(line_x) <= 40 else "lines"
        line, marker = {"color": color, "width": 2.2}, {"size": 6}
        hover = {"hovertemplate": _hover(x, y)}
        if details and len(members) == 1 and len(line_x):
            hover = _detailed_hover(*measured[0], x, y, line_x)
        traces.append(go.Scatter(x=line_x, y=line_y, name=name, mode=mode, line=line, marker=marker, **hover, **common))
    return traces


def _detailed_hover(run: Run, rows: Sequence[dict[str, Any]], x: XAxis, y: YAxis, shown: Floats) -> dict[str, Any]:
    """Return the hover text of a run's points `shown`, with their places on the other x axes, and the ranks."""
    place = np.searchsorted(run.abscissa(rows, x), shown).clip(0, len(rows) - 1)
    others = [name for name in offered_axes([run]) if name != x]
    lines = [HOVER_TEXTS[name].replace("{x", f"{{customdata[{number}]") for number, name in enumerate(others)]
    lines += [f"all {run.num_ranks} ranks"] if run.num_ranks > 1 else []
    text = "<br>".join([_hover(x, y).removesuffix("<extra></extra>"), *lines]) + "<extra></extra>"
    columns = [run.abscissa(rows, name)[place] for name in others]
    return {"customdata": np.array(columns, np.float32).T, "hovertemplate": text}


def _show_failures(figure: go.Figure, runs: Sequence[Run]) -> None:
    """Write failures between title and curves, because axes alone do not show them.

    The figure is made higher by the height of the text, so that it hides no curve.
    """
    named = zip(distinct_labels(runs), runs, strict=True)
    troubles = [
        escape_text(f"{label}: {run.failure_summary}" if len(runs) > 1 else run.failure_summary)
        for label, run in named
        if run.failure_summary
    ]
    if troubles:
        lines = [line for words in troubles[:3] for line in textwrap.wrap(words, 90)[:3]]
        place = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "yshift": 8}
        look = {
            "showarrow": False,
            "bgcolor": "#fff0f0",
            "bordercolor": "#b00020",
            "font": {"color": "#b00020"},
            "align": "left",
        }
        figure.add_annotation(text="<br>".join(lines), **place, **look)
        extra = LINE_PIXELS * len(lines)
        title = {"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 18}}
        figure.update_layout(height=figure.layout.height + extra, margin={"t": TOP_PIXELS + extra}, title=title)


def _repetitions(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return label -> runs that differ only in their seed, have ended, and have equal length. Other runs are alone."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for label, members in _by_settings(runs).items():
        lengths = {max(run.rows(), default=-1) for run in members if not _is_apart(run, members)}
        for position, run in enumerate(members, 1):
            status = str(run.info.get("status"))
            if _is_apart(run, members):
                number = f" ({position} of {len(members)})" if len(members) > 1 else ""
                groups[f"{label}, {status}{number}"].append(run)
            else:
                steps = max(run.rows(), default=-1) + 1
                groups[f"{label}, {steps} steps" if len(lengths) > 1 else label].append(run)
    return groups


def _by_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return label -> runs that differ only in their seed. Labels do not have all settings, so these are added."""
    labelled: dict[str, list[Run]] = defaultdict(list)
    for label, run in zip(distinct_labels(runs, repetitions=False), runs, strict=True):
        labelled[label].append(run)
    together: dict[str, list[Run]] = defaultdict(list)
    for label, members in labelled.items():
        for run, settings in zip(members, differences(members), strict=True):
            more = [f"{name}={value}" for name, value in settings.items() if name != "seed" and value is not None]
            together[", ".join([label, *more])].append(run)
    return together


def _is_apart(run: Run, members: Sequence[Run]) -> bool:
    """Return whether a run is excluded from a mean: it failed, or it has not ended and there are others."""
    return bool(run.failure_summary) or (len(members) > 1 and run.info.get("status") not in (None, "finished"))


def x_axis(runs: Sequence[Run], x: XAxis, log_x: bool = False) -> dict[str, Any]:
    """Return title and ticks of the x axis."""
    virtual = [run.info.get("clock") == "virtual" for run in runs]
    title = X_TITLES[x]
    if x == "seconds" and any(virtual):
        title = "virtual training time (s)" if all(virtual) else "training time, wall or virtual (s)"
    ticks = {"tickformat": "~s" if x in ("bytes", "samples") else None, "ticksuffix": "B" if x == "bytes" else ""}
    return {"title": title, "type": "log"} | ticks if log_x else {"title": title, "rangemode": "tozero", **ticks}


def y_axis(y: YAxis, log_y: bool = False) -> dict[str, Any]:
    """Return title and ticks of the y axis."""
    return {
        "title": Y_TITLES.get(y, y),
        "tickformat": ".0%" if y == "accuracy" else None,
        "type": "log" if log_y else "linear",
    }


def decimate(xs: Floats, ys: Floats, max_points: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Return at most `max_points` (at least 4) points: the first, the last, and the extremes of equal intervals.

    >>> decimate(np.arange(100.0), np.zeros(100), 4)[0].tolist()
    [0.0, 1.0, 99.0]
    """
    max_points = max(max_points, 4)
    if len(xs) <= max_points:
        return xs, ys
    keep = {0, len(xs) - 1}
    for part in np.array_split(np.arange(1, len(xs) - 1), (max_points - 2) // 2):
        keep |= {int(part[ys[part].argmin()]), int(part[ys[part].argmax()])}
    chosen = np.array(sorted(keep))
    return xs[chosen], ys[chosen]


def moving_average(ys: Floats, window: int) -> Floats:
    """Return each value's mean with its neighbours, `window` values in all, and fewer near the ends.

    >>> moving_average(np.array([1.0, 2.0, 6.0, 2.0]), 3)
    array([1.        , 3.        , 3.33333333, 2.        ])
    """
    half = window // 2
    if half == 0 or len(ys) < 3:
        return ys
    total = np.append(0.0, np.cumsum(ys))
    index = np.arange(len(ys))
    # symmetric: otherwise a slope would bend at the ends
    reach = np.minimum(np.minimum(index, len(ys) - 1 - index), half)
    return np.asarray((total[index + reach + 1] - total[index - reach]) / (2 * reach + 1))


def _merge(members: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Return x, mean, lowest and highest of several curves, at the first curve's x that all have reached.

    Infinite losses are left out.
    """
    finite = [(xs[np.isfinite(ys)], ys[np.isfinite(ys)]) for xs, ys in members]
    filled = [(xs, ys) for xs, ys in finite if len(xs)]
    if len(filled) <= 1:
        xs, ys = filled[0] if filled else (np.zeros(0), np.zeros(0))
        return xs, ys, ys, ys
    first, last = max(xs[0] for xs, _ in filled), min(xs[-1] for xs, _ in filled)
    grid = filled[0][0]
    grid = np.unique(np.clip(grid, first, max(first, last)))
    values = np.array([np.interp(grid, xs, ys) for xs, ys in filled])
    return grid, values.mean(0), values.min(0), values.max(0)


def _band(xs: Floats, low: Floats, high: Floats, color: str, max_points: int, common: dict[str, Any]) -> go.Scatter:
    keep = (
        np.unique(np.linspace(0, len(xs) - 1, min(len(xs), max_points // 2)).astype(int))
        if len(xs)
        else np.zeros(0, int)
    )
    around = np.concatenate([xs[keep], xs[keep][::-1]])
    edge = np.concatenate([high[keep], low[keep][::-1]])
    fill = faded(color, 0.18)
    return go.Scatter(
        x=around,
        y=edge,
        fill="toself",
        fillcolor=fill,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        **common,
    )


def _hover(x: XAxis, y: YAxis) -> str:
    value = "%{y:.2%}" if y == "accuracy" else "%{y:.4g}"
    return f"%{{fullData.name}}<br>{Y_TITLES.get(y, y)} {value}<br>{HOVER_TEXTS[x]}<extra></extra>"


def _title(runs: Sequence[Run], what: str) -> str:
    """Return the title: the quantity, and the problem if all runs have the same."""
    problems = {str((run.info.get("problem") or {}).get("name") or "") for run in runs} - {""}
    what = what[0].upper() + what[1:]
    return f"{what}: {problems.pop()}" if len(problems) == 1 else what
