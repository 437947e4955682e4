"""Finished figures in a dark theme: the style sheet of JupyterLab's page has the neutral colours of all figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench import plots
from workbench.plots import style

FOLDER = Path(plots.__file__).parent / "labextension"


def rgb(color: str) -> str:
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"


def test_the_style_sheet_has_the_colours_of_the_figures() -> None:
    text = (FOLDER / "static" / "dark_figures.js").read_text(encoding="utf-8")
    for color, kind in (
        (style.INK, "fill"),
        (style.MUTED_INK, "fill"),
        (style.GRID, "stroke"),
        (style.BLACK, "stroke"),
    ):
        assert f"{kind}: {rgb(color)}" in text, f"{color} of style.py"
    assert style.TEMPLATE.layout.font.color == style.INK, "by which a figure is known to be of this package"


def test_the_extension_is_found_by_jupyterlab() -> None:
    about = json.loads((FOLDER / "package.json").read_text(encoding="utf-8"))
    entry = FOLDER / about["jupyterlab"]["_build"]["load"]
    assert re.search(rf'_JUPYTERLAB \?\?= {{}}\)\["{about["name"]}"\] =', entry.read_text(encoding="utf-8"))
