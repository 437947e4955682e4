"""Overlays of a timeline: arrows of messages, and the critical path."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.analysis.critical import CriticalPath
from workbench.analysis.table import num_bytes, percent, seconds
from workbench.plots.gantt.layout import Panel
from workbench.plots.style import BLACK, INK, faded
from workbench.trace.run import Run

MAX_ARROWS = 600
CLEAR_ARROWS = 120  # more arrows hide the bars: they are hidden until a click on the legend
MAX_PIECES = 2000  # largest number of pieces of a critical path
PATH_OFFSET = 0.3  # share of a row's height: the path runs below the numbers in its bars


def arrows(run: Run, item: Panel, factor: float) -> go.Scatter | None:
    """Return an arrow for each message, from the begin of its send to the end of its receive; None without messages.

    At most `MAX_ARROWS` are drawn, spread over the window. From `CLEAR_ARROWS` on, a click on the legend shows them.
    """
    sent, received = run.messages
    table = run.spans.table
    keep = (item.bars[sent] >= 0) & (item.bars[received] >= 0) & (table["rank"][sent] != table["rank"][received])
    sent, received = sent[keep], received[keep]
    num_all = len(sent)
    if not num_all:
        return None
    order = np.argsort(table["start_s"][sent], kind="stable")
    if num_all > MAX_ARROWS:
        order = order[np.linspace(0, num_all - 1, MAX_ARROWS).astype(int)]
    sent, received = sent[order], received[order]
    name = "message" if len(sent) == num_all else f"message ({len(sent)} of {num_all})"
    begin_s, end_s = (
        np.clip(at - item.begin_s, 0, item.length_s) for at in (table["start_s"][sent], table["end_s"][received])
    )
    text = [_hover_text(table[one], table[other]) for one, other in zip(sent, received, strict=True)]
    return go.Scatter(
        x=_broken(begin_s * factor, end_s * factor),
        y=_broken(item.rows.center[item.bars[sent]], item.rows.center[item.bars[received]]),
        mode="lines+markers",
        name=name,
        legendgroup="message",
        legendrank=2000,
        visible=True if num_all <= CLEAR_ARROWS else "legendonly",
        line={"color": faded(INK, 0.55), "width": 1},
        marker={
            "symbol": ["circle", "arrow", "circle"] * len(sent),
            "size": [0, 8, 0] * len(sent),
            "angleref": "previous",
            "color": INK,
            "line": {"width": 0},
        },
        hovertext=[part for line in text for part in ("", line, "")],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _broken(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> list[float | None]:
    """Return begin and end of each line, followed by a gap."""
    parts = zip(np.round(starts, 6).tolist(), np.round(ends, 6).tolist(), strict=True)
    return [value for start, end in parts for value in (start, end, None)]


def _hover_text(sent: Any, received: Any) -> str:
    took = seconds(max(float(received["end_s"] - sent["start_s"]), 0.0))
    late_s = float(sent["start_s"] - received["start_s"])
    waited = (
        f"the receiver had waited for {seconds(late_s)}" if late_s > 0 else f"the sender waited for {seconds(-late_s)}"
    )
    where = f"<b>message</b> from rank {sent['rank']} to rank {received['rank']}, {num_bytes(float(sent['bytes']))}"
    return f"{where}<br>{took} from the call to the arrival; {waited if late_s else 'neither waited'}"


def path_line(found: CriticalPath, item: Panel, factor: float) -> go.Scatter:
    """Return the critical path of each step as a line through its bars, across ranks."""
    # the first lane, for pieces without a span
    lane_of = {rank: center for center, rank, _ in reversed(item.rows.lanes)}
    bars = np.where(found.span >= 0, item.bars[np.maximum(found.span, 0)], -1)
    heights = item.rows.center + PATH_OFFSET * item.rows.height
    xs, ys, text, before = list[float | None](), list[float | None](), list[str](), -1
    lengths_s = found.end_s - found.start_s
    whole_s = {step: float(lengths_s[found.step == step].sum()) for step in found.steps}
    keep = np.argsort(lengths_s)[-MAX_PIECES:]
    for place in np.sort(keep).tolist():
        rank, step = int(found.rank[place]), int(found.step[place])
        if bars[place] < 0 and rank not in lane_of:
            continue  # the rank is not shown
        y = float(heights[bars[place]]) if bars[place] >= 0 else lane_of[rank] + PATH_OFFSET
        ends = np.clip(np.array([found.start_s[place], found.end_s[place]]) - item.begin_s, 0, item.length_s) * factor
        if step != before and xs:  # the next step may begin on another rank before this one ends
            xs, ys, text = [*xs, None], [*ys, None], [*text, ""]
        before = step
        xs += np.round(ends, 6).tolist()
        ys += [y, y]
        share = percent(float(lengths_s[place]) / whole_s[step])
        kind = found.kind_names[place].replace("_", "-") if len(found.step) < MAX_PIECES else "piece"
        text += [
            (
                f"<b>critical path</b> of step {step}: {kind} on rank {rank}, {seconds(float(lengths_s[place]))}, "
                f"{share} of the step"
            )
        ] * 2
    return go.Scatter(
        x=xs,
        y=ys,
        mode="lines",
        name="critical path",
        legendgroup="critical",
        legendrank=2001,
        line={"color": BLACK, "width": 3},
        hovertext=text,
        hovertemplate="%{hovertext}<extra></extra>",
    )
