"""Figures as files: the same figure is the same bytes, a large one a PNG, and where nothing draws it is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
pytest.importorskip("kaleido", reason="needs the dev extra: pip install 'sgd-workbench[dev]'")

from workbench.errors import LaunchError
from workbench.plots import pictures


def figure(num_points: int, **layout: Any) -> dict[str, Any]:
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": list(range(num_points)),
        "y": [place * place % 97 for place in range(num_points)],
    }
    return {"data": [points, {"type": "bar", "y": [1, 2]}], "layout": {"title": {"text": "points"}, **layout}}


@pytest.mark.browser
def test_the_same_figure_is_the_same_file_and_a_large_one_is_a_png(tmp_path: Path) -> None:
    small, large = figure(5, height=300), figure(2000)
    (tmp_path / "large.svg").write_text("of a smaller one, before")
    names = [tmp_path / "one", tmp_path / "large", tmp_path / "again"]
    written = pictures.write_pictures(dict(zip(names, (small, large, small), strict=True)))
    assert [path.name for path in written.values()] == ["one.svg", "large.png", "again.svg"]
    assert written[names[0]].read_bytes() == written[names[2]].read_bytes()
    assert 'width="860" height="300"' in written[names[0]].read_text()
    assert written[names[1]].read_bytes().startswith(b"\x89PNG") and not (tmp_path / "large.svg").exists()


@pytest.mark.browser
def test_a_figure_as_pdf_is_one_whole_page(tmp_path: Path) -> None:
    """Its table of objects is where the file says, and each of them where the table says."""
    import plotly.graph_objects as go

    go.Figure(figure(5)).write_image(tmp_path / "one.pdf")
    written = (tmp_path / "one.pdf").read_bytes()
    assert written.startswith(b"%PDF-1.") and written.rstrip().endswith(b"%%EOF")
    (begin,) = re.findall(rb"startxref\s+(\d+)", written)
    head, count = re.findall(rb"xref\s+(\d+) (\d+)", written[int(begin) :])[0]
    places = re.findall(rb"(\d{10}) \d{5} n", written[int(begin) :])
    assert int(head) == 0 and len(places) == int(count) - 1
    assert all(re.match(rb"\d+ 0 obj", written[int(place) :]) for place in places)
    assert len(re.findall(rb"/Type\s*/Page\b", written)) == 1


def test_without_a_browser_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.io as pio

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome to be installed.\nmore")

    monkeypatch.setattr(pio, "write_images", refuse)
    with pytest.raises(
        LaunchError, match=r"are not drawn: Kaleido requires Google Chrome to be installed\. \(they need"
    ):
        pictures.write_pictures({tmp_path / "one": figure(3)})
