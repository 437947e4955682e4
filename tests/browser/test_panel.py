"""The panel in a real JupyterLab: clusters, a training that it pauses and stops, and what stays after a reload."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")


from tests.browser.chromium import needs_browser
from tests.browser.lab import Lab, browsing
from tests.browser.panel import execute, in_both_themes, runs, status, steps
from tests.browser.test_lab import BEGIN

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

START, TRAIN, DETACH = range(3)
CELLS = (
    BEGIN.strip(),
    "run = cluster.train(wb.PipeSGD(), problem, steps=1_000_000, evaluate_every=20);",
    "name = cluster.detach()",
)
HOLD_S = 2.0


def test_a_session_from_the_empty_panel_to_the_end_of_a_cluster(tmp_path: Path) -> None:
    needs_browser()
    with browsing(tmp_path / "lab") as lab:
        lab.server.write("panel.ipynb", *CELLS)
        lab.open("panel.ipynb")
        execute(lab, "workbench:show-runs")
        an_empty_panel_says_what_to_do(lab)
        a_training_is_shown_held_and_ended(lab)
        run_and_cluster_are_there_after_a_reload_and_a_restart(lab)
        a_cluster_is_attached_and_stopped(lab)
        assert lab.errors == []


def an_empty_panel_says_what_to_do(lab: Lab) -> None:
    panel = lab.page.locator("#workbench-panel")
    panel.get_by_text("No run yet.").wait_for()
    panel.get_by_text("No cluster is alive.").wait_for()
    in_both_themes(lab, "panel-empty")
    cells = lab.page.locator(".jp-Notebook .jp-CodeCell")
    panel.get_by_role("button", name="Insert wb.Cluster(4)").click()
    lab.until(lambda: cells.count() == len(CELLS) + 1, "a new cell")
    assert cells.nth(1).locator(".cm-content").inner_text() == "cluster = wb.Cluster(4)", (
        "the import is in the notebook"
    )
    execute(lab, "notebook:delete-cell")
    lab.until(lambda: cells.count() == len(CELLS), "the cell is gone")


def a_training_is_shown_held_and_ended(lab: Lab) -> None:
    lab.run_cell(START)
    lab.until(lambda: lab.has_run(START), "two ranks")
    lab.page.locator("[data-cluster]").get_by_text("2 ranks").wait_for()
    lab.run_cell(TRAIN)
    lab.until(lambda: status(lab) == "running", "a row")
    sparkline = runs(lab).locator("polyline")
    sparkline.wait_for()
    first = sparkline.get_attribute("points")
    lab.until(lambda: sparkline.get_attribute("points") != first, "a sparkline that moves")
    lab.page.locator("[data-cluster]").get_by_text("training: running").wait_for()
    runs(lab).get_by_role("button", name=re.compile("^PipeSGD")).click()
    pane = lab.page.locator(".wb-Run")
    curve = pane.locator("path.wb-Chart-line").first
    curve.wait_for()
    before = curve.get_attribute("d")
    lab.until(lambda: curve.get_attribute("d") != before, "a curve that moves")
    pane.get_by_text("Accuracy", exact=True).wait_for()
    pane.get_by_role("button", name="epochs").click()
    pane.locator("text", has_text="epochs").first.wait_for()
    lab.until(lambda: pane.locator("dt", has_text="time left").count(), "the time left")
    in_both_themes(lab, "panel-live")
    the_timeline_follows_the_run(lab)
    assert min(hold(lab) for _ in range(3)) < HOLD_S
    lab.page.locator(".wb-Run-header").get_by_text("paused").wait_for()
    in_both_themes(lab, "panel-paused")
    lab.page.wait_for_timeout(1500)  # the last steps before the pause are shown
    held = steps(lab)
    lab.page.wait_for_timeout(1500)
    assert steps(lab) == held > 0
    runs(lab).get_by_role("button", name="Resume").click()
    lab.until(lambda: steps(lab) > held, "steps after the pause")
    the_pane_never_goes_back(lab)
    pane.get_by_role("button", name="Stop, with a checkpoint").click()
    lab.until(lambda: status(lab) == "stopped", "the end")
    assert runs(lab).get_by_role("button", name="Pause").count() == 0, "a run that ended has no such button"
    pane.get_by_role("button", name="Copy: continue").wait_for()


def the_pane_never_goes_back(lab: Lab) -> None:
    """A button in the pane: no older state is shown after "pausing", although panel and pane are read separately."""
    pane = lab.page.locator(".wb-Run")
    pane.get_by_text("running", exact=True).wait_for()
    pane.locator(".wb-State").first.evaluate(
        """shown => {
            window.states = [];
            const note = () => window.states.at(-1) === shown.textContent || window.states.push(shown.textContent);
            new MutationObserver(note).observe(shown, { characterData: true, childList: true, subtree: true });
        }"""
    )
    for button, state in (("Pause at the end of a step", "paused"), ("Resume", "running")):
        pane.get_by_role("button", name=button).click()
        pane.get_by_text(state, exact=True).wait_for()
        lab.page.wait_for_timeout(1500)  # longer than between two reads of the pane
    assert lab.page.evaluate("() => window.states") == ["pausing", "paused", "resuming", "running"]


def the_timeline_follows_the_run(lab: Lab) -> None:
    lab.page.locator(".wb-Run").get_by_role("button", name="Timeline").click()
    pane = lab.page.locator(".wb-TimelinePane")
    newest = "place => place.timeline?.runs[0]?.steps.at(-1) ?? 0"
    place = pane.locator(".wb-TimelinePane-place")
    first = lab.until(lambda: place.evaluate(newest), "the newest steps")
    lab.until(lambda: place.evaluate(newest) > first, "newer steps")
    in_both_themes(lab, "panel-timeline")
    pane.locator(".wb-Timeline").focus()
    lab.page.keyboard.press("w")
    held = place.evaluate(newest)
    lab.until(lambda: pane.get_by_role("button", name="Follow (newest step").count(), "newer steps that wait")
    assert place.evaluate(newest) == held
    pane.get_by_label("First step").fill("0")
    pane.get_by_label("Last step").fill("2")
    lab.page.keyboard.press("Enter")
    lab.until(lambda: place.evaluate(newest) == 2, "the steps that were asked for")
    execute(lab, "application:close")  # the pane of the run is in front again


def hold(lab: Lab) -> float:
    """Pause the run, and return after how many seconds the panel shows it paused; resume it if it was paused before."""
    if status(lab) == "paused":
        runs(lab).get_by_role("button", name="Resume").click()
        lab.until(lambda: status(lab) == "running", "steps again")
    begin = time.monotonic()
    runs(lab).get_by_role("button", name="Pause").click()
    lab.until(lambda: status(lab) == "paused", "a pause")
    return time.monotonic() - begin


def run_and_cluster_are_there_after_a_reload_and_a_restart(lab: Lab) -> None:
    lab.run_cell(DETACH)
    lab.until(lambda: lab.has_run(DETACH), "a cluster without an owner")
    lab.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    lab.page.wait_for_timeout(1500)  # Lab saves its layout a second after a change
    lab.page.goto(f"{lab.server.url}lab?token={lab.server.token}")  # without ?reset: as a user reloads the page
    lab.page.locator(".jp-NotebookPanel").wait_for()
    execute(lab, "workbench:show-runs")
    lab.until(lambda: status(lab) == "stopped", "the run, after a reload")
    lab.page.locator(".wb-Run").wait_for(state="attached")  # its pane is opened again
    execute(lab, "docmanager:open", path="panel.ipynb")
    lab.idle()
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    lab.page.wait_for_timeout(1000)
    lab.idle()
    lab.page.locator("[data-cluster]").get_by_role("button", name="Attach").wait_for()
    lab.picture("panel-detached")


def a_cluster_is_attached_and_stopped(lab: Lab) -> None:
    cluster = lab.page.locator("[data-cluster]")
    cells = lab.page.locator(".jp-Notebook .jp-CodeCell")
    before = cells.count()
    cluster.get_by_role("button", name="Attach").click()
    lab.until(lambda: cells.count() == before + 1, "a new cell")
    code = f'cluster = wb.Cluster.attach("{cluster.get_attribute("data-cluster")}")'
    place = lab.until(
        lambda: next((n for n in range(before + 1) if code in lab.cell(n).inner_text()), None), "the code"
    )
    lab.page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
                .requestExecute({code: 'import workbench as wb'}).done"""
    )
    lab.run_cell(place)
    lab.until(lambda: lab.has_run(place), "the cluster is attached")
    cluster.get_by_text("owned by panel.ipynb").wait_for()
    cluster.get_by_role("button", name="Logs of").click()
    lab.page.locator(".wb-Log").first.wait_for()
    lab.picture("panel-logs")
    cluster.get_by_role("button", name="Stop cluster-").click()
    dialog = lab.page.locator(".jp-Dialog")
    dialog.get_by_text("It is owned by panel.ipynb.").wait_for()
    lab.picture("panel-stop")
    dialog.get_by_role("button", name="Cancel").click()
    lab.page.wait_for_timeout(500)
    assert cluster.count() == 1
    cluster.get_by_role("button", name="Stop cluster-").click()
    dialog.get_by_role("button", name="Stop cluster").click()
    lab.page.locator("#workbench-panel").get_by_text("No cluster is alive.").wait_for()
