"""Figures as files for pages of a repository: SVG, or PNG if the SVG would be large."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import LaunchError

SVG_BYTES = 150_000
SIZE = (860, 480)
RANDOM = re.compile(r'id="defs-([0-9a-f]{6})"')


def write_pictures(figures: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Path]:
    """Draw figures in a headless browser.

    Args:
        figures: path without suffix -> a figure as Plotly's JSON.

    Returns:
        The same path -> the written file, `.svg`, or `.png` if the SVG is above 150 kB. Equal figures give equal
        bytes.

    Raises:
        LaunchError: kaleido is missing, or a browser for it.
    """
    import plotly.graph_objects as go
    import plotly.io as pio

    drawn = [
        go.Figure(data=figure["data"], layout=figure.get("layout"), skip_invalid=True) for figure in figures.values()
    ]
    layouts = [figure.get("layout") or {} for figure in figures.values()]
    widths, heights = (
        [layout.get(name) or usual for layout in layouts] for name, usual in zip(("width", "height"), SIZE, strict=True)
    )
    for figure in drawn:
        for place, trace in enumerate(figure.data):
            trace.uid = f"trace-{place}"  # random otherwise
    svg = [path.with_name(f"{path.name}.svg") for path in figures]
    for path in svg:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pio.write_images(drawn, [str(path) for path in svg], width=widths, height=heights)
        large = [place for place, path in enumerate(svg) if _plain(path) > SVG_BYTES]
        if large:
            png = [str(svg[place].with_suffix(".png")) for place in large]
            sizes = {name: [of[place] for place in large] for name, of in (("width", widths), ("height", heights))}
            pio.write_images([drawn[place] for place in large], png, **sizes)
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LaunchError(
            f"figures are not drawn: {reason} (they need the package kaleido, and Chrome or Chromium)"
        ) from None
    for place in large:
        svg[place].unlink()
    kept = [path.with_suffix(".png") if place in large else path for place, path in enumerate(svg)]
    for path in kept:
        path.with_suffix(".svg" if path.suffix == ".png" else ".png").unlink(missing_ok=True)
    return dict(zip(figures, kept, strict=True))


def _plain(path: Path) -> int:
    """Replace Plotly's random ids by numbers, so that equal figures give equal files. Return the size in bytes."""
    text = path.read_text(encoding="utf-8")
    for word in dict.fromkeys(RANDOM.findall(text)):
        text = text.replace(word, "figure")
    path.write_text(text, encoding="utf-8")
    return path.stat().st_size
