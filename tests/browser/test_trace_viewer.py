"""The interactive timeline in a browser without a network: what is drawn, what keys and clicks do, and Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
pytest.importorskip("playwright", reason="needs Playwright: pip install 'sgd-workbench[dev]'")

from playwright.sync_api import sync_playwright

from tests.browser.chromium import BROWSER, share_of_ground
from tests.unit.test_plots import ring_run
from tests.unit.test_trace_viewer import EVIL, uneven_run
from workbench import plots
from workbench.bench.spans import write_trace
from workbench.plots.trace_viewer.payload import payload
from workbench.trace import Run
from workbench.trace.chrome import chrome_events

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

WAIT_MS = 60_000
STATE = """() => {
    const { view, runs, links, critical, follows, hidden, items, labels, selected, extent } = document.getElementById("timeline").timeline;
    return { begin: view.begin, end: view.end, links, critical, follows, hidden: [...hidden], labels, selected: selected?.related ?? [],
             extent, rows: items.filter(one => one.type === "row").length, ranks: items.filter(one => one.type === "rank").length,
             steps: runs[0].steps, status: document.querySelector(".wb-Timeline-status").innerText };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chrome or Chromium on the PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


class Shown:
    """A page with a viewer."""

    def __init__(self, browser: Any, path: Path, width: int = 1200, height: int = 760, scheme: str = "light") -> None:
        self.errors = list[str]()
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("() => document.querySelector('.wb-Timeline')?.dataset.firstPaintMs")
        self.page.focus(".wb-Timeline")

    def state(self) -> dict[str, Any]:
        """What is shown, after the next frame."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: dict[str, Any] = self.page.evaluate(STATE)
        return found

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "still not"

    def press(self, *keys: str) -> dict[str, Any]:
        for key in keys:
            self.page.keyboard.press(key)
        return self.state()

    def click(self, rank: int, step: int, kind: str) -> dict[str, Any]:
        """Click on the middle of a span."""
        place = self.page.evaluate(
            """([rank, step, kind]) => {
                const viewer = document.getElementById("timeline").timeline;
                const [run] = viewer.runs;
                const { columns } = run;
                const code = viewer.content.kinds.indexOf(kind);
                const span = columns.step.findIndex(
                    (one, at) => one === step && run.rankOf(at) === rank && columns.kind[at] === code);
                const box = viewer.canvas.getBoundingClientRect();
                const x = viewer.xOf((columns.start[span] + columns.end[span]) / 2 - run.shift);
                return { x: box.left + x, y: box.top + 24 + run.center[columns.row[span]] - viewer.scroller.scrollTop };
            }""",
            [rank, step, kind],
        )
        self.page.mouse.click(place["x"], place["y"])
        return self.state()

    def close(self) -> None:
        self.page.context.close()
        assert self.errors == []


def page_of(tmp_path: Path, *runs: Run, **options: Any) -> Path:
    return plots.TraceViewer(list(runs), **options).save(tmp_path / "page.html")


def many(tmp_path: Path, num_ranks: int, num_steps: int = 12) -> Run:
    return Run.load(write_trace(tmp_path, num_ranks=num_ranks, num_steps=num_steps))


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("num_ranks", "width"), [(2, 1200), (16, 1200), (64, 700)])
def test_no_label_lies_over_another(browser: Any, tmp_path: Path, num_ranks: int, width: int) -> None:
    shown = Shown(browser, page_of(tmp_path, many(tmp_path, num_ranks)), width)
    for keys in ((), ("u",), ("f",), ("w", "w", "w", "w", "w"), ("c",)):
        labels = shown.press(*keys)["labels"]
        assert len(labels) > 8
        for place, one in enumerate(labels):
            for other in labels[:place]:
                apart = (
                    one["right"] <= other["left"] + 0.5
                    or other["right"] <= one["left"] + 0.5
                    or one["bottom"] <= other["top"] + 0.5
                    or other["bottom"] <= one["top"] + 0.5
                )
                assert apart, (keys, one, other)
    shown.close()


def test_many_ranks_begin_folded_and_unfold_by_a_click_and_by_a_key(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, many(tmp_path, 16)))
    first = shown.state()
    assert (first["ranks"], first["rows"]) == (16, 0)
    box = shown.page.locator("canvas").bounding_box()
    shown.page.mouse.click(box["x"] + 30, box["y"] + 24 + 38 + 5)
    clicked = shown.state()
    assert clicked["ranks"] == 15 and clicked["rows"] >= 2
    shown.page.focus(".wb-Timeline")
    assert shown.press("ArrowDown", "Enter")["ranks"] == 16, "the first rank again"
    assert shown.press("ArrowDown", "ArrowDown", "Enter")["ranks"] == 15
    assert shown.press("u")["ranks"] == 0
    assert shown.press("u")["ranks"] == 16
    critical = shown.press("r")
    assert critical["critical"] and critical["rows"] > 0 and 8 < critical["ranks"] < 16, "few ranks carry the path"
    shown.close()
    few = Shown(browser, page_of(tmp_path, many(tmp_path, 8)))
    assert few.state()["ranks"] == 0, "up to eight ranks begin unfolded"
    few.close()


def test_a_kind_is_hidden_by_a_click(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, ring_run()))
    shown.page.get_by_role("button", name="forward").click()
    assert shown.state()["hidden"] == [0]
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_viewer_that_is_built_outside_the_page_has_its_colours(browser: Any, tmp_path: Path, scheme: str) -> None:
    """As a notebook does: it shows the place of an output after the output is made."""
    shown = Shown(browser, page_of(tmp_path, ring_run()), scheme=scheme)
    shown.page.evaluate(
        """async () => {
            const shown = document.getElementById("timeline");
            const place = shown.cloneNode();
            place.timeline = new shown.timeline.constructor(place, {});
            await place.timeline.show(shown.timeline.content);
            shown.replaceWith(place);
        }"""
    )
    assert shown.state()["labels"], "it is drawn"
    assert 0.2 < share_of_ground(shown.page.locator("canvas")) < 0.95
    shown.close()


# ---------------------------------------------------------------- the window


def test_keys_zoom_and_move_the_window(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, ring_run(num_steps=40)))
    first = shown.state()
    length = first["end"] - first["begin"]
    assert length == pytest.approx(0.05), "five steps"
    for key, other in (("w", "s"), ("+", "-"), ("=", "-")):
        near = shown.press(key)
        assert near["end"] - near["begin"] == pytest.approx(0.7 * length) and near["begin"] > first["begin"]
        assert shown.press(other)["end"] == pytest.approx(first["end"])
    for key, other in (("d", "a"), ("ArrowRight", "ArrowLeft")):
        assert shown.press(key)["begin"] == pytest.approx(first["begin"] + 0.15 * length)
        assert shown.press(other)["begin"] == pytest.approx(first["begin"])
    whole = shown.press("f")
    assert (whole["begin"], whole["end"]) == pytest.approx((0.0, 0.4))
    assert shown.press("s", "a")["begin"] == 0.0, "and no farther"
    assert shown.press("0")["end"] == pytest.approx(first["end"])
    shown.page.mouse.move(600, 200)
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -120)
    shown.page.keyboard.up("Control")
    shown.page.wait_for_function(
        "end => document.getElementById('timeline').timeline.view.end < end - 1e-6", arg=first["end"]
    )
    shown.press("0")
    box = shown.page.locator("canvas").bounding_box()
    for y, change in ((12, "zoom"), (90, "move")):
        shown.press("0")
        shown.page.mouse.move(box["x"] + 500, box["y"] + y)
        shown.page.mouse.down()
        shown.page.mouse.move(box["x"] + 700, box["y"] + y, steps=4)
        shown.page.mouse.up()
        found = shown.state()
        share = 200 / (1200 - 148)
        if change == "zoom":
            assert found["end"] - found["begin"] == pytest.approx(share * length, rel=0.02)
        else:
            assert first["begin"] - found["begin"] == pytest.approx(share * length, rel=0.02)
    shown.close()


def test_a_question_mark_shows_the_keys(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, ring_run()))
    keys = shown.page.get_by_role("dialog", name="Keys")
    assert not keys.is_visible()
    shown.press("?")
    assert keys.is_visible() and "zoom in" in keys.inner_text()
    shown.press("Escape")
    assert not keys.is_visible()
    shown.close()


def test_an_outlier_is_outside_the_window_and_can_be_reached(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, uneven_run([0.01] * 4 + [0.3] + [0.01] * 5)))
    first = shown.state()
    assert first["end"] - first["begin"] == pytest.approx(0.05)
    assert "step 4 takes 30 times the median and is outside the window at first: f shows all steps" in first["status"]
    whole = shown.press("f")
    assert whole["end"] - whole["begin"] == pytest.approx(0.390001)
    shown.close()


# ---------------------------------------------------------------- links and paths


def test_a_click_shows_a_message_or_a_collective_and_what_it_waited_for(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, ring_run()))
    assert shown.state()["links"], "there are few messages"
    assert not shown.press("l")["links"]
    found = shown.click(1, 3, "send")
    assert len(found["selected"]) == 2
    assert (
        "message from rank 1 to rank 0: 2 ms from the call to the arrival; the receiver had waited for 1 ms"
        in found["status"]
    )
    assert shown.press("Escape")["selected"] == []
    shown.close()
    run = uneven_run([0.01] * 6, num_ranks=3)
    shown = Shown(browser, page_of(tmp_path, run))
    found = shown.click(2, 3, "all_reduce")
    assert len(found["selected"]) == 3 and "on 3 ranks" in found["status"]
    shown.close()


def test_many_messages_are_off_at_first(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, many(tmp_path, 32, 30)))
    assert not shown.state()["links"]
    shown.press("f")
    assert "messages in view: zoom in to see them" in shown.press("l")["status"]
    shown.press("0")
    shown.close()


def test_the_critical_path_is_switched_on_and_off(browser: Any, tmp_path: Path) -> None:
    def dark_pixels() -> int:
        shown.state()
        found: int = shown.page.evaluate(
            """() => {
                const canvas = document.querySelector("canvas");
                const { data } = canvas.getContext("2d").getImageData(150, 66, canvas.width - 150, canvas.height - 66);
                let count = 0;
                for (let at = 0; at < data.length; at += 4) count += data[at] === 0x24 && data[at + 1] === 0x29 && data[at + 2] === 0x2f;
                return count;
            }"""
        )
        return found

    shown = Shown(browser, page_of(tmp_path, ring_run(), critical=True))
    shown.press("l")  # arrows have the same colour
    before = dark_pixels()
    assert "critical path in view: forward 50 %" in shown.press("c")["status"]
    assert dark_pixels() > before + 500
    shown.press("c")
    assert dark_pixels() == before
    shown.close()


# ---------------------------------------------------------------- two runs


def test_two_runs_are_aligned_at_a_step_with_a_table_of_differences(browser: Any, tmp_path: Path) -> None:
    slow, fast = uneven_run([0.02] * 20, EVIL), uneven_run([0.01] * 30, "fast")
    shown = Shown(browser, page_of(tmp_path, slow, fast, steps=slice(5, 20)))
    shown.page.get_by_label("Align the runs at step").fill("12")
    shown.page.keyboard.press("Enter")
    shown.page.focus(".wb-Timeline")
    shown.state()
    places = shown.page.evaluate(
        "() => document.getElementById('timeline').timeline.runs.map(run => run.beginOf(12) - run.shift)"
    )
    assert places == [0, 0]
    rows = shown.page.locator(".wb-Timeline-table tbody tr").all_inner_texts()
    assert rows[0].split("\t")[:4] == ["step", "20.0 ms", "10.0 ms", "\N{MINUS SIGN}10.0 ms"]
    assert shown.page.locator(".wb-Timeline-table th").nth(1).inner_text() == EVIL, "as text"
    assert shown.page.title() != "harmed"
    shown.close()


# ---------------------------------------------------------------- while it trains


def test_the_window_follows_until_it_is_moved_and_then_stays(browser: Any, tmp_path: Path) -> None:
    def send(first: int, last: int, *, live: bool = True) -> dict[str, Any]:
        content = payload([ring_run(num_steps=60)], slice(first, last), newest=live).content
        shown.page.evaluate("content => document.getElementById('timeline').timeline.show(content)", content)
        return shown.state()

    shown = Shown(browser, page_of(tmp_path, ring_run()))
    found = send(0, 20)
    assert (found["begin"], found["end"]) == pytest.approx((0.15, 0.2)), "the newest five steps"
    assert send(10, 30)["steps"][-1] == 29
    moved = shown.press("w")
    assert not moved["follows"]
    after = send(20, 40)
    assert (after["begin"], after["steps"]) == (moved["begin"], moved["steps"]), "stays where the reader put it"
    assert shown.page.get_by_role("button", name="Follow (newest step 39)").is_visible()
    shown.press("n")
    shown.until(lambda: shown.state()["steps"][-1] == 39)
    assert send(30, 50)["steps"][-1] == 49, "follows again"
    shown.press("w")
    assert send(40, 60, live=False)["steps"][-1] == 49
    shown.close()


# ---------------------------------------------------------------- Perfetto

# It answers PING as ui.perfetto.dev does, and shows what it was given.
PERFETTO = """<script>
addEventListener("message", event => {
    if (event.data === "PING") event.source.postMessage("PONG", "*");
    else if (event.data.perfetto) {
        globalThis.given = { title: event.data.perfetto.title, trace: JSON.parse(new TextDecoder().decode(event.data.perfetto.buffer)) };
    }
});
</script>"""


@pytest.mark.parametrize("make", [ring_run, lambda: uneven_run([0.01] * 6)])
def test_one_click_gives_perfetto_the_trace_that_export_chrome_writes(
    browser: Any, tmp_path: Path, make: Callable[[], Run]
) -> None:
    run = make()
    shown = Shown(browser, page_of(tmp_path, run))
    context = shown.page.context
    context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html"))
    with context.expect_page() as opened:
        shown.page.get_by_role("button", name="Open in Perfetto").click()
    opened.value.wait_for_function("() => globalThis.given")
    given = opened.value.evaluate("() => globalThis.given")
    assert given["title"] == "SynchronousSGD"

    def comparable(events: Any) -> list[str]:
        """Without the numbers of threads and arrows, which are free."""
        times = ("ts", "dur")
        kept = [
            {key: float(value) if key in times else value for key, value in event.items() if key not in ("tid", "id")}
            for event in events
        ]
        return sorted(json.dumps(event, sort_keys=True) for event in kept if not event["name"].startswith("thread"))

    found, expected = comparable(given["trace"]["traceEvents"]), comparable(chrome_events(run.spans, {}))
    assert [one for one in found if "process" not in one] == [one for one in expected if "process" not in one]
    shown.close()


def test_without_a_network_the_trace_is_saved(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, page_of(tmp_path, ring_run()))
    shown.page.evaluate("() => { window.open = () => null; }")  # as where pop-ups are blocked
    with shown.page.expect_download() as download:
        shown.page.get_by_role("button", name="Open in Perfetto").click()
    trace = json.loads(Path(download.value.path()).read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(ring_run().spans)
    assert "open https://ui.perfetto.dev and choose" in shown.state()["status"]
    with shown.page.expect_download() as download:
        shown.page.get_by_role("button", name="Save PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    shown.close()


def test_a_hundred_thousand_spans_are_drawn_and_moved(browser: Any, tmp_path: Path) -> None:
    run = many(tmp_path, 64, 98)
    assert len(run.spans) > 100_000
    path = plots.TraceViewer(run, max_spans=110_000).save(tmp_path / "page.html")
    shown = Shown(browser, path)
    assert shown.page.evaluate("() => Number(document.querySelector('.wb-Timeline').dataset.spans)") == len(run.spans)
    whole = shown.press("f")
    assert whole["end"] - whole["begin"] == pytest.approx(whole["extent"]["end"] - whole["extent"]["begin"])
    assert shown.press("w", "d", "u")["rows"] > 3 * 64
    shown.close()
