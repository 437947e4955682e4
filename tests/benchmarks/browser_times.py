"""How long a user of JupyterLab waits: live views, buttons, the run table with 1,000 runs, a timeline of 100,000 spans.

    python -m tests.benchmarks.browser_times              # six minutes of a quiet machine with Chromium
    python -m tests.benchmarks.browser_times --write      # writes records/browser.json

A real JupyterLab in a headless Chromium, without a GPU. The page measures with its own clock, from a click or a key to the
frame in which the page shows the effect.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import workbench as wb
from tests.browser.lab import Lab, browsing
from tests.browser.panel import begin_training, execute, runs, status
from tests.unit.lab_server import write_run
from workbench.analysis.table import Column, Table
from workbench.bench.spans import write_trace

RECORD = Path(__file__).parents[2] / "records" / "browser.json"
NUM_RUNS, NUM_RANKS, NUM_STEPS = 1000, 64, 98  # 98 steps of 64 ranks are 100,000 spans and more
WATCH_S = 15.0
VIEW = 2  # place of a cell
CELLS = (
    """
import time
from dataclasses import replace
import torch
import workbench as wb
def slow(output, target):
    time.sleep(0.04)  # the cores have time for the views: on busy ones they draw rarely, by design
    return torch.nn.functional.cross_entropy(output, target)
