"""The timeline: what every rank did when. Ranks are below each other, computation is above communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analysis.critical import critical_path
from workbench.analysis.labels import distinct_labels
from workbench.analysis.summary import trace_coverage
from workbench.analysis.table import num_bytes, seconds
from workbench.errors import ConfigError
from workbench.plots.gantt.layout import FILLED, MAX_BARS, Panel, panel, usual_time
from workbench.plots.gantt.marks import arrows, path_line
from workbench.plots.style import GREY, GRID, INK, KIND_COLORS, MUTED_INK, TEMPLATE, coverage_note, escape_text, ink_on
from workbench.trace.kinds import KINDS
from workbench.trace.run import Run, as_runs

ROW_PIXELS = 27
TOP, GAP, BOTTOM = 96, 46, 64  # pixels above, between and below panels
TITLE = 34  # pixels more above the legend for a title
LABEL_SHARE = 0.06  # share of the axis: a step closer to the last numbered one has no number
MARKED_STEPS = 50  # with more steps, only numbered ones have a line
LABELLED_BARS = 1500  # with more bars, they have no numbers


Steps = slice | None


def timeline(
    run: Run,
    steps: Steps = None,
    ranks: Iterable[int] | None = None,
    *,
    links: bool = True,
    critical: bool = False,
    folded: bool | None = None,
) -> go.Figure:
    """Draw what each rank did: a row for each rank and lane, coloured by kind.

    Overlapping spans of a lane are in further rows. A folded rank is one row: computation above all else.
    `plots.TraceViewer` folds and unfolds ranks by a click.

    The number in a bar is the step of a forward or backward, or the bucket of a span that has one. Click on the
    legend to hide a kind, or to show the arrows of messages if they are too many to be shown at first.

    Args:
        run: a run with a trace.
        steps: slice(first, one after the last); None for five from the middle of the run. Of those five, a step that
            takes more than three times the median is outside the axis at first. The title says so; a double click
            shows it.
        ranks: which ranks; None for all.
        links: draw an arrow from each send to its receive.
        critical: draw each step's critical path over the bars (see `workbench.analysis.critical_path`).
        folded: draw one row for each rank; None: if `ranks` is None and there are more than eight.

    Raises:
        ConfigError: the trace holds none of these steps; the message says which it holds.
    """
    return timelines([run], steps, ranks, links=links, critical=critical, folded=folded)


def timelines(
    runs: Sequence[Run],
    steps: Steps | Sequence[Steps] = None,
    ranks: Iterable[int] | None = None,
    *,
    links: bool = True,
    critical: bool = False,
    folded: bool | None = None,
    names: Sequence[str] | None = None,
    title: str = "",
) -> go.Figure:
    """Draw the timelines of several runs below each other, on one time axis.

    Each run begins with its first step shown.

    Args:
        runs: runs with traces.
        steps: as for `timeline`; or a list with one entry for each run.
        ranks, links, critical, folded: as for `timeline`.
        names: titles of the runs; None: their algorithms, and what distinguishes them.
        title: title of the figure, above the legend.

    Raises:
        ConfigError: there are no runs, or a trace holds none of these steps; the message says which it holds.
    """
    runs = as_runs(runs)
    if not runs:
        raise ConfigError("no run to show: give at least one")
    windows = [steps] * len(runs) if steps is None or isinstance(steps, slice) else list(steps)
    labels = distinct_labels(runs) if names is None else list(names)
    if len(windows) != len(runs) or len(labels) != len(runs):
        raise ConfigError(
            f"{len(runs)} runs, {len(windows)} windows of steps and {len(labels)} names: give one of each for every run"
        )
    chosen = None if ranks is None else list(ranks)
    panels = [
        panel(run, window, chosen, MAX_BARS // len(runs), folded) for run, window in zip(runs, windows, strict=True)
    ]
    usual = [
        usual_time(item.bounds, item.length_s) if window is None else (0.0, item.length_s, {})
        for item, window in zip(panels, windows, strict=True)
    ]
    begin_s, end_s = min(begin for begin, _, _ in usual), max(end for _, end, _ in usual)
    unit, factor = time_unit(end_s - begin_s)
    figure = _frame(panels, title)
    seen: set[str] = set()
    shapes, notes = list[Any](), list[Any]()
    for number, (run, item, label, (_, _, unusual)) in enumerate(zip(runs, panels, labels, usual, strict=True), 1):
        traces: list[Any] = _bars(item, factor)
        traces += [trace for trace in (arrows(run, item, factor),) if links and trace is not None]
        if critical:
            inside = slice(min(item.bounds), max(item.bounds) + 1) if item.bounds else slice(0, 0)
            traces.append(path_line(critical_path(run.spans, inside), item, factor))
        for trace in traces:  # in the legend once
            trace.showlegend = trace.legendgroup not in seen
            seen.add(trace.legendgroup)
        figure.add_traces(traces, rows=number, cols=1)
        figure.update_yaxes(**_row_names(item), row=number, col=1)
        more = _decorate(
            number,
            item,
            f"<b>{escape_text(label)}</b>{coverage_note(trace_coverage(run))}{_merging_note(item)}{_unusual_note(unusual)}",
            factor,
            end_s - begin_s,
        )
        shapes, notes = shapes + more[0], notes + more[1]
    figure.update_xaxes(range=[begin_s * factor, end_s * factor], showgrid=False)
    figure.update_xaxes(title=f"time ({unit})", row=len(runs), col=1)
    figure.update_layout(shapes=shapes, annotations=notes)
    return figure


def _frame(panels: Sequence[Panel], title: str) -> go.Figure:
    """Make an empty figure with an axis for each panel, as high as its rows."""
    top = TOP + bool(title) * TITLE
    heights = [item.rows.ends[-1] * ROW_PIXELS for item in panels]
    inner = sum(heights) + GAP * (len(panels) - 1)
    spacing = GAP / inner if len(panels) > 1 else 0
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=spacing)
    figure.update_layout(
        template=TEMPLATE,
        height=inner + top + BOTTOM,
        margin={"t": top, "b": BOTTOM},
        title={"text": escape_text(title), "yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 12}},
        barmode="overlay",
        bargap=0,
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 9},
        legend={"y": 1 + 48 / inner, "itemsizing": "constant", "traceorder": "normal"},
    )
    return figure


def _bars(item: Panel, factor: float) -> list[go.Bar]:
    """Return a trace for each kind."""
    table, labelled = item.table, len(item.table) <= LABELLED_BARS
    digits = 6 if item.num_spans == len(table) else 12  # the lengths of joined bars add up
    about = _hover_texts(item)
    bars = []
    for code in np.unique(table["kind"]):
        chosen = table["kind"] == code
        mine, color = table[chosen], KIND_COLORS[KINDS[code]]
        bars.append(
            go.Bar(
                orientation="h",
                base=np.round(mine["start_s"] * factor, digits),
                x=np.round((mine["end_s"] - mine["start_s"]) * factor, digits),
                y=item.rows.center[chosen],
                width=item.rows.height[chosen] * FILLED,
                name=_kind_name(code),
                legendgroup=KINDS[code],
                legendrank=int(code),
                marker={"color": color, "line": {"color": "white", "width": 0.5 if labelled else 0}},
                text=[_bar_text(row) for row in mine] if labelled else None,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"size": 10, "color": ink_on(color)},
                hovertext=[about[bar] for bar in np.flatnonzero(chosen).tolist()],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    return bars


def _kind_name(code: int) -> str:
    return KINDS[code].replace("_", "-")


def _bar_text(row: Any) -> str:
    """Return the text in a bar: its bucket, or the step of a forward or backward."""
    if row["bucket"] >= 0:
        return str(row["bucket"])
    return str(row["step"]) if KINDS[row["kind"]] in ("forward", "backward") else ""


def _hover_texts(item: Panel) -> list[str]:
    """Return the hover text of each bar."""
    merged, texts = item.merged, list[str]()
    columns = (item.table.tolist(), merged.counts.tolist(), merged.spans_s.tolist(), merged.last_step.tolist())
    for (rank, kind, _lane, start_s, end_s, step, bucket, size, peer), count, spans_s, last_step in zip(
        *columns, strict=True
    ):
        lines = [f"<b>{_kind_name(kind)}</b> on rank {rank}, {seconds(spans_s)}"]
        if count == 1 and spans_s >= end_s - start_s:
            lines.append(f"step {step}" + (f", bucket {bucket}" if bucket >= 0 else ""))
        else:
            lines[0] += f" of {seconds(end_s - start_s)}, {count} begin{'s' if count == 1 else ''} here"
            lines.append(f"step {step}" if step == last_step else f"steps {step} to {last_step}")
        if size:
            lines.append(
                num_bytes(float(size))
                + (f", peer rank {peer}" if peer >= 0 and len(item.table) == item.num_spans else "")
            )
        texts.append("<br>".join(lines))
    return texts


def _decorate(number: int, item: Panel, title: str, factor: float, longest_s: float) -> tuple[list[Any], list[Any]]:
    """Return shapes and annotations of a panel: lines between ranks, step boundaries with numbers, the title."""
    axis = "" if number == 1 else str(number)
    across, over = f"x{axis} domain", f"y{axis} domain"
    line: dict[str, Any] = {"color": GRID, "width": 1.5}
    ends = item.rows.ends[:-1]
    shapes = [
        {
            "type": "line",
            "xref": across,
            "x0": 0,
            "x1": 1,
            "yref": f"y{axis}",
            "y0": y,
            "y1": y,
            "line": line,
            "layer": "below",
        }
        for y in ends
    ]
    left = {"showarrow": False, "xanchor": "left", "yanchor": "bottom", "yref": over, "y": 1, "xshift": -2}
    name = {"text": title, "xref": "paper", "x": 0, "yshift": 14, "font": {"size": 13, "color": INK}}
    notes = [{**left, **name}]
    marked_s = -item.length_s
    for step, at_s in item.bounds.items():
        if len(item.bounds) > MARKED_STEPS and at_s - marked_s <= LABEL_SHARE * longest_s:
            continue
        line = {"color": GREY, "width": 1, "dash": "dot"}
        at = {"xref": f"x{axis}", "x0": at_s * factor, "x1": at_s * factor}
        shapes.append({"type": "line", **at, "yref": over, "y0": 0, "y1": 1, "line": line, "opacity": 0.7})
        if at_s - marked_s > LABEL_SHARE * longest_s:
            marked_s = at_s
            note = {
                "text": f"step {step}",
                "xref": f"x{axis}",
                "x": at_s * factor,
                "yshift": -1,
                "font": {"size": 10, "color": MUTED_INK},
            }
            notes.append({**left, **note})
    return shapes, notes


def _merging_note(item: Panel) -> str:
    """Return a note if bars merge several spans, with the way to see each span; "" if each bar is a span."""
    num_bars, shown = len(item.table), sorted(item.bounds)
    if item.num_spans == num_bars:
        return ""
    few = max(1, len(shown) * num_bars // (2 * item.num_spans))
    begin = shown[len(shown) // 2] if shown else 0
    return (
        f"   <span style='font-size:11px;color:{MUTED_INK}'>{item.num_spans:,} spans in {num_bars:,} bars, "
        f"areas are times; each span: steps=slice({begin}, {begin + few})</span>"
    )


def _unusual_note(unusual: dict[int, float]) -> str:
    """Return a note on steps that may lie outside the axis; "" without any."""
    if not unusual:
        return ""
    step = max(unusual, key=lambda one: unusual[one])
    more = f" and {len(unusual) - 1} more" if len(unusual) > 1 else ""
    return (
        f"   <span style='font-size:11px;color:{MUTED_INK}'>step {step} takes {unusual[step]:g} times the "
        f"median{more}: double-click to see all steps</span>"
    )


def _row_names(item: Panel) -> dict[str, Any]:
    """Return the y axis: ranks and lanes by name, from top to bottom."""
    ranks = [rank for _, rank, _ in item.rows.lanes]
    first = [rank != before for rank, before in zip(ranks, [None, *ranks], strict=False)]
    names = [
        f"<b>rank {rank}</b>   {escape_text(lane)} " if new else f"{escape_text(lane)} "
        for new, (_, rank, lane) in zip(first, item.rows.lanes, strict=True)
    ]
    if item.folded:
        names = [f"rank {rank} " for rank in ranks]
    centers = [center for center, _, _ in item.rows.lanes]
    return {
        "tickvals": centers,
        "ticktext": names,
        **({"tickfont": {"size": 10}} if item.folded else {}),
        "range": [item.rows.ends[-1], 0],
        "showgrid": False,
        "ticks": "",
        "fixedrange": True,
    }


def time_unit(length_s: float) -> tuple[str, float]:
    """Return a convenient unit for a window of this length, and how many of it make a second."""
    return ("µs", 1e6) if length_s < 2e-3 else ("ms", 1e3) if length_s < 10 else ("s", 1.0)
