"""The parts of a step's time, run by run: computation, hidden and exposed communication, reading data, idle."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.analysis.labels import distinct_labels
from workbench.analysis.overlap import Overlap
from workbench.analysis.summary import steady_overlap, trace_coverage
from workbench.analysis.table import percent, seconds
from workbench.plots.style import (
    BLUE,
    GREEN,
    KIND_COLORS,
    LIGHT_GREY,
    TEMPLATE,
    VERMILION,
    coverage_note,
    escape_text,
    legend_below,
)
from workbench.trace.run import Run, as_runs

PARTS = {  # of a step, in the order of a bar
    "computation alone": BLUE,
    "hidden communication": GREEN,
    "exposed communication": VERMILION,
    "reading data": KIND_COLORS["load"],
    "idle": LIGHT_GREY,
}
LABEL_SIGNS = 34  # letters in a line: longer names would leave no room for the bars


def overlap_bars(runs: Sequence[Run]) -> go.Figure:
    """Draw a stacked bar for each run: means over ranks and the steps after the warm-up.

    A bar's length is the time of a step.
    """
    runs = as_runs(runs)
    found = [steady_overlap(run) for run in runs]
    names = ["<br>".join(map(escape_text, textwrap.wrap(label, LABEL_SIGNS))) for label in distinct_labels(runs)]
    labels = [
        f"{name}{coverage_note(trace_coverage(run), between='<br>')} " for name, run in zip(names, runs, strict=True)
    ]
    parts = step_parts(found)
    longest_s = max((sum(part.values()) for part in parts), default=0.0)
    unit, factor = ("ms", 1e3) if longest_s < 10 else ("s", 1.0)
    names_of_parts = list(parts[0]) if parts else []
    figure = go.Figure()
    for name in names_of_parts:
        color, lengths_s = PARTS[name], [part[name] for part in parts]
        figure.add_bar(
            orientation="h",
            y=list(range(len(runs))),
            x=[length_s * factor for length_s in lengths_s],
            name=name,
            marker={"color": color, "line": {"color": "white", "width": 1}},
            text=[seconds(length_s) for length_s in lengths_s],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "black" if color == LIGHT_GREY else "white", "size": 12},
            hovertemplate=f"<b>{name}</b><br>%{{text}} a step<extra></extra>",
        )
    for position, item in enumerate(found):
        total_s = sum(parts[position].values())
        note = "no communication" if item.num_steps else "no trace"
        if item.fraction is not None:
            note = f"overlap {percent(item.fraction)}"
        figure.add_annotation(
            x=total_s * factor, y=position, text=note, showarrow=False, xanchor="left", xshift=8, font={"size": 12}
        )
    figure.update_layout(
        template=TEMPLATE,
        barmode="stack",
        bargap=0.35,
        title="Time of a step",
        legend={"traceorder": "normal"},
        uniformtext={"mode": "hide", "minsize": 9},
    )
    legend_below(figure, 170 + 44 * len(runs), names_of_parts)
    figure.update_xaxes(title=f"mean time of a step ({unit})", range=[0, longest_s * factor * 1.2 or 1])
    figure.update_yaxes(
        tickvals=list(range(len(runs))), ticktext=labels, range=[len(runs) - 0.5, -0.5], ticks="", showgrid=False
    )
    return figure


def step_parts(found: Sequence[Overlap]) -> list[dict[str, float]]:
    """Return the disjoint parts of a step, in seconds, of each run. "reading data" is left out if no run reads data."""
    parts = [_parts_of(item) for item in found]
    unread = not any(part["reading data"] > 0 for part in parts)
    return [{name: part[name] for name in PARTS if not (unread and name == "reading data")} for part in parts]


def _parts_of(item: Overlap) -> dict[str, float]:
    means = item.per_step()
    return {
        "computation alone": means.get("compute_s", 0.0) - means.get("hidden_s", 0.0),
        "hidden communication": means.get("hidden_s", 0.0),
        "exposed communication": means.get("exposed_s", 0.0),
        "reading data": means.get("load_s", 0.0),
        "idle": means.get("idle_s", 0.0),
    }
