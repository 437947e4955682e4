"""An executed notebook, as a page, in a browser without a network: its figures are there, and no foreign script has run."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
pytest.importorskip("nbclient", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

import nbformat
from nbclient import NotebookClient

from tests.browser.chromium import BROWSER, needs_browser
from workbench import plots

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1100,4200",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
    "--virtual-time-budget=15000",
)

EVIL = "<b>b</b><script>document.title='harmed'</script><img src=x onerror=document.title='harmed'>"
RUNS = """
from workbench import plots
from workbench.trace import MemoryRecorder, Run

def a_run(name, num_steps=40, **more):
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    for recorder in recorders:
        for step in range(num_steps):
            begin = 0.01 * step
            recorder.span("forward", "compute", begin, begin + 0.002, step)
            recorder.span("backward", "compute", begin + 0.002, begin + 0.006, step)
            recorder.span("all_reduce", "comm", begin + 0.004, begin + 0.0085, step, 0, 4096)
            recorder.span("apply", "compute", begin + 0.0085, begin + 0.0095, step)
            common = {"step": step, "seconds": 0.01 * (step + 1), "samples": 64 * (step + 1), "bytes_sent": 4096 * (step + 1)}
            recorder.metrics({**common, "staleness": 0, "loss": 2 / (step + 1), "num_samples": 32, "lr": 0.1})
            if step % 10 == 9:
                recorder.metrics({**common, "evaluation": {"loss_sum": 5.0, "correct": step, "judged": 60, "count": 60}})
    info = {"id": name, "algorithm": {"name": name}, "problem": {"name": "digits-mlp"}, "status": "finished", **more}
    return Run.from_memory(info, recorders)

def a_ring(num_steps=10):
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        for step in range(num_steps):
            begin = 0.01 * step
            recorder.span("forward", "compute", begin, begin + 0.004 + 0.002 * rank, step)
            for kind in ("send", "recv"):
                recorder.span(kind, "comm", begin + 0.004 + 0.002 * rank, begin + 0.009, step, 0, 4096, 1 - rank)
            recorder.span("apply", "compute", begin + 0.009, begin + 0.01, step)
    return Run.from_memory({"id": "ring", "algorithm": {"name": "SynchronousSGD"}, "num_workers": 2}, recorders)

plots.use_notebook_renderer()
runs = [a_run("SynchronousSGD"), a_run(EVIL)]
"""
CELLS = (
    "live = plots.LiveCurves(x='steps')\nlive",
    "live.follow(lambda: runs).join(30)",
    "plots.curves(runs, 'bytes', 'accuracy')",
    "plots.timelines(runs, steps=slice(20, 25))",
    "plots.overlap_bars(runs)",
    "plots.timeline(a_ring(), steps=slice(2, 4), critical=True)",
    "plots.per_step(a_ring())",
    "plots.convergence([a_run('PipeSGD', status='failed', error='rank 1: ' + 'the loss is not a number, ' * 8)])",
    "plots.curves([a_run(f'{number} of some algorithms with a long name') for number in range(9)])",
)
NUM_FIGURES = 8  # the live view leaves one


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a notebook that was executed in a kernel."""
    needs_browser()
    folder = tmp_path_factory.mktemp("page")
    content = nbformat.v4.new_notebook(
        metadata={"title": "figures"},
        cells=[nbformat.v4.new_code_cell(text) for text in (f"EVIL = {EVIL!r}\n{RUNS}", *CELLS)],
    )
    NotebookClient(content, timeout=60, kernel_name="python3", store_widget_state=False).execute()
    kept = [[list(output.data) for output in cell.outputs] for cell in content.cells[1:3]]
    kept[0] = [[kind for kind in kinds if kind != "text/plain"] for kinds in kept[0]]
    assert kept == [[["text/html"], ["application/vnd.plotly.v1+json"]], []], (
        "header, and a figure in the widget's place"
    )
    nbformat.write(content, folder / "figures.ipynb")
    assert (folder / "figures.ipynb").stat().st_size < 200_000
    return plots.export_html(folder / "figures.ipynb", folder / "figures.html")


