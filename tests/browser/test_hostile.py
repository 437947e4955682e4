"""Names and errors that are markup, in a real browser: shown as text in tables, figures, live views and pages; no script runs."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
pytest.importorskip("ipywidgets", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from plotly.offline import get_plotlyjs

from tests.browser.chromium import needs_browser
from tests.browser.test_figures import EVIL, browse
from tests.unit.test_security import hostile_run
from workbench import plots
from workbench.analysis import compare, run_critical_path, run_overlap
from workbench.plots.html import figure_division
from workbench.plots.live.buttons import RunButtons, error_line

pytestmark = pytest.mark.browser


def refuse() -> None:
    raise RuntimeError(EVIL)


def parts() -> list[str]:
    """What a notebook shows of a run all of whose names are markup: tables, widgets' texts, figures."""
    runs = [hostile_run(EVIL), hostile_run("SynchronousSGD")]
    live = plots.LiveCurves(x="steps")
    live.update(runs, force=True)
    buttons = RunButtons(refuse)
    buttons.stop.click()
    shown = [compare(runs)._repr_html_(), run_overlap(runs[0])._repr_html_(), run_critical_path(runs[0])._repr_html_()]
    shown += [live._status.value, buttons._error.value, error_line(RuntimeError(EVIL))]
    figures = [
        live.static(),
        plots.curves(runs, "steps"),
        plots.timeline(runs[0], slice(0, 3), critical=True),
        plots.overlap_bars(runs),
    ]
    figures.append(plots.timelines(runs, slice(0, 2), names=[EVIL, "b"]))
    return shown + [
        figure_division(json.loads(figure.to_json()), f"figure-{number}") for number, figure in enumerate(figures)
    ]


def page_of(folder: Path, *bodies: str) -> Path:
    page = folder / "page.html"
    page.write_text(
        f"<!doctype html><title>calm</title><meta charset=utf-8><script>{get_plotlyjs()}</script>{''.join(bodies)}"
    )
    return page


def test_no_name_is_obeyed_and_each_is_shown(tmp_path: Path) -> None:
    needs_browser()
    bodies = parts()
    document = browse(page_of(tmp_path, *bodies), tmp_path, "--dump-dom")
    assert "<title>calm</title>" in document, "a script of a name has run"
    assert not re.search(r"<img[^>]*onerror", document)
    assert document.count('class="plot-container plotly"') == 5
    legends = [html.unescape(text) for text in re.findall(r'<text class="legendtext"[^>]*>(.*?)</text>', document)]
    assert any(EVIL in text for text in legends), "it is shown as it is"
    assert document.count(html.escape(EVIL, quote=False)) >= 4, "in tables too"


def test_a_name_that_is_not_escaped_would_be_seen(tmp_path: Path) -> None:
    needs_browser()
    assert "<title>harmed</title>" in browse(page_of(tmp_path, f"<td>{EVIL}</td>"), tmp_path, "--dump-dom")
