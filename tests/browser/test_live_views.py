"""Live views in a real JupyterLab: switches, what a saved notebook keeps, reloads, restarts, ends, and dark themes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.browser.lab import BROWSER, Lab, browsing

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

START, FAIL, FAILED, STATIC, COMPARE, LIVE, AGAIN, REMOVED, STOP = range(9)
PLOTLY = "application/vnd.plotly.v1+json"
BEGIN = """
import time
from dataclasses import replace
import torch
import workbench as wb
wb.plots.use_notebook_renderer()
def slow(output, target):
    time.sleep(0.01)
    return torch.nn.functional.cross_entropy(output, target)
def bad(output, target):
    from mpi4py import MPI
    bad.calls += 1
    if MPI.COMM_WORLD.rank == 1 and bad.calls > 40:
        raise ValueError("no more <data>")
    return slow(output, target)
bad.calls = 0
digits = wb.problems.digits_mlp()
cluster = wb.Cluster(2)
"""
SIMULATE = """
runs = [
    wb.simulate(wb.PipeSGD(width=width), digits, workers=2, network="ethernet-1g", steps=30, lr=lr, seed=seed)
    for width, lr in ((2, 0.1), (3, 0.02), (10, 0.1))
    for seed in (0, 1)
]
wb.plots.curves(runs)
"""
CELLS = (
    BEGIN.strip(),
    "broken = cluster.train(wb.PipeSGD(), replace(digits, loss=bad), steps=500)\nbroken",
    "wb.open_run('last')",
    SIMULATE.strip(),
    "wb.compare(runs)",
    "run = cluster.train(wb.PipeSGD(), replace(digits, loss=slow), epochs=100_000)\nrun",
    "run",
    "print('removed:', [view._curves.was_removed for view in run._views if hasattr(view, '_curves')])",
    "run.stop().wait();",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab in which a notebook is open and two ranks are ready; nothing may be left of it."""
    if BROWSER is None:
        pytest.skip("no Chrome or Chromium on the PATH (Debian: apt-get install chromium)")
    with browsing(tmp_path_factory.mktemp("lab"), forked=True) as shown:
        shown.server.write("live.ipynb", *CELLS)
        shown.open("live.ipynb")
        shown.run_cell(START)
        shown.until(lambda: shown.has_run(START), "ranks that are ready")
        yield shown


def has_output(lab: Lab, number: int, words: str) -> bool:
    return words in lab.cell(number).inner_text()


def test_a_failed_run_says_how_it_ended(lab: Lab) -> None:
    """In its live view, in what the notebook keeps, and where it is opened again."""
    lab.run_cell(FAIL)
    lab.until(lambda: has_output(lab, FAIL, "rank 1 failed at step 39: ValueError: no more <data>"), "the error")
    lab.picture("live-failed")

    def kept() -> bool:
        header = "".join(lab.save()[FAIL][0]["text/html"])
        return ">rank 1 failed at step 39: ValueError: no more &lt;data&gt;<" in header and "<b>failed</b>" in header

    lab.until(kept, "the error and the state in what the notebook keeps")
    assert lab.cell(FAIL).get_by_role("button", name="Stop").count() == 0, "a plain figure is in the widget's place"
    lab.run_cell(FAILED)
    lab.until(lambda: has_output(lab, FAILED, "failed after step"), "the last step")
    assert has_output(lab, FAILED, "ValueError: no more <data>") and has_output(lab, FAILED, "rank 1")


def test_a_finished_figure_follows_the_theme_and_keeps_its_data(lab: Lab) -> None:
    lab.run_cell(STATIC)
    lab.until(lambda: lab.num_lines(STATIC), "curves")
    text = lab.cell(STATIC).locator(".js-plotly-plot .gtitle")
    dark_text = sum(colour(text))
    before = lab.save()[STATIC][0][PLOTLY]
    lab.theme("JupyterLab Dark")
    lab.scroll(STATIC)
    lab.until(lambda: sum(colour(text)) > 450, "light text on a dark page")
    figure = lab.cell(STATIC).locator(".js-plotly-plot")
    grounds = figure.evaluate(
        """plot => Array.from(plot.querySelectorAll('.main-svg, .bglayer .bg, .legend > .bg'))
            .map(one => one.matches('svg') ? getComputedStyle(one).backgroundColor : getComputedStyle(one).fill)"""
    )
    assert grounds and all(re.search(r"rgba\(0, 0, 0, 0\)|none|transparent", one) for one in grounds), grounds
    assert figure.locator('[data-title^="Share"]').count() == 0, "no button that uploads a figure"
    lab.picture("static-dark")
    lab.theme("JupyterLab Light")
    lab.until(lambda: sum(colour(text)) == dark_text < 200, "dark text on a light page")
    lab.picture("static-light")
    assert lab.save()[STATIC][0][PLOTLY] == before, "only what the page shows has changed"


def colour(found: Any) -> list[int]:
    """Red, green and blue of a text."""
    shown = found.first.evaluate("one => getComputedStyle(one).fill")
    return [int(part) for part in re.findall(r"\d+", shown)[:3]]


