"""Where the names of lines are written, right of the ends of their lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.plots.style import PAGE_PIXELS, escape_text

PLOT_PIXELS = 300  # height of a panel
NAME_PIXELS, LETTER_PIXELS = 14, 6.5  # height of a line's name, and width of its letters
MOST_SHARE = 0.45  # of the width, for names
BACKGROUND = "rgba(255, 255, 255, 0.7)"  # of a name that a longer line crosses


def name_line_ends(
    figure: go.Figure,
    ends: Mapping[str, tuple[float, float]],
    colors: Mapping[str, str],
    *,
    lowest: tuple[float, float],
    highest: tuple[float, float],
    log_x: bool,
    log_y: bool,
) -> None:
    """Write each line's name right of its end, in its colour, and lengthen the x axis for the names.

    Names that would overlap are moved apart, whatever the range of the y axis is in the end.

    Args:
        figure: with one pair of axes.
        ends: name -> (x, y) of the line's end.
        colors: name -> colour.
        lowest, highest: (x, y), the least and the largest of all lines.
        log_x, log_y: whether the axes are logarithmic.
    """
    share = min(MOST_SHARE, LETTER_PIXELS * max(map(len, ends)) / PAGE_PIXELS)
    figure.update_xaxes(range=axis_range(lowest[0], highest[0], log=log_x, more=share))
    y_range = [scaled(lowest[1], log=log_y), scaled(highest[1], log=log_y)]
    heights = [scaled(y, log=log_y) for _, y in ends.values()]
    pixels = PLOT_PIXELS / ((y_range[1] - y_range[0]) or 1.0)
    for (name, (x, _)), y, place in zip(ends.items(), heights, names_apart(heights, y_range), strict=True):
        figure.add_annotation(
            x=scaled(x, log=log_x),
            y=y,
            xshift=6,
            yshift=pixels * (place - y),
            xanchor="left",
            showarrow=False,
            text=escape_text(name),
            font={"size": 11, "color": colors[name]},
            bgcolor=BACKGROUND,
        )


def scaled(value: float, *, log: bool) -> float:
    """Return the place on an axis in Plotly's coordinates for annotations and ranges."""
    return float(np.log10(value)) if log else value


def axis_range(low: float, high: float, *, log: bool, more: float = 0.0) -> list[float]:
    """Return the ends of an axis, with margins and, on the right, a share of it for names."""
    low, high = scaled(low, log=log), scaled(high, log=log)
    span = (high - low) or 1.0
    return [low - 0.03 * span, high + 0.05 * span + more * span / (1 - more)]


def names_apart(places: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Return places as near to the given ones as possible, at least a name's height apart, within the ends of the axis.

    It is an isotonic regression: neighbours that overlap are joined and centred on their mean.

    >>> [round(place, 3) for place in names_apart([0.5, 0.5, 0.9], [0.0, 1.0])]
    [0.477, 0.523, 0.9]
    """
    gap = (ends[1] - ends[0]) * NAME_PIXELS / PLOT_PIXELS
    order = sorted(range(len(places)), key=lambda at: places[at])
    blocks: list[list[float]] = []  # sum and number of wanted places, without the gaps
    for rank, at in enumerate(order):
        blocks.append([places[at] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, number = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += number
    top = max(ends[0], ends[1] - (len(places) - 1) * gap)  # of the lowest name
    level = [min(max(total / number, ends[0]), top) for total, number in blocks for _ in range(int(number))]
    found = [0.0] * len(places)
    for rank, at in enumerate(order):
        found[at] = level[rank] + rank * gap
    return found
