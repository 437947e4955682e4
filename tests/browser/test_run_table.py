"""The run table of the panel in a real JupyterLab, with many runs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.browser.lab import Lab, browsing
from tests.browser.test_panel import execute, in_both_themes, needs_browser
from tests.unit.lab_server import write_run

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_MADE = 500


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

    in_both_themes(lab, "run-table")
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
