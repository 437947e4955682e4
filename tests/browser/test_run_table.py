"""The run table of the panel in a real JupyterLab, with many runs."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
pytest.importorskip("jupyterlab", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from playwright.sync_api import Locator

from tests.browser.chromium import needs_browser
from tests.browser.lab import Lab, artefacts, browsing
from tests.browser.panel import execute, in_both_themes, runs
from tests.unit.lab_server import write_run
from workbench.bench.spans import write_trace
from workbench.trace.store import update_run

pytestmark = [pytest.mark.browser, pytest.mark.notebooks, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_MADE = 500
NUM_SEEDS = 9  # runs that differ in their seed, and in their learning rate
NUM_ALL = NUM_MADE + NUM_SEEDS + 1  # with one that has a trace


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
        write_seeds(shown)
        update_run(write_trace(shown.server.runs, num_ranks=2, num_steps=10), created=begin.isoformat())
        yield shown


def test_the_run_table_sorts_filters_and_exports_many_runs(store: Lab) -> None:
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    table = lab.page.locator(".wb-Table")
    table.wait_for()
    names = table.locator("tbody tr[data-run]")
    lab.page.get_by_text(f"{NUM_ALL} runs").wait_for()
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
    lab.page.get_by_text(f"{expected} of {NUM_ALL} runs").wait_for()
    assert names.count() <= expected
    lab.picture("run-table-filtered")
    with lab.page.expect_download() as download:
        lab.page.get_by_role("button", name="Export CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert len(lines) == expected + 1 and all("LocalSGD" in line for line in lines[1:])
    search.fill("no such words")
    lab.page.get_by_text("No run contains these words.").wait_for()
    search.fill("failed")
    lab.until(lambda: names.count() == NUM_MADE // 100 + 1, "those that failed")
    lab.page.locator(".wb-TableBox").focus()
    lab.page.keyboard.press("ArrowDown")
    lab.page.keyboard.press("Enter")
    lab.page.locator(".wb-Run:visible").get_by_text("a bad batch").wait_for()
    lab.picture("run-failed")
    assert lab.errors == []


def test_a_run_that_changes_is_shown_again_and_one_that_is_removed_is_not(store: Lab) -> None:
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    lab.page.get_by_role("searchbox", name="Filter the runs").fill("late-run")
    folder = write_run(lab.server.runs, "late-run", created="2026-05-01T00:00:00+00:00")
    row = lab.page.locator('.wb-Table tr[data-run="late-run"]')
    row.get_by_text("finished").wait_for()
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "status": "failed", "error": "a bad batch"}))
    row.get_by_text("failed").wait_for()
    shutil.rmtree(folder)
    row.wait_for(state="detached")
    assert lab.page.locator(".wb-Pane .wb-Trouble").count() == 0


def test_a_closed_pane_opens_again(store: Lab) -> None:
    """Every kind of pane; a closed one asks the server for nothing more."""
    lab = store
    lab.open()
    (traced,) = (path.name for path in lab.server.runs.glob("*layerwisesgd*"))
    compared = json.dumps([traced, "made-0001"])
    for kind, name in (
        ("table", ""),
        ("run", traced),
        ("timeline", traced),
        ("ranks-runs", traced),
        ("compare", compared),
    ):
        pane = lab.page.locator(f"[id='workbench-{kind}-{name}']")
        for _ in range(2):
            execute(lab, "workbench:open", kind=kind, name=name)
            pane.wait_for(state="visible")
            lab.page.locator(".lm-TabBar-tab.lm-mod-current .lm-TabBar-tabCloseIcon").last.click()
            pane.wait_for(state="detached")
    asked: list[str] = []
    lab.page.on("request", lambda request: asked.append(request.url) if traced in request.url else None)
    lab.page.wait_for_timeout(2500)
    assert lab.errors == [] and asked == []


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
    lab.idle()  # a server waits for a kernel that starts, half a minute at its end
    assert lab.errors == []


def test_runs_that_differ_only_in_their_seed_are_grouped_and_compared(store: Lab) -> None:
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    table = lab.page.locator(".wb-Table")
    lab.page.get_by_role("searchbox", name="Filter the runs").fill("gossip")
    lab.page.get_by_text(f"{NUM_SEEDS} of ").wait_for()
    lab.page.get_by_label("groups").select_option("seeds")
    groups = table.locator("tr[data-group]")
    lab.until(lambda: groups.count() == 2, "two groups")
    assert sorted(str(groups.nth(row).get_attribute("data-group")) for row in range(2)) == ["4", "5"]
    failed = groups.filter(has_text="1 failed")
    assert "4 finished, 1 failed" in failed.inner_text()
    accuracies = [0.90, 0.92, 0.94, 0.96]
    half = 3.182 * statistics.stdev(accuracies) / 2
    assert f"{93.0:.1f} ± {100 * half:.1f} %" in failed.inner_text(), (
        "the mean of those that finished, and its interval"
    )
    assert table.locator("tr[data-run]").count() == 0
    failed.get_by_role("button", name="GossipSGD").click()
    lab.until(lambda: table.locator("tr[data-run]").count() == 5, "its runs")
    in_both_themes(lab, "run-table-groups")
    for row in range(2):
        groups.nth(row).get_by_role("checkbox").check()
    lab.page.get_by_role("button", name=f"Compare {NUM_SEEDS}").click()
    compared = lab.page.locator(".wb-Run:visible")
    compared.locator("path.wb-Chart-band").first.wait_for()
    table = compared.get_by_role("table", name="Where the runs differ")
    assert table.locator("tbody tr").count() == 3, "two means, and the run that failed"
    heads = table.locator("th").all_inner_texts()
    assert heads[:3] == ["curve", "runs", "lr"] and "seed" not in heads
    mean = table.locator("tbody tr", has_text="lr=0.1").first.inner_text()
    assert f"{93.0:.1f} ± {100 * half:.1f} %" in mean
    legend = compared.locator(".wb-Chart").first.locator(".wb-Chart-key").all_inner_texts()
    assert sum("(mean of 4)" in text for text in legend) == 2
    the_comparison_is_sorted_smoothed_and_saved(lab, compared)
    in_both_themes(lab, "compare-runs")
    the_panes_follow_the_theme(lab)
    assert lab.page.locator(".wb-Pane .wb-Trouble").count() == 0
    lab.page.wait_for_timeout(1500)  # Lab saves its layout a second after a change
    lab.page.goto(f"{lab.server.url}lab?token={lab.server.token}")
    lab.page.locator(".lm-TabBar-tab", has_text=f"Compare {NUM_SEEDS} runs").click()  # its pane, after a reload
    lab.page.locator("path.wb-Chart-band").first.wait_for()
    execute(lab, "workbench:run-table")
    lab.page.get_by_label("groups").select_option("none")  # JupyterLab keeps it
    lab.until(lambda: groups.count() == 0, "runs again")
    assert lab.errors == []


def the_comparison_is_sorted_smoothed_and_saved(lab: Lab, compared: Locator) -> None:
    table = compared.get_by_role("table", name="Where the runs differ")

    def rates() -> list[str]:
        return table.locator("tbody td:nth-child(3)").all_inner_texts()

    assert table.locator("th[aria-sort=none]").count() == table.locator("th").count(), "in the order of the curves"
    for order, expected in (("ascending", ["0.1", "0.1", "0.2"]), ("descending", ["0.2", "0.1", "0.1"])):
        table.get_by_role("button", name="lr").click()
        table.locator(f"th[aria-sort={order}]").wait_for()
        assert rates() == expected
    assert compared.get_by_role("button", name="epochs").count() == 0, "these runs do not record the length of an epoch"
    curve = compared.locator("path.wb-Chart-line").first
    rough = curve.get_attribute("d")
    compared.get_by_label("smoothing").select_option("30 %")
    lab.until(lambda: curve.get_attribute("d") != rough, "a smoothed curve")
    compared.get_by_label("smoothing").select_option("none")

    def saved(format: str) -> bytes:
        with lab.page.expect_download() as download:
            compared.get_by_role("button", name=f"Save training loss as {format}").click()
        return download.value.path().read_bytes()

    picture = saved("SVG").decode()
    assert picture.startswith("<svg") and "Training loss" in picture and "var(" not in picture
    assert picture.count(">GossipSGD, lr=0.1") == 2, "the names of two curves"
    pixels = saved("PNG")
    assert pixels.startswith(b"\x89PNG")
    (artefacts() / "chart-saved.png").write_bytes(pixels)
    lines = saved("CSV").decode().splitlines()
    assert lines[0] == "curve,steps,Training loss,lowest,highest" and len(lines) == 1 + 3 * 30


def the_panes_follow_the_theme(lab: Lab) -> None:
    def brightness(style: str) -> int:
        shown = lab.page.locator(".wb-Pane:visible").first.evaluate(f"pane => getComputedStyle(pane).{style}")
        return sum(map(int, re.findall(r"\d+", shown)[:3]))

    lab.theme("JupyterLab Dark")
    lab.until(lambda: brightness("backgroundColor") < 150 < 450 < brightness("color"), "light text on a dark page")
    lab.theme("JupyterLab Light")
    lab.until(lambda: brightness("color") < 150 < 450 < brightness("backgroundColor"), "dark text on a light page")


def test_an_algorithm_is_a_heading_with_what_differs_and_no_mean(store: Lab) -> None:
    """Its runs differ in more than their seed: the heading has the lowest and the highest of what is below it."""
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    table = lab.page.locator(".wb-Table")
    lab.page.get_by_label("groups").select_option("algorithms")
    lab.page.get_by_text(f"{NUM_ALL} runs of 4 algorithms").wait_for()
    headings = table.locator("tr[data-algorithm]")
    table.get_by_role("button", name="accuracy").click()
    lab.until(lambda: headings.first.get_attribute("data-algorithm") == "GossipSGD", "that of the best row first")
    assert table.locator("tr[data-group]").count() > 10, "unfolded at first"
    assert "e-1" not in table.inner_text(), "equal values have no interval"
    in_both_themes(lab, "run-table-algorithms")
    table.get_by_role("button", name="accuracy").click()
    lab.until(lambda: headings.first.get_attribute("data-algorithm") != "GossipSGD", "the other way")
    lab.page.get_by_role("searchbox", name="Filter the runs").fill("gossip")
    lab.page.get_by_text(f"{NUM_SEEDS} of {NUM_ALL} runs").wait_for()
    text = headings.inner_text()
    assert "±" not in text
    for words in ("8 finished, 1 failed", "0.1 to 0.2", "5 seeds", "93.0 %", "0.0664 to 0.0687"):
        assert words in text
    levels = table.locator("tbody tr").evaluate_all("rows => rows.map(row => row.getAttribute('aria-level'))")
    assert levels == ["1", "2", "2"]
    headings.get_by_role("button", name="GossipSGD").click()
    lab.until(lambda: table.locator("tbody tr").count() == 1, "a folded algorithm")
    headings.get_by_role("checkbox").check()
    lab.page.get_by_role("button", name=f"Compare {NUM_SEEDS}").wait_for()
    lab.page.get_by_label("groups").select_option("none")
    assert lab.errors == []


def test_the_table_can_be_read_in_a_side_bar(store: Lab) -> None:
    """340 px: boxes and algorithms stay in view, and all other columns scroll below them."""
    lab = store
    lab.open()
    execute(lab, "workbench:run-table")
    table = lab.page.locator(".wb-Table")
    table.locator("tr[data-run]").first.wait_for()
    lab.page.evaluate(
        """() => {
            const { shell } = window.jupyterapp;
            shell.add([...shell.widgets('main')].find(pane => pane.id === 'workbench-table-'), 'right');
            shell.activateById('workbench-table-');
            shell._hsplitPanel.setRelativeSizes([0, window.innerWidth - 400, 340]);
        }"""
    )
    box = lab.page.locator(".wb-TableBox")
    lab.until(lambda: 300 < place(box)["width"] < 380, "a narrow table")
    lab.until(lambda: place(table.locator("th").nth(1))["width"] < 0.6 * place(box)["width"], "a narrow first column")
    name = table.locator("tr[data-run]").first.locator("td").nth(1)
    before, last = place(name), table.locator("th").last
    box.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    lab.until(lambda: end(last) <= end(box) + 1, "the last column")
    assert place(name)["x"] == before["x"], "the name stays"
    for button in lab.page.locator(".wb-TablePane .wb-Bar :is(button, select, input)").all():
        assert end(button) <= end(box) + 1
    in_both_themes(lab, "run-table-narrow")
    assert lab.errors == []


def place(found: Locator) -> dict[str, float]:
    box = found.bounding_box()
    assert box is not None
    return {**box}


def end(found: Locator) -> float:
    """Its right edge."""
    box = place(found)
    return box["x"] + box["width"]


def test_a_run_of_the_panel_is_compared(store: Lab) -> None:
    """With one of the newest by its menu; with any others by the run table."""
    lab = store
    lab.open()
    execute(lab, "workbench:show-runs")
    menus, compared = lab.page.locator(".lm-Menu"), lab.page.locator(".wb-Run:visible path.wb-Chart-line")

    def compare_with(row: int, name: str) -> None:
        runs(lab).nth(row).get_by_role("button", name="More for").click()
        menus.get_by_text("Compare with").click()
        menus.last.get_by_text(name).click()

    other = str(runs(lab).nth(1).get_attribute("data-run"))
    compare_with(0, other)
    compared.first.wait_for()
    lab.page.locator(".lm-TabBar-tab", has_text="Compare 2 runs").wait_for()
    for row in range(2):
        compare_with(row, "Others, in the Run Table")
    lab.page.get_by_role("button", name="Compare 2", exact=True).click()
    compared.first.wait_for()
    assert lab.errors == []


def test_panes_say_what_is_under_the_pointer(store: Lab) -> None:
    """Curves their value and place; a timeline kind, rank, time, step, bucket, bytes and peer."""
    lab = store
    lab.open()
    (name,) = (path.name for path in lab.server.runs.glob("*layerwisesgd*"))
    execute(lab, "workbench:open", kind="run", name=name)
    pane = lab.page.locator(".wb-Run:visible")
    pane.locator(".wb-Chart > svg").first.hover()
    lab.until(lambda: re.search(r"training 0\.\d+ at \d steps", pane.inner_text()), "value and step")
    pane.get_by_role("button", name="seconds").click()
    pane.locator(".wb-Chart > svg").first.hover()
    lab.until(lambda: "seconds of training" in pane.locator(".wb-Chart-readout").first.inner_text(), "the other axis")
    curve = pane.locator("path.wb-Chart-line").first
    rough = curve.get_attribute("d")
    pane.get_by_label("smoothing").select_option("30 %")
    lab.until(lambda: curve.get_attribute("d") != rough, "a smoothed curve")
    lab.picture("run-pointed")
    execute(lab, "workbench:open", kind="timeline", name=name)
    canvas, tip = lab.page.locator(".wb-Timeline canvas"), lab.page.locator(".wb-Timeline-tip")
    lab.until(lambda: canvas.count() and place(canvas)["height"] > 100, "rows")
    corner = place(canvas)

    def told() -> str:
        """What is said of the places on a line through each row, up to a message."""
        for y in range(60, int(corner["height"]), 8):
            for x in range(130, int(corner["width"]), 15):
                lab.page.mouse.move(corner["x"] + x, corner["y"] + y)
                if tip.is_visible() and "peer" in (text := tip.inner_text()):
                    return text
        return ""

    words = lab.until(told, "a message under the pointer")
    assert re.fullmatch(
        r"(send|recv|receive) on rank \d, [\d.]+ .?s\nstep \d, bucket \d\n[\d.]+ k?B, peer rank \d", words
    )
    in_both_themes(lab, "timeline-pointed")
    assert lab.errors == []


def write_seeds(lab: Lab) -> None:
    """Two learning rates with repetitions; one run failed."""
    for number in range(NUM_SEEDS):
        group, seed = divmod(number, 5)
        name = f"20260401-0000{number:02d}-gossip-{group}{seed}"
        failed = (
            {"status": "failed", "error": "rank 1 failed at step 1: ValueError: a bad batch"} if number == 4 else {}
        )
        folder = write_run(
            lab.server.runs,
            name,
            created=f"2026-04-01T00:00:{number:02d}+00:00",
            losses=[2.0 / (1 + step + group + 0.1 * seed) for step in range(30)],
            settings={"steps": 30, "lr": 0.1 * (1 + group), "seed": seed},
            algorithm={"name": "GossipSGD", "settings": {}},
            **failed,
        )
        for path in folder.glob("metrics-*.jsonl"):  # the accuracy that `write_run` gives all of them
            path.write_text(path.read_text().replace('"correct": 45', f'"correct": {45 + seed}'))
