"""The panel and a live view on a running JupyterHub: all goes through the hub's proxy, below /user/NAME/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.browser.chromium import needs_browser
from tests.browser.hub import Hub, needs_hub
from tests.browser.lab import Lab, browsing
from tests.browser.panel import begin_training, execute, runs, status, steps
from tests.browser.test_lab import BEGIN

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

VIEW, DETACH = 2, 3  # places of cells
CELLS = (
    BEGIN.strip(),
    "run = cluster.train(wb.PipeSGD(), problem, steps=1_000_000, evaluate_every=20);",
    "run",
    "name = cluster.detach()",
)


def test_a_training_is_shown_and_steered_through_the_proxy_of_a_hub(tmp_path: Path) -> None:
    needs_browser()
    needs_hub()
    with browsing(tmp_path / "hub", Hub) as lab:
        hub = lab.server
        assert isinstance(hub, Hub)
        hub.log_in(lab.page)
        requests: list[str] = []
        lab.page.on("request", lambda request: requests.append(request.url))
        begin_training(lab, "hub.ipynb", CELLS)
        the_panel_shows_and_steers(lab)
        the_timeline_follows(lab)
        a_live_view_moves_and_its_buttons_answer(lab)
        the_run_table_lists_the_run(lab)
        assert any("/workbench/api/" in one for one in requests)
        outside = [one for one in requests if one.startswith("http") and not one.startswith(hub.url)]
        assert not outside, "requests past the user's server"
        another_user_is_refused(lab, hub)
        lab.run_cell(DETACH)
        lab.until(lambda: lab.has_run(DETACH), "a cluster without an owner")
        the_hub_stops_the_server_and_the_training_continues(lab, hub)
        the_panel_stops_the_run_and_the_cluster(lab)
        assert lab.errors == []


def the_panel_shows_and_steers(lab: Lab) -> None:
    sparkline = runs(lab).first.locator("polyline")
    sparkline.wait_for()
    first = sparkline.get_attribute("points")
    lab.until(lambda: sparkline.get_attribute("points") != first, "a sparkline that moves")
    lab.page.locator("[data-cluster]").get_by_text("owned by hub.ipynb").wait_for()
    runs(lab).first.get_by_role("button", name="Pause").click()
    lab.until(lambda: status(lab) == "paused", "a pause")
    held = steps(lab)
    runs(lab).first.get_by_role("button", name="Resume").click()
    lab.until(lambda: status(lab) == "running" and steps(lab) > held, "steps after the pause")
    runs(lab).first.get_by_role("button", name=re.compile("^PipeSGD")).click()
    curve = lab.page.locator(".wb-Run path.wb-Chart-line").first
    curve.wait_for()
    before = curve.get_attribute("d")
    lab.until(lambda: curve.get_attribute("d") != before, "a curve that moves")


def the_timeline_follows(lab: Lab) -> None:
    lab.page.locator(".wb-Run").get_by_role("button", name="Timeline").click()
    place = lab.page.locator(".wb-TimelinePane-place")
    newest = "place => place.timeline?.runs[0]?.steps.at(-1) ?? 0"
    first = lab.until(lambda: place.evaluate(newest), "the newest steps")
    lab.until(lambda: place.evaluate(newest) > first, "newer steps")
    lab.picture("hub-timeline")
    execute(lab, "application:close")


def a_live_view_moves_and_its_buttons_answer(lab: Lab) -> None:
    lab.run_cell(VIEW)
    first = lab.until(lambda: lab.reach(VIEW), "curves")
    lab.until(lambda: lab.reach(VIEW) > first, "curves that move")
    lab.picture("hub-live")
    view = lab.cell(VIEW)
    view.get_by_role("button", name="Pause").click()
    lab.until(lambda: status(lab) == "paused", "the pause, in the panel")
    view.get_by_role("button", name="Resume").click()
    lab.until(lambda: status(lab) == "running", "the training, in the panel")


def the_run_table_lists_the_run(lab: Lab) -> None:
    execute(lab, "workbench:run-table")
    row = lab.page.locator(".wb-Table tr[data-run]:visible")
    row.wait_for()
    before = row.inner_text()
    lab.until(lambda: row.inner_text() != before, "a row that changes")
    lab.picture("hub-table")


def another_user_is_refused(lab: Lab, hub: Hub) -> None:
    browser = lab.page.context.browser
    assert browser is not None
    other = browser.new_context().new_page()
    hub.log_in(other, "grace")
    for method, path in (("GET", "runs"), ("GET", "clusters"), ("GET", "timeline.js"), ("POST", "runs/any/stop")):
        answer = other.evaluate(
            "async ([method, url]) => (await fetch(url, { method })).status", [method, f"{hub.url}workbench/api/{path}"]
        )
        assert answer == 403, (method, path)
    other.context.close()


def the_hub_stops_the_server_and_the_training_continues(lab: Lab, hub: Hub) -> None:
    """As for an idle server. The hub ends the page's session, too."""
    before = steps(lab)
    beside = lab.page.context.new_page()
    hub.home(beside)
    beside.get_by_role("button", name="Stop My Server").click()
    panel = lab.page.locator("#workbench-panel")
    panel.get_by_text("JupyterHub server no longer running").first.wait_for()
    assert runs(lab).count() == 1, "what was read stays"
    beside.get_by_role("button", name="Start My Server").click()
    beside.wait_for_url("**/hub/spawn-pending/**")
    beside.close()  # it would log in again, and with it this page
    panel.get_by_text("You are logged out of the Jupyter server: reload this page.").first.wait_for()
    lab.picture("hub-restarted")
    lab.open("hub.ipynb")
    execute(lab, "workbench:show-runs")
    lab.until(lambda: status(lab) == "running" and steps(lab) > before, "steps that were taken meanwhile")
    lab.page.locator("[data-cluster]").get_by_role("button", name="Attach").wait_for()


def the_panel_stops_the_run_and_the_cluster(lab: Lab) -> None:
    runs(lab).first.get_by_role("button", name="Stop, with a checkpoint").click()
    lab.until(lambda: status(lab) == "stopped", "the end")
    lab.page.locator("[data-cluster]").get_by_role("button", name="Stop cluster-").click()
    lab.page.locator(".jp-Dialog").get_by_role("button", name="Stop cluster").click()
    lab.page.locator("#workbench-panel").get_by_text("No cluster is alive.").wait_for()
