"""The panel in a real JupyterLab: clusters, a training that it pauses and stops, what stays after a reload, and the run table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from playwright.sync_api import Locator

from tests.browser.lab import BROWSER, Lab, browsing
from tests.browser.test_lab import BEGIN
from tests.unit.lab_server import write_run

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

START, TRAIN, DETACH = range(3)
CELLS = (
    BEGIN.strip(),
    "run = cluster.train(wb.PipeSGD(), problem, steps=1_000_000, evaluate_every=20);",
    "name = cluster.detach()",
)
NUM_MADE = 500
HOLD_S = 2.0


def needs_browser() -> None:
    if BROWSER is None:
        pytest.skip("no Chrome or Chromium on the PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab whose store has many runs that ended; each test opens its page."""
    needs_browser()
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    with browsing(tmp_path_factory.mktemp("store")) as shown:
        for number in range(NUM_MADE):
            failed = {"status": "failed", "error": "rank 1 failed at step 1: ValueError: a bad batch"}
            write_run(
                shown.server.runs,
                f"made-{number:04d}",
                created=(begin + timedelta(minutes=number)).isoformat(),
                losses=(2.0, 1.0 / (1 + number)),
                settings={"steps": 2, "lr": 0.01 * (1 + number % 7), "seed": number},
                algorithm={"name": "LocalSGD" if number % 2 else "PipeSGD", "settings": {"width": number % 5}},
                **(failed if number % 100 == 0 else {}),
            )
        yield shown


def execute(lab: Lab, command: str, **arguments: str) -> None:
    lab.page.evaluate("([id, args]) => { window.jupyterapp.commands.execute(id, args) }", [command, arguments])


def runs(lab: Lab) -> Locator:
    return lab.page.locator("#workbench-panel [data-run]")


def status(lab: Lab) -> str | None:
    """The newest run's, as the panel shows it."""
    return runs(lab).first.get_attribute("data-status") if runs(lab).count() else None


def steps(lab: Lab) -> int:
    """Those of the newest run, as the panel shows them."""
    text = runs(lab).first.inner_text()
    return int(text.partition("step ")[2].partition(" of ")[0].replace(",", "") or 0)


def dark(lab: Lab, name: str) -> None:
    """Keep a picture in each theme."""
    lab.picture(name)
    for theme, kind in (("JupyterLab Dark", "false"), ("JupyterLab Light", "true")):
        execute(lab, "apputils:change-theme", theme=theme)
        lab.page.locator(f'body[data-jp-theme-light="{kind}"]').wait_for(state="attached")
        lab.page.wait_for_timeout(500)  # its style sheet is there
        if kind == "false":
            lab.picture(f"{name}-dark")


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
    dark(lab, "panel-empty")
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
    runs(lab).get_by_role("button", name="PipeSGD").click()
    pane = lab.page.locator(".wb-Run")
    curve = pane.locator("path.wb-Chart-line").first
    curve.wait_for()
    before = curve.get_attribute("d")
    lab.until(lambda: curve.get_attribute("d") != before, "a curve that moves")
    pane.get_by_text("Accuracy", exact=True).wait_for()
    lab.until(lambda: pane.locator("dt", has_text="time left").count(), "the time left")
    dark(lab, "panel-live")
    assert min(hold(lab) for _ in range(3)) < HOLD_S
    lab.page.locator(".wb-Run-header").get_by_text("paused").wait_for()
    dark(lab, "panel-paused")
    held = steps(lab)
    lab.page.wait_for_timeout(1500)
    assert steps(lab) == held > 0
    runs(lab).get_by_role("button", name="Resume").click()
    lab.until(lambda: steps(lab) > held, "steps after the pause")
    pane.get_by_role("button", name="Stop, with a checkpoint").click()
    lab.until(lambda: status(lab) == "stopped", "the end")
    assert runs(lab).get_by_role("button", name="Pause").count() == 0, "a run that ended has no such button"
    pane.get_by_role("button", name="Copy: continue").wait_for()


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


def test_the_run_table_sorts_filters_and_exports_many_runs(store: Lab) -> None:
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    table = lab.page.locator(".wb-Table")
    table.wait_for()
    names = table.locator("tbody tr[data-run]")
    lab.page.get_by_text(f"{NUM_MADE} runs").wait_for()
    assert 10 < names.count() < 100, "only rows in view are in the page"

    def first() -> str | None:
        return names.first.get_attribute("data-run")

    def sort(column: str) -> None:
        table.get_by_role("button", name=f"{column}", exact=False).first.click()

    dark(lab, "run-table")
    sort("training loss")
    lab.until(lambda: first() == f"made-{NUM_MADE - 1:04d}", "the lowest loss first")
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("training loss")
    sort("training loss")
    lab.until(lambda: table.locator("th[aria-sort=descending]").count(), "the other way")
    search = lab.page.get_by_role("searchbox", name="Filter the runs")
    search.fill("localsgd width=3")
    expected = sum(number % 2 == 1 and number % 5 == 3 for number in range(NUM_MADE))
    lab.page.get_by_text(f"{expected} of {NUM_MADE} runs").wait_for()
    assert names.count() <= expected
    lab.picture("run-table-filtered")
    with lab.page.expect_download() as download:
        lab.page.get_by_role("button", name="Export CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert len(lines) == expected + 1 and all("LocalSGD" in line for line in lines[1:])
    search.fill("no such words")
    lab.page.get_by_text("No run contains these words.").wait_for()
    search.fill("failed")
    lab.until(lambda: names.count() == NUM_MADE // 100, "those that failed")
    lab.page.locator(".wb-TableBox").focus()
    lab.page.keyboard.press("ArrowDown")
    lab.page.keyboard.press("Enter")
    lab.page.locator(".wb-Run:visible").get_by_text("a bad batch").wait_for()
    lab.picture("run-failed")
    assert lab.errors == []


def test_columns_are_chosen_and_kept(store: Lab) -> None:
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    lab.page.get_by_role("button", name="Columns", exact=True).click()
    chosen = lab.page.locator(".wb-Columns")
    chosen.get_by_label("folder").check()
    chosen.get_by_label("problem").uncheck()
    lab.picture("run-table-columns")
    heads = lab.page.locator(".wb-Table th")
    lab.until(lambda: "folder" in heads.all_inner_texts(), "a column more")
    assert "problem" not in heads.all_inner_texts()
    lab.page.wait_for_timeout(1500)
    lab.page.goto(f"{lab.server.url}lab?token={lab.server.token}")
    lab.page.locator("#workbench-panel").wait_for(state="attached")
    execute(lab, "workbench:run-table")
    lab.until(lambda: "folder" in heads.all_inner_texts(), "the column, after a reload")
    lab.page.get_by_role("button", name="Columns", exact=True).click()
    chosen.get_by_role("button", name="Usual columns").click()
    lab.until(lambda: "problem" in heads.all_inner_texts(), "the usual columns")
    assert lab.errors == []


def test_without_a_notebook_code_goes_into_a_new_one(store: Lab) -> None:
    lab = store
    lab.open()
    execute(lab, "workbench:show-clusters")
    lab.page.locator("#workbench-panel").get_by_role("button", name="Start a cluster").click()
    cell = lab.page.locator(".jp-NotebookPanel .jp-CodeCell .cm-content")
    lab.until(lambda: cell.count() and "wb.Cluster(4)" in cell.first.inner_text(), "a notebook with the code")
    assert cell.first.inner_text().split() == ["import", "workbench", "as", "wb", "cluster", "=", "wb.Cluster(4)"]
    assert lab.errors == []