def browse(page: Path, tmp_path: Path, *actions: str) -> str:
    """What the browser prints, in a profile of its own."""
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *actions, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def document(page: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as the browser has drawn it."""
    return browse(page, tmp_path_factory.mktemp("document"), "--dump-dom")


def test_every_figure_is_drawn_offline(document: str) -> None:
    assert document.count('class="plot-container plotly"') == NUM_FIGURES
    assert len(re.findall(r'<svg class="main-svg"', document)) >= NUM_FIGURES
    figures = document.split('class="plot-container plotly"')[1:]
    lines = [len(re.findall(r'<path class="js-line"', figure)) for figure in figures]
    bars = [len(re.findall(r'<g class="point"', figure)) for figure in figures]
    assert lines[:2] == [4 + 2, 2 + 2], (
        "loss and accuracy of two runs as the live view left them; two curves; two lines in each legend"
    )
    assert bars[2] >= 2 * 2 * 5 * 4 and bars[3] == 2 * 4, (
        "four spans a step, on two ranks of two runs; four parts a run"
    )
    # two ranks send two messages: of an arrow Plotly draws the line and three marks, of which one has a size; and the
    # path of two steps
    assert lines[4] == 4 + 2 + 2, "arrows, pieces of the path, and one of each in the legend"
    assert bars[5] == 10 * (4 + 3), "four parts of ten steps, and three kinds on their paths"
    legends = re.findall(r'<text class="legendtext"[^>]*>(.*?)</text>', figures[4])
    assert {"message", "critical path"} <= set(legends)
    titles = re.findall(r'<text class="x2?title"[^>]* y="([\d.]+)"[^>]*>([^<]*)<', figures[2])
    height = float(re.findall(r'<svg class="main-svg"[^>]* height="([\d.]+)"', figures[2])[0])
    assert titles and all(float(y) + 6 < height for y, _ in titles), (
        "the axis' title is inside the figure, its descenders too"
    )
    text = re.sub(r"<[^>]+>", " ", document)
    for words in (
        "training loss",
        "test accuracy",
        "time (ms)",
        "rank 0",
        "step 20",
        "all-reduce",
        "bytes sent, all ranks together",
    ):
        assert words in text, words


def test_nothing_lies_over_anything(page: Path) -> None:
    """On a narrow page too: the text on failures does not cover the curves, and a legend hides no title."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'sgd-workbench[dev]'")
    kinds = {
        "legend": ".legend",
        "title": ".gtitle",
        "below": "[class$=title]:not(.gtitle)",
        "plot": ".nsewdrag",
        "failed": ".annotation",
    }
    read = """kinds => Array.from(document.querySelectorAll('.js-plotly-plot')).map(plot => Object.fromEntries(Object.entries(kinds).map(
        ([kind, path]) => [kind, Array.from(plot.querySelectorAll(path)).map(one => one.getBoundingClientRect()).filter(one => one.width)
            .map(one => [one.left, one.top, one.right, one.bottom])])))"""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": 900, "height": 1200})
        shown.goto(page.as_uri())
        shown.wait_for_function(
            f"() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= {NUM_FIGURES}", timeout=60_000
        )
        figures = shown.evaluate(read, kinds)
        browser.close()
    assert len(figures) == NUM_FIGURES
    for number, found in enumerate(figures):
        failed = found["failed"] if number == 6 else []  # of timelines, annotations are names within the plot
        assert (number == 6) == bool(failed) and (number != 6 or len(found["plot"]) == 2)
        pairs = [(one, other) for one in found["legend"] for kind in ("title", "below") for other in found[kind]]
        pairs += [(one, other) for one in failed for kind in ("plot", "title", "legend") for other in found[kind]]
        for one, other in pairs:
            apart = one[2] <= other[0] + 1 or other[2] <= one[0] + 1 or one[3] <= other[1] + 1 or other[3] <= one[1] + 1
            assert apart, f"in figure {number}, {one} and {other} lie over each other"


def test_names_are_shown_as_they_are_and_run_no_script(document: str) -> None:
    assert "<title>figures</title>" in document
    legends = [html.unescape(text) for text in re.findall(r'<text class="legendtext"[^>]*>(.*?)</text>', document)]
    assert legends.count(EVIL) == 2, legends  # of the live view's figure and of the curves


def test_the_page_can_be_looked_at(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "figures.png"
    browse(page, tmp_path, f"--screenshot={picture}")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 50_000, (
        "an empty page is some 10 kB"
    )