def test_a_comparison_is_sorted_by_a_click(lab: Lab) -> None:
    lab.run_cell(STATIC)  # makes the runs
    lab.until(lambda: lab.num_lines(STATIC), "curves")
    lab.run_cell(COMPARE)
    table = lab.cell(COMPARE).locator(".workbench-comparison table")
    table.wait_for()
    titles = table.locator("th").all_inner_texts()
    assert [title.strip() for title in titles[:4]] == ["algorithm", "width", "lr", "seed"], titles

    def column(name: str) -> list[str]:
        place = [title.strip() for title in titles].index(name)
        return table.locator(f"tbody td:nth-child({place + 1})").all_inner_texts()

    assert column("width") == ["2", "2", "3", "3", "10", "10"]
    table.get_by_role("button", name="width").click()
    table.get_by_role("button", name="width").click()
    assert column("width") == ["10", "10", "3", "3", "2", "2"], "as numbers, not as words"
    assert table.locator("th[aria-sort=descending]").count() == 1
    table.get_by_role("button", name="lr").click()
    assert column("lr") == ["0.02", "0.02", "0.1", "0.1", "0.1", "0.1"]
    cut = table.locator("td").evaluate_all("cells => cells.filter(one => one.scrollWidth > one.clientWidth + 1).length")
    assert cut == 0
    lab.scroll(COMPARE)
    lab.picture("comparison")


def test_switches_and_what_is_kept_of_a_run_that_trains(lab: Lab) -> None:
    lab.run_cell(LIVE)
    view = lab.cell(LIVE)
    lab.until(lambda: lab.reach(LIVE) > 1, "curves")
    lab.until(lambda: pictures_shown(lab) == [False, False], "pictures of curves and timeline, which are not shown")
    status = "name => performance.getEntriesByType('resource').find(one => one.name.endsWith(name))?.responseStatus"
    assert lab.page.evaluate(status, "/plotly-basic.js") == 200, "from the server, which the browser keeps"
    view.get_by_role("button", name="epochs").click()
    lab.until(lambda: view.locator(".xtitle", has_text="epoch").count(), "another axis")
    for name in ("log x", "log loss"):
        view.get_by_role("button", name=name).click()
    types = "plots => plots.map(plot => plot._fullLayout).map(one => [one.xaxis.type, one.yaxis.type])[0]"
    lab.until(lambda: view.locator(".js-plotly-plot").evaluate_all(types) == ["log", "log"], "logarithmic axes")
    view.get_by_label("smoothing").select_option("none")
    lab.until(
        lambda: view.locator(".js-plotly-plot").first.locator(".scatterlayer .js-line").count() == 2,
        "the raw loss alone",
    )
    assert view.locator('[title="null"]').evaluate_all("all => all.filter(one => one.offsetParent).length") == 0
    lab.picture("live-log")
    lab.theme("JupyterLab Dark")
    lab.picture("live-log-dark")
    lab.theme("JupyterLab Light")
    kept = ["".join(output["text/html"]) for output in lab.save()[LIVE] if "text/html" in output]
    assert all("workbench-still" in html and "data:image/svg+xml;base64," in html for html in kept)
    assert "<b>running</b>" in kept[0] and "timeline" in kept[1]
    for _ in range(2):  # the second one removes the view of the first
        lab.run_cell(AGAIN)
        lab.until(lambda: lab.reach(AGAIN), "curves")
    lab.run_cell(REMOVED)
    lab.until(lambda: has_output(lab, REMOVED, "removed: [False, True, False]"), "a kernel that knows what is shown")
    survives_a_reload_and_a_restart(lab)


def pictures_shown(lab: Lab) -> list[bool]:
    """Whether each picture that the notebook keeps of the run is shown."""
    return [one.is_visible() for one in lab.cell(LIVE).locator(".workbench-still:has(img)").all()]


def survives_a_reload_and_a_restart(lab: Lab) -> None:
    """The view of a run that trains continues after a reload; after a restart, its pictures are in its place."""
    lab.save()
    lab.open("live.ipynb")
    first = lab.until(lambda: lab.reach(LIVE), "curves after a reload")
    lab.until(lambda: lab.reach(LIVE) > first, "curves that move after a reload")
    lab.until(lambda: pictures_shown(lab) == [False, False], "pictures that are not shown")
    lab.run_cell(STOP)
    lab.until(lambda: lab.has_run(STOP), "the end")
    view = lab.cell(LIVE)
    lab.until(lambda: view.get_by_role("button", name="Stop").is_disabled(), "a button with nothing to stop")
    assert view.get_by_role("button", name="Pause").is_disabled()
    lab.until(lambda: "stopped" in view.locator(".workbench-header").inner_text(), "how it ended")
    lab.picture("live-ended-after-a-reload")
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    lab.until(lambda: pictures_shown(lab) == [True, True], "pictures, in place of widgets whose kernel has ended")
    assert (
        view.get_by_role("button", name="Stop").count() == 0 or not view.get_by_role("button", name="Stop").is_visible()
    )
    lab.idle()
    lab.picture("live-restarted")
    lab.save()
    lab.open("live.ipynb")
    lab.until(lambda: pictures_shown(lab) == [True, True], "the pictures of the saved notebook")
    kept = view.locator(".workbench-still", has_text="step").first
    lab.until(lambda: "stopped" in kept.inner_text() and " left" not in kept.inner_text(), "how it ended")
    lost = lab.page.get_by_text(re.compile("model not found|Loading widget")).all()
    assert not any(one.is_visible() for one in lost)
    lab.picture("live-reopened")
    assert lab.errors == []
    lab.run_cell(START)  # for the tests that follow, in any order
    lab.until(lambda: lab.has_run(START), "ranks that are ready")
