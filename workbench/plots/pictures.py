"""Figures as files that a page of a repository can show: SVG, or PNG where that would be large."""

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
    """Draw figures in a browser without a window.

    Args:
        figures: path without suffix -> a figure as Plotly's JSON.

    Returns:
        The same path -> the file written, `.svg`, or `.png` where the SVG is above 150 kB. The same figure gives the same bytes.

    Raises:
        LaunchError: there is no kaleido, or no browser for it.
    """
    import plotly.graph_objects as go
    import plotly.io as pio

    drawn = [go.Figure(data=figure["data"], layout=figure.get("layout"), skip_invalid=True) for figure in figures.values()]
    sizes = [figure.get("layout", {}) for figure in figures.values()]
    for figure, size in zip(drawn, sizes, strict=True):
        for place, trace in enumerate(figure.data):
            trace.uid = f"trace-{place}"  # else drawn at random
        figure.update_layout(width=size.get("width") or SIZE[0], height=size.get("height") or SIZE[1])
    svg = [path.with_name(f"{path.name}.svg") for path in figures]
    for path in svg:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        pio.write_images(drawn, [str(path) for path in svg])
        large = [(figure, path) for figure, path in zip(drawn, svg, strict=True) if _plain(path) > SVG_BYTES]
        if large:
            pio.write_images([figure for figure, _ in large], [str(path.with_suffix(".png")) for _, path in large])
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LaunchError(f"figures are not drawn: {reason} (they need the package kaleido, and Chrome or Chromium)") from None
    for _, path in large:
        path.unlink()
    kept = [path.with_suffix(".png") if any(path == other for _, other in large) else path for path in svg]
    for path in kept:
        path.with_suffix(".svg" if path.suffix == ".png" else ".png").unlink(missing_ok=True)
    return dict(zip(figures, kept, strict=True))


def _plain(path: Path) -> int:
    """Plotly numbers its definitions at random; the same figure shall be the same file. Returns its bytes."""
    text = path.read_text(encoding="utf-8")
    for word in dict.fromkeys(RANDOM.findall(text)):
        text = text.replace(word, "figure")
    path.write_text(text, encoding="utf-8")
    return path.stat().st_size