problem = replace(wb.problems.digits_mlp(), loss=slow)
cluster = wb.Cluster(2)
""".strip(),
    "run = cluster.train(wb.PipeSGD(), problem, steps=1_000_000, evaluate_every=100);",
    "run",
)
# `shown(judge)`: seconds from now to the frame in which `judge` is true
CLOCK = """() => { window.shown = (act, judge) => new Promise((done, fail) => {
    const begin = performance.now();
    act();
    const look = () => {
        const found = judge();
        const now = performance.now();
        if (found) done((now - begin) / 1000);
        else if (now - begin > 60000) fail(new Error("not shown within a minute"));
        else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
}); }"""

Times = dict[str, list[float]]


def note(times: Times, name: str, value: float) -> None:
    times.setdefault(name, []).append(value)
    print(f"{name}: {value:.3f}", flush=True)


def live_view(lab: Lab, times: Times, repeats: int) -> None:
    """First paint, five times a second, jumps, and buttons of the view of a run that trains."""
    lab.page.evaluate(CLOCK)
    paint(lab, times, first=True)
    lab.scroll(VIEW)
    watch(lab, times)
    for _ in range(repeats - 1):
        paint(lab, times, first=False)
    lab.scroll(VIEW)
    for _ in range(repeats):
        for button, state in (("Pause", "paused"), ("Resume", "running")):
            lab.page.wait_for_timeout(1000)
            told, done = lab.page.evaluate(
                """async ([number, button, state]) => {
                    const cell = document.querySelectorAll(".jp-Notebook .jp-CodeCell")[number];
                    const text = () => cell.querySelector(".workbench-header").innerText;
                    const before = text().split(/\\s/)[0];
                    const found = [...cell.querySelectorAll("button")].find(one => one.innerText.includes(button));
                    const act = () => found.click();
                    const told = shown(act, () => !text().startsWith(before) || !found.innerText.includes(button) || found.disabled);
                    const done = shown(() => {}, () => text().includes(state));
                    return await Promise.all([told, done]);
                }""",
                [VIEW, button, state],
            )
            note(times, "live view: a button answers", told)
            note(times, f"live view: {button.lower()} has taken effect", done)


def paint(lab: Lab, times: Times, *, first: bool) -> None:
    """Run the cell that shows the view."""
    header, curves = lab.page.evaluate(
        """async number => {
            const cell = document.querySelectorAll(".jp-Notebook .jp-CodeCell")[number];
            cell.querySelectorAll("*").forEach(one => { one.dataset.old = "yes"; });
            const fresh = selector => [...cell.querySelectorAll(selector)].find(one => !one.dataset.old);
            const notebook = window.jupyterapp.shell.currentWidget.content;
            notebook.activeCellIndex = number; notebook.deselectAll();
            const act = () => window.jupyterapp.commands.execute("notebook:run-cell");
            const header = shown(act, () => fresh(".workbench-header")?.innerText.includes("step"));
            const curves = shown(() => {}, () => fresh(".scatterlayer .js-line")?.getAttribute("d"));
            return await Promise.all([header, curves]);
        }""",
        VIEW,
    )
    note(times, "live view: header" + (", first of the page" if first else ""), header)
    note(times, "live view: curves" + (", first of the page" if first else ""), curves)
    lab.page.wait_for_timeout(1000)


def watch(lab: Lab, times: Times) -> None:
    """How often the curves move, and whether the view does."""
    watched = lab.page.evaluate(
        """async ([number, seconds]) => {
            const cell = document.querySelectorAll(".jp-Notebook .jp-CodeCell")[number];
            const plot = cell.querySelector(".js-plotly-plot");
            let updates = 0, last = null, jump = 0, place = null;
            const begin = performance.now();
            while (performance.now() - begin < 1000 * seconds) {
                await new Promise(requestAnimationFrame);
                const lines = [...cell.querySelectorAll(".scatterlayer .js-line")].map(one => one.getAttribute("d")).join();
                updates += last !== null && lines !== last; last = lines;
                const box = plot.getBoundingClientRect(), output = cell.getBoundingClientRect();
                const now = [box.top, box.height, output.top, output.height];
                if (place) jump = Math.max(jump, ...now.map((one, at) => Math.abs(one - place[at])));
                place = now;
            }
            return [seconds / Math.max(1, updates), jump];
        }""",
        [VIEW, WATCH_S],
    )
    note(times, "live view: between two updates of the curves", watched[0])
    note(times, "live view: largest jump of its place or height (pixels)", watched[1])


def panel(lab: Lab, times: Times, repeats: int) -> None:
    """Buttons of the side bar."""
    for _ in range(repeats):
        for button, state in (("Pause", "paused"), ("Resume", "running")):
            lab.page.wait_for_timeout(1000)
            told, done = lab.page.evaluate(
                """async ([button, state]) => {
                    const row = () => document.querySelector("#workbench-panel [data-run]");
                    const said = () => row().querySelector(".wb-State").innerText;
                    const before = said();
                    const found = [...row().querySelectorAll("button")].find(
                        one => (one.title + one.ariaLabel).includes(button));
                    const told = shown(() => found.click(), () => said() !== before);
                    const done = shown(() => {}, () => row().dataset.status === state);
                    return await Promise.all([told, done]);
                }""",
                [button, state],
            )
            note(times, "panel: a button answers", told)
            note(times, f"panel: {button.lower()} has taken effect", done)
    runs(lab).first.get_by_role("button", name="Stop, with a checkpoint").click()
    lab.until(lambda: status(lab) == "stopped", "the end")


def run_table(lab: Lab, times: Times, repeats: int) -> None:
    """Opened, sorted, filtered and scrolled, with many runs."""
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    for number in range(NUM_RUNS):
        write_run(
            lab.server.runs,
            f"made-{number:04d}",
            created=(begin + timedelta(minutes=number)).isoformat(),
            losses=(2.0, 1.0 / (1 + number * 37 % NUM_RUNS)),  # not in the order of time
            settings={"steps": 2, "lr": 0.01 * (1 + number % 7), "seed": number},
            algorithm={"name": "LocalSGD" if number % 2 else "PipeSGD", "settings": {"width": number % 5}},
        )
    for repeat in range(repeats):
        lab.open()
        execute(lab, "application:toggle-left-area")
        lab.page.evaluate(CLOCK)
        lab.page.wait_for_timeout(2000)
        opened = lab.page.evaluate(
            """least => {
                const count = () => {
                    const pane = document.querySelector(".wb-Table")?.closest(".lm-Widget");
                    return Number(pane?.innerText.match(/([\\d,]+) runs/)?.[1].replace(",", ""));
                };
                return shown(
                    () => window.jupyterapp.commands.execute("workbench:run-table"),
                    () => document.querySelector(".wb-Table tr[data-run]") && count() >= least);
            }""",
            NUM_RUNS,
        )
        note(times, "run table: opened" + (", first since the server started" if not repeat else ""), opened)
        found = lab.page.evaluate(
            """async () => {
                const table = document.querySelector(".wb-Table");
                const name = "training loss";
                const button = () => [...table.querySelectorAll("th button")].find(one => one.innerText.startsWith(name));
                const sorts = [];
                for (let round = 0; round < 2; round++) {
                    const before = button().innerText;  // an arrow shows the order; rows and arrow are drawn together
                    sorts.push(await shown(() => button().click(), () => button().innerText !== before));
                }
                const box = document.querySelector(".wb-TableBox");
                const frames = [];
                let last = performance.now();
                for (let frame = 0; frame < 60; frame++) {
                    box.scrollTop += 400;
                    await new Promise(requestAnimationFrame);
                    const now = performance.now();
                    frames.push((now - last) / 1000); last = now;
                }
                box.scrollTop = 0;
                const input = document.querySelector('[aria-label="Filter the runs"]');
                const set = text => {
                    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(input, text);
                    input.dispatchEvent(new Event("input", { bubbles: true }));
                };
                const rows = () => document.querySelector(".wb-Table").closest(".lm-Widget").innerText;
                const filter = await shown(() => set("localsgd width=3"), () => / of [\\d,]+ runs/.test(rows()));
                set("");
                return { sorts, frames, filter };
            }"""
        )
        for value in found["sorts"]:
            note(times, "run table: sorted", value)
        note(times, "run table: filtered", found["filter"])
        note(times, "run table: median frame while it scrolls", statistics.median(found["frames"][1:]))
        note(times, "run table: longest frame while it scrolls", max(found["frames"][1:]))


def timeline(lab: Lab, times: Times, repeats: int, folder: Path) -> int:
    """A page with a timeline: its first paint, and frames in which the window moves. Returns the number of its spans."""
    run = wb.Run.load(write_trace(folder / "trace", num_ranks=NUM_RANKS, num_steps=NUM_STEPS))
    path = wb.plots.TraceViewer(run, max_spans=110_000).save(folder / "timeline.html")
    for _ in range(repeats):
        page = lab.page.context.new_page()
        page.goto(path.as_uri())
        page.wait_for_function("() => document.querySelector('.wb-Timeline')?.dataset.firstPaintMs")
        painted = page.evaluate("() => document.querySelector('.wb-Timeline').dataset.firstPaintMs")
        note(times, "timeline: first paint, without the load of the file", float(painted) / 1000)
        loaded = page.evaluate("() => performance.now() / 1000")
        note(times, "timeline: page opened", loaded)
        page.evaluate(CLOCK)
        for key, name in (("f", "all steps shown"), ("w", "zoomed"), ("d", "moved"), ("u", "ranks unfolded")):
            value = page.evaluate(
                """async key => {
                    const place = document.querySelector(".wb-Timeline");
                    place.focus();
                    return await shown(
                        () => place.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })), () => true);
                }""",
                key,
            )
            note(times, f"timeline: {name}", value)
        page.close()
    return len(run.spans)


def summarize(times: Times) -> list[dict[str, Any]]:
    """One row for each name: the median, and the extremes of its repeats."""
    return [
        {
            "what": name,
            "median": round(statistics.median(values), 4),
            "lowest": round(min(values), 4),
            "highest": round(max(values), 4),
            "repeats": len(values),
        }
        for name, values in times.items()
    ]


def main() -> None:
    """Measure, print a table, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="of each measurement (default: 7)")
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    times: Times = {}
    with tempfile.TemporaryDirectory() as name, browsing(Path(name) / "lab") as lab:
        begin_training(lab, "times.ipynb", CELLS)
        live_view(lab, times, options.repeats)
        panel(lab, times, options.repeats)
        run_table(lab, times, options.repeats)
        num_spans = timeline(lab, times, options.repeats, Path(name))
        browser = lab.page.context.browser
        assert browser is not None
        versions = {"workbench": wb.__version__, "jupyterlab": version("jupyterlab"), "chromium": browser.version}
        assert lab.errors == []
    rows = summarize(times)
    columns = (
        Column("what", "seconds"),
        *(Column(name, name, "{:.3f}".format) for name in ("median", "lowest", "highest")),
        Column("repeats", "repeats"),
    )
    print(Table(rows, columns, caption="How long a user of JupyterLab waits"))
    if options.write:
        how: dict[str, Any] = {
            "cores": os.cpu_count(),
            "load_before": round(load, 2),
            "runs": NUM_RUNS,
            "spans": num_spans,
        }
        how |= {"unit": "seconds, if a row does not name another unit"}
        RECORD.write_text(json.dumps({"how": how, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
