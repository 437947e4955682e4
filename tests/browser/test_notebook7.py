"""The panel in Jupyter Notebook 7, which shows one document: the panel at the left, panes at the right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("notebook", reason="needs Jupyter Notebook 7: pip install 'sgd-workbench[dev]'")

from tests.browser.chromium import needs_browser
from tests.browser.lab import browsing
from tests.browser.panel import execute, in_both_themes, runs
from tests.unit.lab_server import write_run

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_panel_and_its_panes_are_in_notebook_7(tmp_path: Path) -> None:
    needs_browser()
    with browsing(tmp_path / "lab", base_url="/user/ada/", app="notebook") as lab:
        write_run(lab.server.runs, "made-1", created="2026-01-01T00:00:00+00:00")
        lab.server.write("small.ipynb", "1 + 1")
        lab.page.goto(f"{lab.server.url}notebooks/small.ipynb?token={lab.server.token}")
        lab.page.locator(".jp-NotebookPanel:visible").wait_for()
        lab.idle()
        execute(lab, "workbench:show-runs")
        runs(lab).first.wait_for()
        panel = lab.page.locator("#workbench-panel")
        panel.get_by_role("button", name="Insert wb.Cluster(4)").click()
        cell = lab.page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(1)
        lab.until(lambda: "cluster = wb.Cluster(4)" in cell.inner_text(), "the code, in this notebook")
        runs(lab).get_by_role("button", name=re.compile("^PipeSGD")).click()
        pane = lab.page.locator(".wb-Run:visible")
        pane.locator("path.wb-Chart-line").first.wait_for()
        in_both_themes(lab, "notebook7-run")
        runs(lab).get_by_role("button", name="More for").click()
        lab.page.locator(".lm-Menu").get_by_text("Ranks").click()
        lab.page.locator("tr[data-rank]:visible").first.wait_for()
        execute(lab, "workbench:run-table")
        lab.page.locator(".wb-Table tr[data-run]:visible").wait_for()
        lab.picture("notebook7-table")
        lab.page.get_by_role("menuitem", name="View").click()
        lab.page.wait_for_timeout(500)
        lab.picture("notebook7-menu")
        assert lab.errors == []
