"""Topologies of gossip: ranks on a circle, and an edge for each pair that exchanges."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from workbench.plots.style import BLUE, GREY, TEMPLATE, escape_text, faded
from workbench.topologies import Graph, check_graph

SIDE_PIXELS = 460
NAMED_RANKS = 40  # more numbers than this do not fit on the circle
ARROW_PIXELS = 9  # from an arrow's head to the middle of a rank


def topology(graph: Graph, num_ranks: int, step: int = 0) -> go.Figure:
    """Draw which ranks exchange in a step. A directed edge is an arrow from the rank that sends.

    The title has the spectral gap. The tooltip of a rank shows its own weight and those of the ranks from which it
    receives.

    Args:
        graph: a topology, such as `topologies.Ring()`.
        num_ranks: p.
        step: for a topology that changes from step to step.

    Raises:
        ConfigError: it does not exist for that many ranks.
    """
    check_graph(graph)
    receives, weights = graph.adjacency(num_ranks, step), graph.mixing(num_ranks, step)
    angles = np.pi / 2 - 2 * np.pi * np.arange(num_ranks) / num_ranks  # rank 0 at the top, then clockwise
    x, y = np.cos(angles), np.sin(angles)
    both = np.argwhere(np.triu(receives & receives.T))
    lines_x = [place for one, other in both for place in (x[one], x[other], None)]
    lines_y = [place for one, other in both for place in (y[one], y[other], None)]
    figure = go.Figure(layout={"template": TEMPLATE, "showlegend": False, "hovermode": "closest"})
    figure.add_scatter(x=lines_x, y=lines_y, mode="lines", line={"color": faded(BLUE, 0.45)}, hoverinfo="skip")
    for to, source in np.argwhere(receives & ~receives.T):
        figure.add_annotation(
            x=x[to],
            y=y[to],
            ax=x[source],
            ay=y[source],
            axref="x",
            ayref="y",
            standoff=ARROW_PIXELS,
            startstandoff=ARROW_PIXELS,
            arrowhead=2,
            arrowwidth=1.5,
            arrowcolor=GREY,
        )
    texts = [
        f"rank {rank}: itself {weights[rank, rank]:.3g}"
        + "".join(f", rank {source} {weights[rank, source]:.3g}" for source in graph.sources(rank, num_ranks, step))
        for rank in range(num_ranks)
    ]
    named = num_ranks <= NAMED_RANKS
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers+text" if named else "markers",
        marker={"size": 20 if named else 9, "color": BLUE},
        text=[str(rank) for rank in range(num_ranks)] if named else None,
        textfont={"color": "white", "size": 11},
        hovertext=texts,
        hoverinfo="text",
    )
    when = f", step {step}" if graph.period(num_ranks) > 1 else ""
    title = f"{graph} on {num_ranks} ranks{when}: spectral gap {graph.spectral_gap(num_ranks):.3g}"
    figure.update_layout(title=escape_text(title), width=SIDE_PIXELS, height=SIDE_PIXELS)
    hidden = {"visible": False, "range": [-1.2, 1.2]}
    figure.update_xaxes(**hidden)
    figure.update_yaxes(**hidden, scaleanchor="x")
    return figure
