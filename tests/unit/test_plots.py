"""Figures: what is drawn is what was recorded, nothing is hidden, names are harmless, sizes stay small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
pytest.importorskip("ipywidgets", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

import nbformat
import plotly.io as pio

from workbench import plots
from workbench.analysis.labels import distinct_labels
from workbench.errors import ConfigError
from workbench.plots.html import PLOTLY, WIDGET, draw_figures
from workbench.plots.layout import join_bars, lay_rows, panel
from workbench.plots.lines import decimate, moving_average
from workbench.plots.live import status_table
from workbench.plots.style import KIND_COLORS
from workbench.trace import KINDS, MemoryRecorder, Run, Spans

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def make_run(name: str = "PipeSGD", *, num_steps: int = 60, num_ranks: int = 2, buckets: int = 3, shift: float = 0.0, **info: Any) -> Run:
    """A step takes 10 ms: forward 2, backward 4, apply 1; buckets are sent one after the other and overlap by a third."""
    recorders = []
    for rank in range(num_ranks):
        recorder = MemoryRecorder(rank)
        recorders.append(recorder)
        for step in range(num_steps):
            begin = 0.01 * step + 0.0002 * rank
            recorder.span("forward", "compute", begin, begin + 0.002, step)
            recorder.span("backward", "compute", begin + 0.002, begin + 0.006, step)
            for bucket in range(buckets):
                recorder.span("send", "comm", begin + 0.003 + 0.001 * bucket, begin + 0.0045 + 0.001 * bucket, step, bucket, 4096, 1 - rank)
            recorder.span("apply", "compute", begin + 0.008, begin + 0.009, step)
            common = {"step": step, "seconds": 0.01 * (step + 1), "samples": 64 * (step + 1), "bytes_sent": 12288 * (step + 1)}
            recorder.metrics({**common, "staleness": 1, "loss": shift + 2.0 / (step + 1), "num_samples": 32, "lr": 0.1})
            if step % 10 == 9:
                numbers = {"loss_sum": 5.0, "correct": step, "judged": 60, "count": 60}
                recorder.metrics({**common, "evaluation": numbers})
    usual = {"id": f"run-{name}", "method": {"name": name, "settings": {}}, "problem": {"name": "digits-mlp"}, "status": "finished"}
    return Run.from_memory({**usual, "num_workers": num_ranks, **info}, recorders)


def empty_run(**info: Any) -> Run:
    return Run.from_memory({"id": "run-empty", "method": {"name": "PipeSGD"}, **info}, [MemoryRecorder(0)])


# ---------------------------------------------------------------- curves


def test_a_curve_shows_the_recorded_losses_and_has_units() -> None:
    run = make_run()
    figure = plots.curves([run], "seconds", "loss", smooth=0)
    assert len(figure.data) == 1
    xs, ys = run.curve("seconds", "loss")
    assert figure.data[0].x.tolist() == xs.tolist() and figure.data[0].y.tolist() == ys.tolist()
    assert figure.layout.xaxis.title.text == "training time (s)" and figure.layout.yaxis.title.text == "training loss"
    assert figure.layout.title.text == "Training loss: digits-mlp"
    virtual = plots.curves([make_run(clock="virtual")], "seconds")
    assert virtual.layout.xaxis.title.text == "virtual training time (s)"
    sent = plots.curves([run], "bytes", "accuracy")
    assert sent.layout.xaxis.ticksuffix == "B" and sent.layout.yaxis.tickformat == ".0%"


def test_runs_that_differ_by_seed_become_a_mean_and_a_band() -> None:
    runs = [make_run(shift=shift, settings={"seed": seed}) for seed, shift in enumerate((0.0, 0.5, 1.0))]
    figure = plots.curves([*runs, make_run("SynchronousSGD")], "steps", "loss", smooth=0)
    band, mean, other = figure.data
    assert mean.name == "PipeSGD (mean of 3)" and other.name == "SynchronousSGD"
    np.testing.assert_allclose(mean.y, runs[1].curve("steps", "loss")[1])
    np.testing.assert_allclose(band.y[:60], runs[2].curve("steps", "loss")[1])
    np.testing.assert_allclose(band.y[60:][::-1], runs[0].curve("steps", "loss")[1])
    assert band.fill == "toself" and not band.showlegend


def test_curves_of_different_lengths_are_averaged_where_all_have_been() -> None:
    runs = [make_run(num_steps=20, id="a"), make_run(num_steps=60, id="b")]
    for order in (runs, runs[::-1]):
        assert plots.curves(order, "steps", "loss", smooth=0).data[1].x.tolist() == list(range(20))


def test_a_loss_that_overflowed_ends_its_curve_and_harms_no_other_point() -> None:
    run = make_run(num_steps=400)
    run.metrics[0][-2]["loss"] = float("nan")
    raw, line = plots.curves([run], "steps", "loss").data
    assert np.isfinite(raw.y).all() and np.isfinite(line.y).all() and len(line.y) > 350


@settings(deadline=None)
@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), most=st.integers(4, 60))
def test_decimation_keeps_ends_and_extremes(ys: list[float], most: int) -> None:
    xs, values = np.arange(len(ys), dtype=float), np.array(ys)
    kept_x, kept_y = decimate(xs, values, most)
    assert len(kept_x) <= max(most, 4) and np.all(np.diff(kept_x) > 0)
    assert np.array_equal(kept_y, values[kept_x.astype(int)])
    assert kept_x[0] == 0 and kept_x[-1] == len(ys) - 1
    assert kept_y.min() == values.min() and kept_y.max() == values.max()


@given(ys=st.lists(st.floats(-100, 100), max_size=40), window=st.integers(1, 9))
def test_the_moving_average_equals_its_definition(ys: list[float], window: int) -> None:
    half = window // 2
    expected = []
    for index in range(len(ys)):
        reach = min(half, index, len(ys) - 1 - index)
        expected.append(float(np.mean(ys[index - reach : index + reach + 1])))
    np.testing.assert_allclose(moving_average(np.array(ys), window), expected, atol=1e-9)


def test_convergence_shows_accuracy_or_else_test_loss() -> None:
    assert plots.convergence([make_run()]).layout.yaxis2.title.text == "test accuracy"
    run = make_run()
    for rows in run.metrics.values():
        for row in rows:
            if "evaluation" in row:
                row["evaluation"] |= {"correct": None, "judged": None}
    figure = plots.convergence([run])
    assert figure.layout.yaxis2.title.text == "test loss"
    assert [trace.name for trace in figure.data if trace.showlegend] == ["PipeSGD"]
    assert len(plots.convergence([]).data) == 0 and len(plots.convergence([empty_run()]).data) == 2


def test_labels_say_what_tells_runs_apart() -> None:
    base = {"method": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Ring()"}}, "runtime": "mpi", "num_workers": 4}
    runs = [
        Run(info=base, metrics={}),
        Run(info={**base, "runtime": "simulated"}, metrics={}),
        Run(
            info={**base, "method": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Native()"}}, "settings": {"seed": 1}},
            metrics={},
        ),
        Run(
            info={**base, "method": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Native()"}}, "settings": {"seed": 2}},
            metrics={},
        ),
        Run(info={"method": {"name": "SynchronousSGD"}}, metrics={}),
    ]
    assert distinct_labels(runs) == [
        "PipeSGD(width=2), Ring(), mpi",
        "PipeSGD(width=2), Ring(), simulated",
        "PipeSGD(width=2), Native(), seed 1",
        "PipeSGD(width=2), Native(), seed 2",
        "SynchronousSGD",
    ]
    assert len(set(distinct_labels(runs, repetitions=False))) == 4
    assert len(set(distinct_labels([Run(info={**base, "id": name}, metrics={}) for name in "ab"]))) == 2


# ---------------------------------------------------------------- timelines


def bars_of(figure: Any) -> list[tuple[str, float, float, float]]:
    return [(bar.name, base, x, y) for bar in figure.data for base, x, y in zip(bar.base, bar.x, bar.y, strict=True)]


def test_a_timeline_draws_every_span_of_its_steps_once_in_milliseconds() -> None:
    figure = plots.timeline(make_run(), steps=slice(20, 23))
    bars = bars_of(figure)
    forwards = sorted(bar for bar in bars if bar[0] == "forward")
    np.testing.assert_allclose([bar[1] for bar in forwards], [0, 0.2, 10, 10.2, 20, 20.2, 30], atol=1e-6)
    np.testing.assert_allclose([bar[2] for bar in forwards], [2, 2, 2, 2, 2, 2, 0.2], atol=1e-6)  # rank 1 ends 0.2 ms after rank 0
    assert len(bars) == 2 * 3 * 6 + 1
    assert figure.layout.xaxis.title.text == "time (ms)"
    assert [note.text for note in figure.layout.annotations] == ["<b>PipeSGD</b>", "step 20", "step 21", "step 22"]
    assert figure.data[0].hovertext[0] == "<b>forward</b> on rank 0, 2.00 ms<br>step 20"
    send = next(bar for bar in figure.data if bar.name == "send")
    assert send.hovertext[1] == "<b>send</b> on rank 0, 1.50 ms<br>step 20, bucket 1<br>4.10 kB, peer rank 1"
    assert send.text[1] == "1" and {bar.marker.color for bar in figure.data} == {
        KIND_COLORS[kind] for kind in ("forward", "backward", "apply", "send")
    }


def test_rank_0_is_on_top_and_computation_above_communication() -> None:
    figure = plots.timeline(make_run(), steps=slice(0, 2))
    names = [re.sub(r"<.*?>|\s", "", text) for text in figure.layout.yaxis.ticktext]
    assert names == ["rank0compute", "comm", "rank1compute", "comm"]
    assert list(figure.layout.yaxis.tickvals) == sorted(figure.layout.yaxis.tickvals)
    low, high = figure.layout.yaxis.range
    assert low > high == 0, "an axis from the top down"
    assert plots.timeline(make_run(), slice(0, 2), ranks=[1]).layout.yaxis.ticktext[0].startswith("<b>rank 1</b>")


def test_no_bar_hides_another() -> None:
    figure = plots.timeline(make_run(buckets=4), steps=slice(10, 14))
    bars = [
        (base, base + x, y - width / 2, y + width / 2)
        for bar in figure.data
        for base, x, y, width in zip(bar.base, bar.x, bar.y, bar.width, strict=True)
    ]
    for position, first in enumerate(bars):
        for second in bars[position + 1 :]:
            apart = first[1] <= second[0] + 1e-6 or second[1] <= first[0] + 1e-6 or first[3] <= second[2] or second[3] <= first[2]
            assert apart, (first, second)


def test_spans_that_reach_out_of_the_window_are_cut_and_slivers_left_out() -> None:
    recorder = MemoryRecorder(0)
    for step in range(4):
        recorder.span("forward", "compute", step, step + 0.5, step)
        recorder.span("all_reduce", "comm", step + 0.5, step + 1.5, step)
    recorder.span("evaluate", "compute", 0.6, 1.0002, 0)
    item = panel(Run.from_memory({}, [recorder]), slice(1, 2))
    found = [(KINDS[row["kind"]], round(float(row["start_s"]), 6), round(float(row["end_s"]), 6)) for row in item.table]
    assert found == [("all_reduce", 0.0, 0.5), ("forward", 0.0, 0.5), ("all_reduce", 0.5, 1.0)]
    assert item.length_s == 1.0 and item.bounds == {1: 0.0}


def test_timelines_share_one_axis_and_one_legend() -> None:
    figure = plots.timelines([make_run(), make_run("SynchronousSGD")], slice(5, 7))
    shown = [bar.name for bar in figure.data if bar.showlegend]
    assert shown == ["forward", "backward", "apply", "send"] and len(figure.data) == 8
    assert figure.layout.xaxis.matches == "x2" and figure.layout.xaxis2.title.text == "time (ms)"
    titles = [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]
    assert titles == ["<b>PipeSGD</b>", "<b>SynchronousSGD</b>"]


@settings(deadline=None)
@given(
    drawn=st.lists(st.tuples(st.sampled_from(KINDS[:3]), st.integers(0, 100), st.integers(0, 9)), min_size=1, max_size=60),
    most=st.integers(1, 40),
)
def test_joining_bars_covers_every_span_and_keeps_sums(drawn: list[tuple[str, int, int]], most: int) -> None:
    spans = Spans.from_rows(0, [(kind, "compute", start, start + length, 0, -1, 7, -1) for kind, start, length in drawn])
    rows = lay_rows(spans)
    bars, kept, counts = join_bars(spans.table, rows, most)
    groups = len(set(zip(rows.center.tolist(), spans.table["kind"].tolist(), strict=True)))
    assert len(bars) == (len(drawn) if len(drawn) <= most else max(most, groups))
    assert counts.sum() == len(drawn) and bars["bytes"].sum() == 7 * len(drawn)
    for row, center in zip(spans.table, rows.center, strict=True):
        over = (
            (kept.center == center) & (bars["kind"] == row["kind"]) & (bars["start_s"] <= row["start_s"]) & (bars["end_s"] >= row["end_s"])
        )
        assert over.sum() >= 1


def test_a_long_timeline_is_joined_to_ten_thousand_bars_in_a_moment() -> None:
    run = make_run(num_steps=1500)
    begin = time.process_time()
    figure = plots.timeline(run, steps=slice(0, 1500))
    assert time.process_time() - begin < 5
    assert len(bars_of(figure)) == 10_000 and any("in close order" in text for bar in figure.data for text in bar.hovertext)
    assert len(figure.layout.annotations) < 20


def test_bad_ranges_name_what_there_is() -> None:
    run = make_run(num_steps=10)
    with pytest.raises(ConfigError, match=r"steps 0 to 9; ask for some of those, say slice\(0, 10\)"):
        plots.timeline(run, steps=slice(20, 25))
    with pytest.raises(ConfigError, match="traces of ranks 0 to 1"):
        plots.timeline(run, ranks=[7])
    with pytest.raises(ConfigError, match="has no trace"):
        plots.timeline(empty_run())
    with pytest.raises(ConfigError, match="at least one"):
        plots.timelines([])
    assert len(plots.timeline(make_run(num_steps=2)).data) == 4, "a run of fewer steps than are shown by default"


# ---------------------------------------------------------------- overlap


def test_overlap_bars_add_up_to_the_step() -> None:
    figure = plots.overlap_bars([make_run(), make_run("SynchronousSGD"), empty_run()])
    parts = {bar.name: list(bar.x) for bar in figure.data}
    assert parts["computation alone"][0] == pytest.approx(7 - 3, rel=1e-6)  # ms: sent from 3 to 6.5, computed from 0 to 6 and 8 to 9
    assert parts["hidden communication"][0] == pytest.approx(3) and parts["exposed communication"][0] == pytest.approx(0.5)
    assert parts["idle"][0] == pytest.approx(2.5, rel=0.02)
    assert [values[2] for values in parts.values()] == [0, 0, 0, 0]
    assert [note.text for note in figure.layout.annotations] == ["overlap 85.7 %", "overlap 85.7 %", "no communication"]


# ---------------------------------------------------------------- names, sizes, imports


FIGURES: dict[str, Callable[[list[Run]], Any]] = {
    "curves": plots.curves,
    "convergence": plots.convergence,
    "timelines": lambda runs: plots.timelines(runs, slice(3, 6)),
    "overlap": plots.overlap_bars,
}


@pytest.mark.parametrize("kind", FIGURES)
def test_names_are_escaped_in_all_that_is_shown(kind: str) -> None:
    runs = [make_run(EVIL, problem={"name": EVIL}), make_run("PipeSGD", problem={"name": EVIL})]
    figure = FIGURES[kind](runs).to_plotly_json()
    shown = json.dumps(
        [figure["layout"], [{k: v for k, v in trace.items() if k not in ("legendgroup",)} for trace in figure["data"]]], default=str
    )
    assert "alert(1)" in shown, "the name is shown"
    assert "<script" not in shown and "<img" not in shown


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_of_long_runs_stay_small(kind: str) -> None:
    figure = FIGURES[kind]([make_run(num_steps=3000, num_ranks=1), make_run("SynchronousSGD", num_steps=3000, num_ranks=1)])
    assert len(figure.to_json()) < 160_000


def test_importing_plots_loads_nothing_and_knows_its_names() -> None:
    code = "import sys, workbench.plots as p; print({'plotly', 'ipywidgets', 'torch', 'nbconvert'} & {*sys.modules}); p.nothing"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "set()" and "has no attribute 'nothing'" in process.stderr
    assert all(callable(getattr(plots, name)) for name in plots.__all__)


def test_without_plotly_the_message_names_the_extra() -> None:
    code = "import sys; sys.modules['plotly'] = None; import workbench.plots as p; p.curves"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'sgd-workbench[notebooks]'" in process.stderr


# ---------------------------------------------------------------- live view


def cut(run: Run, num_steps: int) -> Run:
    status = "finished" if num_steps >= 60 else "running"
    metrics = {rank: [row for row in rows if row["step"] < num_steps] for rank, rows in run.metrics.items()}
    return Run(info={**run.info, "status": status}, metrics=metrics)


def test_the_live_view_moves_at_most_five_times_a_second_and_then_stands_still() -> None:
    live, run = plots.LiveCurves(x="steps"), make_run()
    seen = []

    def poll() -> list[Run]:
        seen.append(len(live._figure.data[-2].x) if live._figure.data else 0)
        return [cut(run, 10 * len(seen))]

    begin = time.monotonic()
    thread = live.follow(poll)
    thread.join(20)
    assert not thread.is_alive() and time.monotonic() - begin > 5 * 0.2
    assert len(seen) == 6 and seen == sorted(seen) and seen[-1] > seen[1] > 0
    assert live._figure.data[0].x.tolist() == run.curve("steps", "loss")[0].tolist()
    assert not live.update([cut(run, 20)]), "an ended view does not change"
    assert live.static().data[0].y.tolist() == run.curve("steps", "loss")[1].tolist()


def test_updates_that_come_too_fast_wait_for_the_next_one() -> None:
    live, run = plots.LiveCurves(), make_run()
    assert live.update([cut(run, 10)])
    assert not live.update([cut(run, 20)])
    assert live.update([cut(run, 30)], force=True)
    assert len(live._figure.data[0].x) == 30
    live.finish()
    assert len(live.static().data[0].x) == 30


def test_the_axis_can_be_changed_and_runs_can_join() -> None:
    live, run = plots.LiveCurves(x="steps"), make_run()
    live.update([run], force=True)
    live._axis.value = "bytes"
    assert live._figure.layout.xaxis.ticksuffix == "B" and live._figure.data[0].x[0] == 2 * 12288
    assert live._figure.layout.xaxis2.title.text == live._figure.layout.xaxis.title.text == "bytes sent, all ranks together"
    live.update([run, make_run("SynchronousSGD")], force=True)
    assert {trace.name for trace in live._figure.data if trace.showlegend} == {"PipeSGD", "SynchronousSGD"}
    assert {trace.xaxis for trace in live._figure.data} == {"x", "x2"}


def test_the_stop_button_calls_back_once_and_says_so() -> None:
    pressed = threading.Event()
    live = plots.LiveCurves(on_stop=pressed.set)
    assert not live._stop.disabled
    live._stop.click()
    assert pressed.is_set() and live._stop.disabled and live._stop.description == "Stopping"


def test_an_error_while_following_is_shown_and_ends_the_view() -> None:
    live = plots.LiveCurves()

    def poll() -> list[Run]:
        raise OSError("<gone>")

    live.follow(poll).join(20)
    assert "OSError: &lt;gone&gt;" in live._status.value and live._ended.is_set()


def test_the_table_of_ranks_names_steps_failures_and_many_ranks(tmp_path: Path) -> None:
    run = make_run().save(tmp_path / "run")
    (run / "failed-00001.json").write_text(json.dumps({"rank": 1, "error": "<b>KeyError</b>: 3", "traceback": ""}))
    table = status_table([Run.load(run)])
    assert [(row["rank"], row["state"], row["step"]) for row in table] == [(0, "finished", 59), (1, "<b>KeyError</b>: 3", 59)]
    assert "<b>" not in table._repr_html_()
    many = status_table([make_run(num_ranks=20, num_steps=3)])
    assert len(many) == 1 and many[0]["rank"] == "20 ranks" and many[0]["step"] == "2 to 2"
    assert len(status_table([])) == 0


# ---------------------------------------------------------------- pages


def notebook(*figures: Any) -> Any:
    content = nbformat.v4.new_notebook(metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {}}})
    content.cells = [nbformat.v4.new_markdown_cell("# A tour"), nbformat.v4.new_code_cell("figure")]
    bundles = [pio.renderers["plotly_mimetype"].to_mimebundle(json.loads(figure.to_json())) for figure in figures]
    content.cells[1].outputs = [nbformat.v4.new_output("display_data", data=bundle) for bundle in bundles]
    content.cells[1].outputs.append(nbformat.v4.new_output("display_data", data={WIDGET: {"model_id": "1"}, "text/plain": "VBox()"}))
    return content


def test_a_page_holds_plotly_once_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tour.ipynb"
    nbformat.write(notebook(plots.curves([make_run(EVIL)]), plots.timeline(make_run())), path)
    assert path.stat().st_size < 100_000
    page = plots.export_html(path, tmp_path / "pages" / "tour.html").read_text()
    assert page.count("plotly.js v") == 1 and page.count("Plotly.newPlot(") == 2 and "A tour" in page
    head, body = page[: page.index("<script>")] + page[page.index("</head>") :], page[page.index("<body") :]
    assert not re.search(r"""(src|href)=["'](https?:)?//""", head)
    assert "<script>alert" not in body and "VBox" not in body and "require.min.js" not in head
    assert [item.name for item in (tmp_path / "pages").iterdir()] == ["tour.html"]
    assert len(page) < 5_500_000


