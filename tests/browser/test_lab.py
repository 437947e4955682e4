"""What a user sees in JupyterLab: tiles, live curves, buttons, timelines and the dashboard, on real ranks in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from playwright.sync_api import Locator

from tests.browser.chromium import needs_browser, share_of_ground
from tests.browser.lab import Lab, browsing
from tests.browser.panel import execute

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"
START, LIVE, WAIT, TIMELINE, BOARD = range(5)
# A training at full speed would take both cores from the browser.
BEGIN = """
import time
from dataclasses import replace
import torch
import workbench as wb
wb.plots.use_notebook_renderer()
def slow(output, target):
    time.sleep(0.01)
    return torch.nn.functional.cross_entropy(output, target)
problem = replace(wb.problems.digits_mlp(), loss=slow)
cluster = wb.Cluster(2)
"""
CELLS = (
    BEGIN.strip(),
    "run = cluster.train(wb.PipeSGD(), problem, epochs=100_000)\nrun",
    "run.wait();",
    "done = wb.simulate(wb.LayerwiseSGD(), wb.problems.digits_mlp(), workers=2, network='ethernet-1g', steps=6)\nwb.plots.timeline(done)",
    "board = wb.Dashboard(cluster)\nboard",
)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab for all tests here; nothing may be left of it."""
    needs_browser()
    with browsing(tmp_path_factory.mktemp("lab"), forked=True) as shown:
        yield shown


@pytest.fixture(scope="module")
def lab(empty: Lab) -> Lab:
    """A notebook is open in it, and two ranks are ready."""
    empty.server.write("cockpit.ipynb", *CELLS)
    empty.open("cockpit.ipynb")
    empty.run_cell(START)
    empty.until(lambda: empty.has_run(START), "ranks that are ready")
    return empty


def test_the_launcher_shows_the_tiles(empty: Lab) -> None:
    beside = Lab(empty.server, empty.page.context.new_page())  # another tab: the notebook of the other tests stays open
    beside.open()
    cards = beside.page.locator(".jp-LauncherCard-label")
    cards.first.wait_for()  # a launcher is there before its tiles are
    tiles = cards.all_inner_texts()
    beside.picture("launcher")
    beside.page.close()
    for name in ("Workbench", "Workbench MPI", "Workbench Slurm"):
        assert tiles.count(name) == 2, f"a notebook and a console: {tiles}"


def test_the_curve_moves_and_buttons_answer_while_a_cell_waits(lab: Lab) -> None:
    lab.run_cell(LIVE)
    lab.run_cell(WAIT)
    first = lab.until(lambda: lab.reach(LIVE), "a curve")
    lab.until(lambda: lab.reach(LIVE) > first, "a curve that moves")
    shown = lab.cell(LIVE)
    the_timeline_follows_until_it_is_moved(lab, shown)
    shown.get_by_role("button", name="bytes").click()
    lab.until(lambda: shown.locator(".xtitle", has_text="bytes sent").count(), "another axis")
    lab.picture("live")
    shown.get_by_role("button", name="Pause").click()
    shown.get_by_role("button", name="Resume").wait_for()
    shown.locator("td", has_text="paused").first.wait_for()
    held = lab.reach(LIVE)
    shown.locator(".workbench-header", has_text=re.compile(r"paused.*step \d+ of \d+")).wait_for()
    shown.locator("td", has_text=" ago").first.wait_for()  # a second and more without a word of it
    assert lab.reach(LIVE) == held > 0
    lab.picture("paused")
    with lab.page.expect_download() as saved:
        shown.locator(".js-plotly-plot").first.hover()
        shown.locator('[data-title="Save the data as CSV"]').first.click()
    rows = saved.value.path().read_text().splitlines()
    assert rows[0] == "curve,panel,x,y" and len(rows) > 20, rows[:3]
    assert any(row.startswith("PipeSGD") for row in rows) and not any(row.startswith("trace ") for row in rows)
    with lab.page.expect_download() as saved:
        shown.locator('[data-title="Save as SVG"]').first.click()
    assert saved.value.path().read_text().startswith("<svg")
    lab.theme("JupyterLab Dark")
    ground = "() => getComputedStyle(document.querySelector('.jp-CodeCell .js-plotly-plot .main-svg')).backgroundColor"
    lab.until(lambda: sum(map(int, re.findall(r"\d+", lab.page.evaluate(ground))[:3])) < 150, "a dark figure")
    lab.picture("paused-dark")
    lab.theme("JupyterLab Light")
    shown.get_by_role("button", name="Resume").click()
    lab.until(lambda: lab.reach(LIVE) > held, "a curve that moves again")
    assert not lab.has_run(WAIT)
    shown.get_by_role("button", name="Stop").click()
    lab.until(lambda: lab.has_run(WAIT), "the end of the cell that waits")
    lab.picture("stopped")

    def kept() -> list[dict[str, Any]] | None:
        outputs = lab.save()[LIVE]
        return outputs if not any(WIDGET in data for data in outputs) else None

    outputs = lab.until(kept, "plain figures in the live views' places")
    header, (curves, timeline) = outputs[0], [data for data in outputs if PLOTLY in data]
    assert curves[PLOTLY]["data"] and timeline[PLOTLY]["data"]
    said = "".join(header["text/html"])
    assert "<b>stopped</b>" in said and re.search(r"step \d+ of \d+", said) and re.search("accuracy|loss", said), said
    assert " left" not in said and str(lab.server.runs) in said, "how it ended, and where it is"
    assert lab.errors == []


