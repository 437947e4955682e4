"""The style of all figures: colours for colour-blind readers, one template, escaped names."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from workbench.trace.kinds import KINDS

# Okabe and Ito's palette; for rarer kinds, Paul Tol's muted one
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#000000",
)
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, "#882255", "#999933")
GREY, LIGHT_GREY, GRID, INK, MUTED_INK = "#8C8C8C", "#C9CDD2", "#E6E8EB", "#24292F", "#6A737D"

KIND_COLORS = dict(
    zip(
        KINDS,
        (
            SKY,
            BLUE,
            GREEN,
            "#DDCC77",
            LIGHT_GREY,
            GREY,
            VERMILION,
            PURPLE,
            ORANGE,
            YELLOW,
            "#882255",
            "#AA4499",
            "#999933",
            "#CC6677",
            "#661100",
            "#88CCEE",
            "#117733",
            "#332288",
        ),
        strict=True,
    )
)

# heights: above the plot, of ticks and title below it, of a legend line
TOP_PIXELS, AXIS_PIXELS, LINE_PIXELS = 56, 52, 21
PAGE_PIXELS = 800

AXIS = {
    "gridcolor": GRID,
    "linecolor": GREY,
    "ticks": "outside",
    "tickcolor": GREY,
    "zeroline": False,
    "automargin": True,
    "title": {"font": {"size": 13}, "standoff": 10},
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "Inter, Segoe UI, Helvetica, Arial, sans-serif", "size": 13, "color": INK},
        "title": {"font": {"size": 16}, "x": 0, "xref": "paper", "xanchor": "left"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": list(CYCLE),
        "hoverlabel": {"align": "left", "font": {"size": 12}},
        "margin": {"l": 70, "r": 24, "t": TOP_PIXELS, "b": 60},
        "xaxis": AXIS,
        "yaxis": AXIS,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "tracegroupgap": 0},
    }
)


def legend_below(figure: go.Figure, height: int, names: Iterable[str]) -> None:
    """Set the figure's height, at least `height` pixels, and put its legend at the lower edge.

    A legend of several lines above the plot would cover the title. Plotly does not report the number of lines, so it
    is estimated for a page of usual width. If there are more lines, Plotly makes the plot lower: the place is
    reserved below the title of the axis.
    """
    num_lines = max(1, -(-sum(7 * len(name) + 45 for name in names) // PAGE_PIXELS))
    figure.update_layout(
        height=height + LINE_PIXELS * (num_lines - 1), legend={"yref": "container", "y": 0, "yanchor": "bottom"}
    )


def escape_text(name: Any) -> str:
    """Escape text for a figure: Plotly interprets a part of HTML in names.

    >>> escape_text("<script>")
    '&lt;script&gt;'
    """
    return html.escape(str(name), quote=False)


def coverage_note(coverage: str, between: str = "   ") -> str:
    """Return a note after the title if the figure covers only a part of a run; "" for a complete run."""
    return f"{between}<span style='font-size:11px;color:{MUTED_INK}'>{coverage}</span>" if coverage else ""


def faded(color: str, opacity: float) -> str:
    """Return the colour `#RRGGBB` with an opacity.

    >>> faded("#0072B2", 0.2)
    'rgba(0,114,178,0.2)'
    """
    red, green, blue = (int(color[position : position + 2], 16) for position in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


def ink_on(color: str) -> str:
    """Return black or white, whichever is easier to read on the colour.

    >>> ink_on("#0072B2"), ink_on("#F0E442")
    ('white', 'black')
    """
    red, green, blue = (int(color[position : position + 2], 16) for position in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "black"
