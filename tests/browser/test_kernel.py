"""What a cell on ranks can do in JupyterLab: stop at a breakpoint, ask, show widgets, print much."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.browser.chromium import needs_browser
from tests.browser.lab import Lab, browsing

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(600)]

START, STOPS, ASKS, BUTTON, PRINTS = range(5)
BUTTON_CELL = """%%rank 1
import ipywidgets
button = ipywidgets.Button(description="press")
button.on_click(lambda _: print("pressed on", rank))
button"""
CELLS = (
    "%ranks 2\n%debug_rank 1\nprint('ready')",
    "%%rank 0-1\ngradient = 10 + rank\ndoubled = 2 * gradient\nprint(doubled)",
    "print('hello', input('your name? '))",
    BUTTON_CELL,
    "for i in range(60_000):\n    print('line', i)",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A notebook whose cells run on two ranks; nothing may be left of it."""
    needs_browser()
    with browsing(tmp_path_factory.mktemp("lab"), forked=True) as shown:
        shown.server.write("ranks.ipynb", *CELLS, kernel_name="workbench-mpi")
        shown.open("ranks.ipynb")
        shown.run_cell(START)
        shown.until(lambda: shown.has_run(START), "ranks that are ready")
        yield shown


def test_a_breakpoint_stops_the_chosen_rank(lab: Lab) -> None:
    page = lab.page
    bug = page.locator(".jp-DebuggerBugButton").first
    lab.until(bug.is_enabled, "a debugger that can be switched on")
    bug.click()
    page.locator(".jp-DebuggerBugButton[aria-pressed='true']").first.wait_for()
    gutter = lab.cell(STOPS).locator(".cm-breakpoint-gutter .cm-gutterElement")
    gutter.nth(3).click()  # the first element is no line
    page.locator(".jp-DebuggerBreakpoint").first.wait_for()
    lab.run_cell(STOPS)
    frames, variables = page.locator(".jp-DebuggerCallstack-body"), page.locator(".jp-DebuggerVariables-body")
    frames.get_by_text("rank 1: <module>").first.wait_for()
    variables.get_by_text("gradient").first.wait_for()
    lab.picture("debugger-stopped")
    assert lab.cell(STOPS).get_by_text("[0] 20").count(), "the other rank has not stopped"
    assert not lab.cell(STOPS).get_by_text("[1] 22").count()
    page.locator(".jp-DebuggerPausedButton").first.click()  # continue
    lab.until(lambda: lab.has_run(STOPS), "the end of the cell")
    lab.cell(STOPS).get_by_text("[1] 22").wait_for()
    bug.click()


def test_a_question_is_asked_below_the_cell(lab: Lab) -> None:
    lab.run_cell(ASKS)
    cell = lab.cell(ASKS)
    cell.get_by_text(re.compile(r"\[[01-]+\] your name\?")).wait_for()  # one rank may be late
    answer = cell.locator(".jp-Stdin-input")
    answer.fill("Ada")
    answer.press("Enter")
    cell.get_by_text("hello Ada").first.wait_for()


def test_a_button_of_a_rank_calls_the_rank(lab: Lab) -> None:
    lab.run_cell(BUTTON)
    cell = lab.cell(BUTTON)
    cell.get_by_role("button", name="press").click()
    cell.get_by_text("[1] pressed on 1").wait_for()


def test_much_text_does_not_freeze_the_page(lab: Lab) -> None:
    lab.run_cell(PRINTS)
    lab.until(lambda: lab.has_run(PRINTS), "the end of the cell")
    cell = lab.cell(PRINTS)
    cell.get_by_text("line 59999").first.wait_for()
    assert len(cell.inner_text()) < 500_000
    (link,) = cell.locator("a").all()
    log = lab.server.runs.parent / "notebooks" / str(link.inner_text())
    assert log.read_text().splitlines()[-1].endswith("] line 59999")
    assert lab.errors == []