def the_timeline_follows_until_it_is_moved(lab: Lab, shown: Locator) -> None:
    timeline = shown.locator(".wb-Timeline")
    newest = "root => root.parentElement.timeline.runs[0]?.steps.at(-1) ?? 0"
    first = lab.until(lambda: timeline.count() and timeline.evaluate(newest), "the newest steps' timeline")
    lab.until(lambda: timeline.evaluate(newest) > first, "newer steps")
    the_timeline_has_its_colours_when_it_grows(lab, timeline.locator("canvas"))
    cells = lab.page.locator(".jp-Notebook .jp-Cell").count()
    timeline.focus()
    for key in ("d", "d", "w"):  # d d deletes a cell of a notebook whose keys they are
        lab.page.keyboard.press(key)
    held = timeline.evaluate(newest)
    follow = timeline.get_by_role("button", name=re.compile("Follow .newest step"))
    lab.until(lambda: follow.count(), "newer steps that wait")
    assert timeline.evaluate(newest) == held and lab.page.locator(".jp-Notebook .jp-Cell").count() == cells
    lab.picture("live-timeline")
    follow.click()
    lab.until(lambda: timeline.evaluate(newest) > held, "newer steps again")


def the_timeline_has_its_colours_when_it_grows(lab: Lab, canvas: Locator) -> None:
    """Bars on a ground, before and after the left bar is closed; the canvas was black."""
    assert 0.1 < share_of_ground(canvas) < 0.95
    narrow = canvas.evaluate("canvas => canvas.width")
    execute(lab, "application:toggle-left-area")
    lab.until(lambda: canvas.evaluate("canvas => canvas.width") > narrow, "a wider timeline")
    assert 0.1 < share_of_ground(canvas) < 0.95
    execute(lab, "application:toggle-left-area")
    lab.until(lambda: canvas.evaluate("canvas => canvas.width") == narrow, "the width of before")


def test_a_timeline_is_drawn(lab: Lab) -> None:
    lab.run_cell(TIMELINE)
    lab.until(lambda: lab.num_bars(TIMELINE) > 20, "bars")
    lab.picture("timeline")


def test_the_dashboard_starts_stops_compares_and_is_kept(lab: Lab) -> None:
    lab.run_cell(BOARD)
    board = lab.cell(BOARD)
    start, stop = (board.get_by_role("button", name=name) for name in ("Start", "Stop"))
    start.wait_for()
    fill(board.get_by_label("lr"), "much")
    start.click()
    board.get_by_text("lr='much': give a finite number above 0").wait_for()
    lab.picture("dashboard-refuses")
    fill(board.get_by_label("lr"), "0.05")
    fill(board.get_by_label("width"), "3")
    fill(board.get_by_label("length"), "100000")
    start.click()
    first = lab.until(lambda: lab.reach(BOARD), "a curve")
    board.locator(".js-plotly-plot").evaluate("plot => { plot.dataset.first = 'yes' }")
    lab.until(lambda: lab.reach(BOARD) > first, "a curve that moves")
    assert board.locator('.js-plotly-plot[data-first="yes"]').count() == 1, "it is drawn on, not anew"
    lab.scroll(BOARD)
    lab.picture("dashboard-trains")
    kept = "".join(lab.save()[BOARD][0]["text/html"])
    assert "1. PipeSGD(width=3): running" in kept and "data:image/svg+xml" in kept, "a notebook that is saved now"
    assert board.locator('[title="null"]').evaluate_all("all => all.filter(one => one.offsetParent).length") == 0
    stop.click()
    board.locator(".widget-checkbox", has_text="1. PipeSGD(width=3): stopped").wait_for()
    board.get_by_label("algorithm").select_option("local-sgd")
    board.get_by_role("button", name="simulated workers").click()
    fill(board.get_by_label("workers"), "4")
    fill(board.get_by_label("length"), "3")
    start.click()
    board.locator(".widget-checkbox", has_text="2. LocalSGD(every=8): finished").wait_for()
    board.locator(".workbench-comparison td", has_text="LocalSGD").wait_for()
    lab.scroll(BOARD)
    lab.picture("dashboard-compares")
    kept, _, curves, table = lab.save()[BOARD]
    assert "2. LocalSGD(every=8): finished" in "".join(kept["text/html"])
    assert {curve["name"] for curve in curves[PLOTLY]["data"] if curve.get("name")} == {
        "PipeSGD(width=3)",
        "LocalSGD(every=8)",
    }
    assert all(name in "".join(table["text/html"]) for name in ("PipeSGD", "LocalSGD", "every"))
    assert lab.errors == []


def fill(field: Any, text: str) -> None:
    """Write into a field, and leave it."""
    field.fill(text)
    field.press("Enter")
