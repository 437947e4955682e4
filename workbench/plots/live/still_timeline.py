"""A timeline as a small SVG image in HTML: what a saved notebook shows of the newest steps of a run that trains."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from workbench.plots.gantt.figures import time_unit
from workbench.plots.gantt.layout import FILLED, Panel, panel
from workbench.plots.live.still import LINE, RIGHT, WIDTH, image, text
from workbench.plots.style import KIND_COLORS
from workbench.trace.kinds import KINDS
from workbench.trace.run import Run

MAX_BARS = 600  # of the image, for up to eight ranks
LEFT, TOP, BOTTOM, ROW = 150, 46, 28, 20  # pixels around the rows, and of a row
MIN_STEP = 50  # pixels of a step that has its number


def timeline_picture(run: Run, steps: slice) -> str:
    """Return what each rank did in these steps as an `<img>` of some kB: bars, and names of kinds, ranks and steps.

    Raises:
        ConfigError: the trace holds none of these steps.
    """
    found = panel(run, steps, max_bars=MAX_BARS)
    bottom = TOP + ROW * found.rows.ends[-1]
    drawn = [*_kinds(found), *_rows(found), *_steps(found, bottom)]
    return image(drawn, bottom + BOTTOM, "timeline of the newest steps")


def _kinds(found: Panel) -> Iterator[str]:
    """The bars and the name of each kind: a path for all bars of a kind, because each needs few characters."""
    table, x, scale = found.table, float(LEFT), _scale(found)
    height = ROW * found.rows.height * (1.0 if found.folded else FILLED)
    top = TOP + ROW * found.rows.center - height / 2
    for code in np.unique(table["kind"]):
        color, name = KIND_COLORS[KINDS[code]], KINDS[code].replace("_", "-")
        mine = table["kind"] == code
        left = LEFT + scale * table["start_s"][mine]
        wide = np.maximum(scale * (table["end_s"] - table["start_s"])[mine], 0.5)
        bars = zip(left, top[mine], wide, height[mine], strict=True)
        path = "".join(f"M{x0:.1f} {y0:.1f}h{dx:.1f}v{dy:.1f}h{-dx:.1f}z" for x0, y0, dx, dy in bars)
        yield f'<path d="{path}" fill="{color}"/><path d="M{x:.0f} 10h10v10h-10z" fill="{color}"/>'
        yield text(x + 15, 19, name)
        x += 30 + 7 * len(name)


def _rows(found: Panel) -> Iterator[str]:
    """The name of each lane and of its rank, and a line below each rank."""
    before = None
    for center, rank, lane in found.rows.lanes:
        y = TOP + ROW * center + 4
        if rank != before:
            yield text(8, y, f"rank {rank}", size=10 if found.folded else 12)
        yield text(LEFT - 6, y, escape(lane), anchor="end", size=11)
        before = rank
    for end in (0.0, *found.rows.ends):
        yield f'<path d="M8 {TOP + ROW * end:.1f}H{WIDTH - RIGHT}" stroke="{LINE}" stroke-opacity="0.5"/>'


def _steps(found: Panel, bottom: float) -> Iterator[str]:
    """The begin and the number of each step, and the length of all."""
    places = [LEFT + _scale(found) * begin_s for begin_s in found.bounds.values()]
    for step, x, next_x in zip(found.bounds, places, [*places[1:], WIDTH - RIGHT], strict=True):
        yield f'<path d="M{x:.1f} {TOP}V{bottom:.1f}" stroke="{LINE}" stroke-dasharray="2 3"/>'
        if next_x - x > MIN_STEP:
            yield text(x + 3, TOP - 6, f"step {step}", size=11)
    unit, factor = time_unit(found.length_s)
    yield text(WIDTH - RIGHT, bottom + 18, f"{found.length_s * factor:.3g} {unit}", anchor="end")
    yield text(LEFT, bottom + 18, "0")


def _scale(found: Panel) -> float:
    """Pixels per second."""
    return (WIDTH - LEFT - RIGHT) / found.length_s
