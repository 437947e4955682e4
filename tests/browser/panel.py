"""The panel in JupyterLab, as a test uses it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from playwright.sync_api import Locator

from tests.browser.lab import Lab


def execute(lab: Lab, command: str, **arguments: str) -> None:
    lab.page.evaluate("([id, args]) => { window.jupyterapp.commands.execute(id, args) }", [command, arguments])


def runs(lab: Lab) -> Locator:
    return lab.page.locator("#workbench-panel [data-run]")


def begin_training(lab: Lab, name: str, cells: Sequence[str]) -> None:
    """Open a new notebook beside the panel, and run its first cell, which starts two ranks, and its second, which trains."""
    lab.server.write(name, *cells)
    lab.open(name)
    execute(lab, "workbench:show-runs")
    lab.run_cell(0)
    lab.until(lambda: lab.has_run(0), "two ranks")
    lab.run_cell(1)
    lab.until(lambda: status(lab) == "running" and steps(lab) > 0, "a training")


def status(lab: Lab) -> str | None:
    """The newest run's, as the panel shows it."""
    return runs(lab).first.get_attribute("data-status") if runs(lab).count() else None


def steps(lab: Lab) -> int:
    """Those of the newest run, as the panel shows them."""
    text = runs(lab).first.inner_text()
    return int(text.partition("step ")[2].partition(" of ")[0].replace(",", "") or 0)


def in_both_themes(lab: Lab, name: str) -> None:
    """Keep a picture; in each theme, which takes seconds, if $WORKBENCH_ARTEFACTS says that a person looks at them."""
    lab.picture(name)
    if not os.environ.get("WORKBENCH_ARTEFACTS"):
        return
    for theme, kind in (("JupyterLab Dark", "false"), ("JupyterLab Light", "true")):
        lab.theme(theme)
        lab.page.locator(f'body[data-jp-theme-light="{kind}"]').wait_for(state="attached")
        lab.page.wait_for_timeout(500)  # its style sheet is there
        if kind == "false":
            lab.picture(f"{name}-dark")
