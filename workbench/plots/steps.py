"""Every step of a run as two bars: the parts of its time, and its critical path."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from workbench.analysis.critical import UNRECORDED, CriticalPath, critical_path
from workbench.analysis.overlap import Overlap, overlap
from workbench.analysis.summary import trace_coverage
from workbench.analysis.table import seconds
from workbench.errors import ConfigError
from workbench.plots.gantt.figures import time_unit
from workbench.plots.overlap import PARTS
from workbench.plots.style import KIND_COLORS, TEMPLATE, coverage_note, escape_text
from workbench.trace.kinds import KINDS
from workbench.trace.run import Run, as_runs

MAX_STEPS = 200  # largest number of bars; with more steps, a bar is the mean of several
HEIGHT = 560

Floats = NDArray[np.float64]


def per_step(run: Run, steps: slice | None = None) -> go.Figure:
    """Draw the parts of each step (means over ranks) above its critical path.

    The parts are computation, hidden and exposed communication, reading of data, and idle time.

    Args:
        run: a run with a trace.
        steps: slice(first, one after the last); None for all traced steps. With more than 200, bars are means of
            several.

    Raises:
        ConfigError: the trace holds none of these steps.
    """
    (run,) = as_runs([run])
    found, path = overlap(run.spans, steps), critical_path(run.spans, steps)
    if not found.num_steps:
        raise ConfigError(
            f"run {run.id} has no trace of these steps: ask for traced steps, or train with another trace_steps="
        )
    numbers = np.unique(found.step)
    each = -(-len(numbers) // MAX_STEPS)  # steps in a bar
    upper, lower = _parts(found, numbers, each), _kinds(path, numbers, each)
    longest_s = max(float(np.sum(list(parts.values()), axis=0).max()) for parts in (upper, lower) if parts)
    unit, factor = time_unit(longest_s)
    at = numbers[::each]
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=["mean of all ranks", "critical path"]
    )
    for row, parts in ((1, upper), (2, lower)):
        for name, lengths_s in parts.items():
            figure.add_trace(_bar(name, at, lengths_s, factor, each), row=row, col=1)
        figure.update_yaxes(title=f"time ({unit})", rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title="step" if each == 1 else f"step (means of {each})", row=2, col=1)
    figure.update_annotations(font={"size": 13}, x=0, xanchor="left")
    title = f"{escape_text(f'Steps of {run.label}')}{coverage_note(trace_coverage(run))}"
    beside = {
        "orientation": "h",
        "x": 1,
        "xanchor": "right",
        "yanchor": "bottom",
        "traceorder": "normal",
        "font": {"size": 12},
    }
    figure.update_layout(template=TEMPLATE, title=title, height=HEIGHT, barmode="stack", bargap=0.15)
    figure.update_layout(
        legend={**beside, "y": 1.0}, legend2={**beside, "y": figure.layout.yaxis2.domain[1]}, margin={"t": 84}
    )
    return figure


def _means(numbers: NDArray[np.int64], each: int, step: NDArray[np.int64], values: Floats, weights: Floats) -> Floats:
    """Return sums of values over weights for each bar of `each` steps, shape (bars,)."""
    bar = np.searchsorted(numbers, step) // each
    num_bars = -(-len(numbers) // each)
    return np.bincount(bar, values, num_bars) / np.maximum(np.bincount(bar, weights, num_bars), 1.0)


def _parts(found: Overlap, numbers: NDArray[np.int64], each: int) -> dict[str, Floats]:
    ones = np.ones(len(found.step))
    lengths = (found.compute_s - found.hidden_s, found.hidden_s, found.exposed_s, found.load_s, found.idle_s)
    return {
        name: _means(numbers, each, found.step, lengths_s, ones)
        for name, lengths_s in zip(PARTS, lengths, strict=True)
        if name != "reading data" or lengths_s.any()
    }


def _kinds(path: CriticalPath, numbers: NDArray[np.int64], each: int) -> dict[str, Floats]:
    """Return kind -> mean seconds on the path, for kinds on it."""
    lengths_s, first = (
        path.end_s - path.start_s,
        np.append(True, np.diff(path.step) != 0)[: len(path.step)].astype(float),
    )
    once = _means(numbers, each, path.step, first, np.zeros(len(first)))  # number of steps in each bar
    found = {}
    for kind in np.unique(path.kind)[::-1].tolist() if len(path.kind) else ():
        chosen = path.kind == kind
        sums = _means(numbers, each, path.step[chosen], lengths_s[chosen], np.zeros(int(chosen.sum())))
        found[KINDS[kind] if kind >= 0 else UNRECORDED] = sums / np.maximum(once, 1.0)
    order = [*KINDS, UNRECORDED]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def _bar(name: str, at: NDArray[np.int64], lengths_s: Floats, factor: float, each: int) -> go.Bar:
    color = PARTS.get(name) or KIND_COLORS.get(name, "#FFFFFF")
    last = at + each - 1
    when = [
        f"step {one}" if each == 1 else f"steps {one} to {end}"
        for one, end in zip(at.tolist(), last.tolist(), strict=True)
    ]
    spoken = name.replace("_", "-")
    text: list[Any] = [
        f"<b>{spoken}</b>, {one}<br>{seconds(length_s)}" for one, length_s in zip(when, lengths_s.tolist(), strict=True)
    ]
    return go.Bar(
        x=at + (each - 1) / 2,
        y=np.round(lengths_s * factor, 6),
        width=each * 0.85,
        name=spoken,
        legend="legend" if name in PARTS else "legend2",
        marker={
            "color": color,
            "line": {"color": "#8C8C8C" if name == UNRECORDED else color, "width": 1 if name == UNRECORDED else 0},
        },
        hovertext=text,
        hovertemplate="%{hovertext}<extra></extra>",
    )