def test_a_page_without_figures_is_small_and_formulas_are_kept(tmp_path: Path) -> None:
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("plain")])
    nbformat.write(content, tmp_path / "a.ipynb")
    page = plots.export_html(tmp_path / "a.ipynb", tmp_path / "a.html").read_text()
    assert len(page) < 500_000 and "mathjax" not in page.lower()
    content.cells.append(nbformat.v4.new_markdown_cell("$w_{t+1}$"))
    nbformat.write(content, tmp_path / "a.ipynb")
    assert "mathjax" in plots.export_html(tmp_path / "a.ipynb", tmp_path / "a.html").read_text().lower()


def test_only_figures_and_widgets_are_changed() -> None:
    content = notebook(plots.curves([make_run()]))
    table = nbformat.v4.new_output("display_data", data={"text/html": "<table></table>"})
    content.cells[1].outputs += [table, nbformat.v4.new_output("stream", text="done")]
    assert draw_figures(content) == 1
    kinds = [output.get("data", output.get("text")) for output in content.cells[1].outputs]
    assert list(kinds[0]) == ["text/html"] and kinds[1:] == [{"text/html": "<table></table>"}, "done"]
    assert "widgets" not in content.metadata and PLOTLY not in json.dumps(content)


def test_what_is_no_notebook_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no notebook"):
        plots.export_html(tmp_path / "none.ipynb", tmp_path / "a.html")
    (tmp_path / "text.ipynb").write_text("hello")
    with pytest.raises(ConfigError, match="is no notebook"):
        plots.export_html(tmp_path / "text.ipynb", tmp_path / "a.html")


def test_the_renderer_stores_data_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pio.renderers, "_default_renderers", [])
    monkeypatch.setattr(pio.renderers, "_default_name", "")
    plots.use_notebook_renderer()
    assert list(plots.curves([make_run()])._repr_mimebundle_()) == [PLOTLY]
