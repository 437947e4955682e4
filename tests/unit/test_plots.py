"""Figures show the recorded numbers, hide nothing, escape names, and stay small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
pytest.importorskip("ipywidgets", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

import nbformat
import plotly.io as pio
from IPython.core.formatters import DisplayFormatter

import workbench as wb
from workbench import plots
from workbench.analysis.labels import distinct_labels
from workbench.bench.spans import LATE_RANK, LATE_STEP, write_trace
from workbench.errors import ConfigError
from workbench.plots import renderer
from workbench.plots.gantt.layout import FILLED, MAX_BARS, panel
from workbench.plots.gantt.marks import CLEAR_ARROWS, MAX_ARROWS
from workbench.plots.gantt.merged_bars import LONG_SHARE, merge_bars
from workbench.plots.html import WIDGET, draw_figures
from workbench.plots.lines import decimate, moving_average
from workbench.plots.live.curves import status_table
from workbench.plots.prediction import algorithm_of
from workbench.plots.renderer import PLOTLY
from workbench.plots.style import KIND_COLORS
from workbench.replica.local_training import run_info
from workbench.trace import KINDS, MemoryRecorder, Run, Spans

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def make_run(
    name: str = "PipeSGD", *, num_steps: int = 60, num_ranks: int = 2, buckets: int = 3, shift: float = 0.0, **info: Any
) -> Run:
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
                recorder.span(
                    "send",
                    "comm",
                    begin + 0.003 + 0.001 * bucket,
                    begin + 0.0045 + 0.001 * bucket,
                    step,
                    bucket,
                    4096,
                    1 - rank,
                )
            recorder.span("apply", "compute", begin + 0.008, begin + 0.009, step)
            common = {
                "step": step,
                "seconds": 0.01 * (step + 1),
                "samples": 64 * (step + 1),
                "bytes_sent": 12288 * (step + 1),
            }
            recorder.metrics({**common, "staleness": 1, "loss": shift + 2.0 / (step + 1), "num_samples": 32, "lr": 0.1})
            if step % 10 == 9:
                numbers = {"loss_sum": 5.0, "correct": step, "judged": 60, "count": 60}
                recorder.metrics({**common, "evaluation": numbers})
    usual = {
        "id": f"run-{name}",
        "algorithm": {"name": name, "settings": {}},
        "problem": {"name": "digits-mlp"},
        "status": "finished",
    }
    return Run.from_memory({**usual, "num_workers": num_ranks, **info}, recorders)


def empty_run(**info: Any) -> Run:
    return Run.from_memory({"id": "run-empty", "algorithm": {"name": "PipeSGD"}, **info}, [MemoryRecorder(0)])


# ---------------------------------------------------------------- curves


def test_figures_that_begin_alike_have_nothing_in_common() -> None:
    """What all of them begin with is made once."""
    one, other = plots.convergence([]), plots.convergence([])
    before = other.to_dict()
    one.add_scatter(x=[1], y=[2], row=1, col=2)
    one.update_layout(title="mine", template=None, xaxis2={"title": "also mine"}, hovermode="x")
    assert other.to_dict() == before == plots.convergence([]).to_dict()


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


def test_curves_of_different_lengths_are_not_averaged() -> None:
    """A mean would be cut to the shorter one: each length has a curve of its own."""
    runs = [make_run(num_steps=20, id="a"), make_run(num_steps=60, id="b")]
    for order in (runs, runs[::-1]):
        traces = plots.curves(order, "steps", "loss", smooth=0).data
        assert sorted(len(trace.x) for trace in traces) == [20, 60]
        assert not any("mean of" in (trace.name or "") for trace in traces)


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


@pytest.mark.parametrize("most", [1, 5, 7])
def test_a_curve_of_very_few_points_is_drawn(most: int) -> None:
    raw, line = plots.curves([make_run(num_steps=200)], max_points=most).data
    assert 2 <= len(raw.x) <= 4 and 2 <= len(line.x) <= max(most, 4)


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
    base = {
        "algorithm": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Ring()"}},
        "runtime": "mpi",
        "num_workers": 4,
    }
    runs = [
        Run(info=base, metrics={}),
        Run(info={**base, "runtime": "simulated"}, metrics={}),
        Run(
            info={
                **base,
                "algorithm": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Native()"}},
                "settings": {"seed": 1},
            },
            metrics={},
        ),
        Run(
            info={
                **base,
                "algorithm": {"name": "PipeSGD", "settings": {"width": 2, "collective": "Native()"}},
                "settings": {"seed": 2},
            },
            metrics={},
        ),
        Run(info={"algorithm": {"name": "SynchronousSGD"}}, metrics={}),
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


def ring_run(num_steps: int = 6, num_bytes: int = 4096) -> Run:
    """Two ranks that send each other two messages a step: rank 1 is 1 ms late, and rank 0 waits for it.

    A step takes 10 ms.
    """
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        for step in range(num_steps):
            begin = 0.01 * step
            ready = begin + 0.004 + 0.001 * rank
            recorder.span("forward", "compute", begin, ready, step)
            recorder.span("send", "comm", ready, begin + 0.007, step, 3, num_bytes, 1 - rank)
            recorder.span("recv", "comm", ready, begin + 0.007, step, -1, num_bytes, 1 - rank)
            recorder.span("send", "comm", begin + 0.007, begin + 0.009, step, 3, num_bytes, 1 - rank)
            recorder.span("recv", "comm", begin + 0.007, begin + 0.009, step, -1, num_bytes, 1 - rank)
            recorder.span("apply", "compute", begin + 0.009, begin + 0.01, step)
    return Run.from_memory({"id": "ring", "algorithm": {"name": "SynchronousSGD"}, "num_workers": 2}, recorders)


def bars_of(figure: Any) -> list[tuple[str, float, float, float]]:
    bars = [trace for trace in figure.data if trace.type == "bar"]
    return [(bar.name, base, x, y) for bar in bars for base, x, y in zip(bar.base, bar.x, bar.y, strict=True)]


def test_a_timeline_draws_every_span_of_its_steps_once_in_milliseconds() -> None:
    figure = plots.timeline(make_run(), steps=slice(20, 23))
    bars = bars_of(figure)
    forwards = sorted(bar for bar in bars if bar[0] == "forward")
    np.testing.assert_allclose([bar[1] for bar in forwards], [0, 0.2, 10, 10.2, 20, 20.2, 30], atol=1e-6)
    # Rank 1 ends 0.2 ms after rank 0
    np.testing.assert_allclose([bar[2] for bar in forwards], [2, 2, 2, 2, 2, 2, 0.2], atol=1e-6)
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
            apart = (
                first[1] <= second[0] + 1e-6
                or second[1] <= first[0] + 1e-6
                or first[3] <= second[2]
                or second[3] <= first[2]
            )
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
    titled = plots.timelines([make_run(), make_run("SynchronousSGD")], slice(5, 7), title="two <runs>")
    assert titled.layout.title.text == "two &lt;runs&gt;" and titled.layout.height > figure.layout.height


drawn_spans = st.lists(
    st.tuples(
        st.integers(0, 1), st.sampled_from("ab"), st.sampled_from(KINDS[:2]), st.integers(0, 100), st.integers(0, 30)
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(drawn=drawn_spans, most=st.integers(1, 40))
def test_joined_bars_take_the_time_of_their_spans_and_none_hides_another(
    drawn: list[tuple[int, str, str, int, int]], most: int
) -> None:
    by_rank = [[row for row in drawn if row[0] == rank] for rank in range(2)]
    spans = Spans.concatenate(
        Spans.from_rows(
            rank, [(kind, lane, start, start + length, 0, -1, 7, -1) for _, lane, kind, start, length in rows]
        )
        for rank, rows in enumerate(by_rank)
    )
    table, length_s = spans.table, max(float(spans.table["end_s"].max()), 1.0)
    merged = merge_bars(table, most, length_s)
    bars = merged.table
    if len(table) <= most:
        assert np.array_equal(bars, table) and set(merged.counts) == {1}
        return
    at_least = len({(row[0], row[1], row[2]) for row in drawn})
    assert len(bars) <= max(most, at_least * (2 * int(most * LONG_SHARE) + 1))
    assert merged.counts.sum() == len(drawn) and bars["bytes"].sum() == 7 * len(drawn)
    assert np.array_equal(np.bincount(merged.place, minlength=len(bars)), merged.counts)
    for name in ("kind", "rank", "lane"):
        assert np.array_equal(bars[name][merged.place], table[name])
    assert np.all(bars["start_s"][merged.place] <= table["start_s"]) and np.all(
        bars["end_s"][merged.place] >= table["start_s"]
    )
    areas = (bars["end_s"] - bars["start_s"]) * (merged.high - merged.low) * merged.rows
    for rank, kind in {(row[0], row[2]) for row in drawn}:
        total = sum(length for number, _, name, _, length in drawn if (number, name) == (rank, kind))
        mine = (bars["rank"] == rank) & (bars["kind"] == KINDS.index(kind))
        assert merged.spans_s[mine].sum() == pytest.approx(total) == pytest.approx(areas[mine].sum())
    assert bars["start_s"].min() <= table["start_s"].min() and bars["end_s"].max() >= table["end_s"].max()
    for first in range(len(bars)):
        for second in range(first):
            if bars["rank"][first] == bars["rank"][second] and bars["lane"][first] == bars["lane"][second]:
                apart = [
                    bars["end_s"][one] <= bars["start_s"][other] + 1e-9
                    for one, other in ((first, second), (second, first))
                ]
                above = [
                    merged.high[one] <= merged.low[other] + 1e-9 for one, other in ((first, second), (second, first))
                ]
                assert any(apart + above)


def test_a_timeline_of_many_spans_keeps_each_ranks_times_and_shows_the_straggler(tmp_path: Path) -> None:
    """What is drawn of each kind and rank takes as much area as its spans take time; one backward of ten times the length is itself."""
    run = Run.load(write_trace(tmp_path, num_ranks=LATE_RANK + 1, num_steps=LATE_STEP + 4))
    figure, table = plots.timeline(run, slice(None), run.spans.ranks), run.spans.table
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert 4000 < sum(len(trace.x) for trace in bars) <= 5 * MAX_BARS and len(figure.to_json()) < 5_000_000
    told, late = 0, []
    for trace in bars:
        code = KINDS.index(trace.legendgroup)
        ranks = np.array([int(re.findall(r"on rank (\d+)", text)[0]) for text in trace.hovertext])
        for text in trace.hovertext:
            begun = re.findall(r"(\d+) begins? here", text)
            told += int(begun[0]) if begun else 1
        for rank in run.spans.ranks:
            mine = table[(table["rank"] == rank) & (table["kind"] == code)]
            row = 0.6 if KINDS[code] in ("send", "recv", "encode", "decode", "sum") else 1.0
            area_s = (np.array(trace.x) * np.array(trace.width))[ranks == rank].sum() / FILLED / row
            assert area_s == pytest.approx((mine["end_s"] - mine["start_s"]).sum(), rel=1e-6), (KINDS[code], rank)
        late += [
            text
            for text in trace.hovertext
            if f"step {LATE_STEP}" in text and "backward" in text and "here" not in text
        ]
    assert told == len(table)
    assert len(late) == 1 and f"on rank {LATE_RANK}, " in late[0]
    title = figure.layout.annotations[0].text
    steps = [int(number) for number in re.findall(r"steps=slice\((\d+), (\d+)\)", title)[0]]
    assert f"{len(table):,} spans in" in title
    exact = plots.timeline(run, slice(*steps), run.spans.ranks)
    assert "spans in" not in exact.layout.annotations[0].text and not any(
        "here" in text for bar in exact.data for text in bar.hovertext
    )


def test_many_spans_at_one_time_make_a_figure() -> None:
    """A simulation may have costs of zero."""
    recorder = MemoryRecorder(0)
    recorder.spans = [("forward", "compute", 0.0, 0.0, step, -1, 0, -1) for step in range(MAX_BARS + 1)]
    figure = plots.timeline(Run.from_memory({"status": "finished"}, [recorder]), slice(0, MAX_BARS + 1))
    assert len(figure.data[0].x) == 1


def test_any_window_of_a_long_run_has_bars_and_arrows_of_a_bounded_number() -> None:
    """144 000 spans, 48 000 of them messages; in no window are more than a few thousand drawn."""
    run = ring_run(num_steps=12_000)
    assert len(run.spans) == 144_000 and len(run.messages[0]) == 48_000
    for window in (slice(6000, 6005), slice(6000, 6100), slice(100, 9000), slice(0, 12_000)):
        figure = plots.timeline(run, steps=window, critical=window.stop - window.start < 1000)
        assert len(bars_of(figure)) <= MAX_BARS and len(figure.to_json()) < 1_500_000
        arrow = next(trace for trace in figure.data if trace.legendgroup == "message")
        assert len(arrow.x) // 3 <= MAX_ARROWS
        assert len(figure.layout.annotations) <= 21 and len(figure.layout.shapes) <= 60
    assert any("begin here" in text for bar in figure.data if bar.type == "bar" for text in bar.hovertext)


def test_a_window_is_drawn_without_looking_at_each_span_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are laid span by span of what is small enough to be drawn so, and of no more."""
    seen = []
    monkeypatch.setattr(
        "workbench.plots.gantt.layout.sublanes",
        lambda table: (seen.append(len(table)), np.zeros(len(table), np.int64))[1],
    )
    run = ring_run(num_steps=2000)
    for window in (slice(10, 12), slice(0, 2000)):
        plots.timeline(run, window)
    assert seen == [2 * 12]


def test_bad_ranges_name_what_there_is() -> None:
    run = make_run(num_steps=10)
    with pytest.raises(ConfigError, match=r"steps 0 to 9; ask for some of those, such as slice\(0, 10\)"):
        plots.timeline(run, steps=slice(20, 25))
    for ranks in ([7], [0, 7], []):  # one without a trace is not left out silently
        with pytest.raises(ConfigError, match=r"traces of ranks 0 to 1; ask for some"):
            plots.timeline(run, ranks=ranks)
    left = replace(run, traces={0: run.traces[0], 5: run.traces[1]})
    with pytest.raises(ConfigError, match=r"ranks=\[0, 1\].* has traces of ranks 0, 5"):
        plots.timeline(left, ranks=[0, 1])
    with pytest.raises(ConfigError, match="has no trace"):
        plots.timeline(empty_run())
    with pytest.raises(ConfigError, match="at least one"):
        plots.timelines([])
    assert len(plots.timeline(make_run(num_steps=2)).data) == 4, "a run of fewer steps than are shown by default"


# ---------------------------------------------------------------- arrows, critical paths, predictions


def test_arrows_lead_from_each_send_to_the_end_of_its_receive() -> None:
    figure = plots.timeline(ring_run(), slice(2, 4))
    arrow = figure.data[-1]
    assert (arrow.name, arrow.visible, arrow.showlegend) == ("message", True, True)
    lines = sorted(zip(arrow.x[::3], arrow.y[::3], arrow.x[1::3], arrow.y[1::3], strict=True))
    assert set(arrow.x[2::3]) == {None} and len(lines) == 2 * 4
    send = next(bar for bar in figure.data if bar.name == "send")
    receive = next(bar for bar in figure.data if bar.name == "recv")
    begins = sorted(zip(send.base, send.y, strict=True))
    assert [line[:2] for line in lines] == begins
    ends = {(round(base + x, 6), y) for base, x, y in zip(receive.base, receive.x, receive.y, strict=True)}
    assert {line[2:] for line in lines} <= ends
    text = "<b>message</b> from rank 0 to rank 1, 4.10 kB<br>3.00 ms from the call to the arrival; the sender waited for 1.00 ms"
    assert text in arrow.hovertext
    assert len(plots.timeline(ring_run(), slice(2, 4), links=False).data) == len(figure.data) - 1


def test_many_arrows_wait_in_the_legend_and_say_how_many_there_are() -> None:
    run = ring_run(num_steps=400)
    few = plots.timeline(run, slice(0, CLEAR_ARROWS // 4)).data[-1]
    assert few.visible is True and len(few.x) == 3 * CLEAR_ARROWS
    more = plots.timeline(run, slice(0, 100)).data[-1]
    assert more.visible == "legendonly" and more.name == "message" and len(more.x) == 3 * 400
    most = plots.timeline(run, slice(0, 400)).data[-1]
    assert most.name == f"message ({MAX_ARROWS} of 1600)" and len(most.x) == 3 * MAX_ARROWS
    assert most.x[0] == 4.0 and most.x[-2] == 4000 - 1.0, "spread over the window"


def test_no_arrow_leads_to_a_rank_that_is_not_shown() -> None:
    assert {trace.type for trace in plots.timeline(ring_run(), slice(2, 4), ranks=[1]).data} == {"bar"}


def test_the_critical_path_is_a_line_through_its_bars() -> None:
    figure = plots.timeline(ring_run(), slice(2, 3), critical=True)
    line = figure.data[-1]
    assert line.name == "critical path" and list(line.x) == [0, 5, 5, 7, 7, 9, 9, 10]
    rows = dict(zip(figure.layout.yaxis.ticktext, figure.layout.yaxis.tickvals, strict=True))
    forward = next(bar for bar in figure.data if bar.name == "forward")
    assert line.y[0] == line.y[1] == forward.y[1] + 0.3, "rank 1 is late; the line is under the middle of its bar"
    assert "critical path</b> of step 2: forward on rank 1, 5.00 ms, 50.0 % of the step" in line.hovertext[0]
    assert line.y[-1] == rows[min(rows, key=lambda name: rows[name])] + 0.3, "the step ends on rank 0 as on rank 1"


def test_the_path_is_broken_where_the_next_step_begins_on_another_rank_before_this_one_has_ended() -> None:
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        for step in range(3):
            begin = 0.01 * step + 0.004 * (rank == step % 2)
            recorder.span("forward", "compute", begin, begin + 0.005, step)
    line = plots.timeline(Run.from_memory({}, recorders), slice(0, 2), critical=True).data[-1]
    assert list(line.x).count(None) == 1 == list(line.y).count(None) and len(line.x) == len(line.y) == len(
        line.hovertext
    )


def test_runs_below_each_other_may_show_steps_of_their_own_under_names() -> None:
    figure = plots.timelines([ring_run(), make_run()], [slice(1, 2), slice(30, 32)], names=["one", EVIL])
    titles = [note.text for note in figure.layout.annotations]
    assert titles == [
        "<b>one</b>",
        "step 1",
        "<b>" + EVIL.replace("<", "&lt;").replace(">", "&gt;") + "</b>",
        "step 30",
        "step 31",
    ]
    assert figure.layout.xaxis2.range == (0, pytest.approx(20.2))
    with pytest.raises(ConfigError, match="2 runs, 1 windows of steps and 2 names"):
        plots.timelines([ring_run(), make_run()], [slice(1, 2)])


def test_one_lane_alone_makes_a_figure() -> None:
    recorder = MemoryRecorder(0)
    recorder.span("forward", "compute", 0.0, 1.0, 0)
    assert len(bars_of(plots.timeline(Run.from_memory({}, [recorder])))) == 1


def calibrated_run(algorithm: Any = None, steps: int = 40) -> Run:
    costs = {
        "network": wb.costs.Network(latency_s=1e-4, bandwidth_bytes_per_s=1e7, name="link"),
        "compute": wb.costs.Compute(forward_s=0.002, backward_s=0.004, update_s=0.0005),
    }
    algorithm = algorithm or wb.SynchronousSGD()
    return wb.simulate(algorithm, wb.problems.get("digits-mlp"), workers=3, timing_only=True, steps=steps, **costs)


def test_a_prediction_stands_below_what_was_measured_from_the_same_step_boundary() -> None:
    """Calibrated from itself, a run without noise is foretold: every bar has its twin."""
    run = calibrated_run()
    figure = plots.compare_with_prediction(run, steps=slice(20, 23))
    titles = [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]
    found = [re.fullmatch(r"<b>(\w+): SynchronousSGD, ([\d.]+) ms a step</b>", title) for title in titles]
    assert [match[1] for match in found if match] == ["measured", "predicted"]
    assert float(found[0][2]) == pytest.approx(float(found[1][2]), rel=0.02)  # type: ignore[index]
    upper, lower = ([bar for bar in figure.data if bar.yaxis == axis] for axis in ("y", "y2"))
    assert [bar.name for bar in upper] == [bar.name for bar in lower]
    for above, below in zip(upper, lower, strict=True):
        assert len(above.x) == len(below.x) == 9
        np.testing.assert_allclose(np.array(above.base, float), np.array(below.base, float), atol=0.5)
    assert figure.layout.xaxis.matches == "x2"


def test_a_prediction_may_be_of_another_calibration_and_needs_to_know_the_algorithm() -> None:
    from workbench.calibration import calibrate

    calibration = calibrate(calibrated_run())
    pipe = calibrated_run(wb.PipeSGD(width=2))
    titles = [note.text for note in plots.compare_with_prediction(pipe, calibration).layout.annotations]
    assert any(title.startswith("<b>predicted: PipeSGD(width=2)") for title in titles)
    unknown = Run(
        info={**pipe.info, "algorithm": {"name": "Mine", "settings": {}}}, metrics=pipe.metrics, traces=pipe.traces
    )
    with pytest.raises(ConfigError, match="give algorithm="):
        plots.compare_with_prediction(unknown, calibration)
    assert plots.compare_with_prediction(unknown, calibration, algorithm=wb.PipeSGD(width=2)).data
    with pytest.raises(ConfigError, match="has no traced step"):
        plots.compare_with_prediction(empty_run(num_workers=2))


@pytest.mark.parametrize(
    "algorithm",
    [
        wb.PipeSGD(width=3, collective=wb.collectives.Ring(codec=wb.codecs.Truncate16())),
        wb.LayerwiseSGD(bucket_bytes=2e5, lanes=2, collective=wb.collectives.Ring()),
        wb.BackupSGD(backups=1),
        wb.SynchronousSGD(collective=wb.collectives.Ring(chunks=3)),
        *map(wb.algorithms.get, wb.algorithms.names()),
    ],
    ids=str,
)
def test_a_record_tells_its_algorithm(algorithm: Any) -> None:
    assert (
        algorithm_of(
            Run(info=run_info(algorithm, wb.problems.get("digits-mlp"), wb.Settings(epochs=1), "mpi", 4), metrics={})
        )
        == algorithm
    )


def test_a_record_that_tells_only_a_part_of_its_algorithm_asks_for_it() -> None:
    run = Run(
        info={"algorithm": {"name": "SynchronousSGD", "settings": {"collective": "OfMine(chunks=3)"}}}, metrics={}
    )
    with pytest.raises(ConfigError, match=r"SynchronousSGD\(collective=OfMine\(chunks=3\)\).*give algorithm="):
        algorithm_of(run)


# ---------------------------------------------------------------- overlap and critical path, step by step


def test_each_step_has_its_parts_above_its_critical_path() -> None:
    figure = plots.per_step(ring_run(num_steps=8))
    parts = {bar.name: bar.y.tolist() for bar in figure.data}
    assert parts["computation alone"] == pytest.approx([5.5] * 8) and parts["exposed communication"] == pytest.approx(
        [4.5] * 8
    )
    assert parts["forward"] == pytest.approx([5.0] * 8) and parts["apply"] == pytest.approx([1.0] * 8)
    assert sum(parts[name][3] for name in ("forward", "recv", "apply")) == pytest.approx(10.0)
    assert figure.layout.yaxis.title.text == "time (ms)" and figure.layout.xaxis2.title.text == "step"
    assert {bar.legend for bar in figure.data if bar.name in ("forward", "apply")} == {"legend2"}
    assert plots.per_step(ring_run(num_steps=8), slice(2, 5)).data[0].x.tolist() == [2, 3, 4]
    with pytest.raises(ConfigError, match="no trace of these steps"):
        plots.per_step(ring_run(num_steps=8), slice(20, 30))
    with pytest.raises(ConfigError, match="no trace of these steps"):
        plots.per_step(empty_run())


def test_many_steps_share_bars_that_are_their_means() -> None:
    figure = plots.per_step(ring_run(num_steps=1001))
    assert all(len(bar.x) == 167 for bar in figure.data) and figure.layout.xaxis2.title.text == "step (means of 6)"
    parts = {bar.name: bar.y for bar in figure.data}
    np.testing.assert_allclose(parts["forward"], 5.0)
    np.testing.assert_allclose(parts["computation alone"], 5.5)
    assert figure.data[0].hovertext[1] == "<b>computation alone</b>, steps 6 to 11<br>5.50 ms"


# ---------------------------------------------------------------- overlap


def test_overlap_bars_add_up_to_the_step() -> None:
    figure = plots.overlap_bars([make_run(), make_run("SynchronousSGD"), empty_run()])
    parts = {bar.name: list(bar.x) for bar in figure.data}
    # Ms: sent from 3 to 6.5, computed from 0 to 6 and 8 to 9
    assert parts["computation alone"][0] == pytest.approx(7 - 3, rel=1e-6)
    assert parts["hidden communication"][0] == pytest.approx(3) and parts["exposed communication"][0] == pytest.approx(
        0.5
    )
    assert parts["idle"][0] == pytest.approx(2.5, rel=0.02)
    assert [values[2] for values in parts.values()] == [0, 0, 0, 0]
    assert [note.text for note in figure.layout.annotations] == ["overlap 85.7 %", "overlap 85.7 %", "no trace"]


def test_long_names_of_overlap_bars_take_several_lines_and_stay_escaped() -> None:
    figure = plots.overlap_bars([make_run("LayerwiseSGD(bucket_bytes=1000000, lanes=2), Ring(codec=Truncate16()) <i>")])
    (label,) = figure.layout.yaxis.ticktext
    lines = label.split("<br>")
    assert len(lines) == 3 and max(map(len, lines)) <= 40 and lines[-1].strip().endswith("&lt;i&gt;")


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
        [figure["layout"], [{k: v for k, v in trace.items() if k not in ("legendgroup",)} for trace in figure["data"]]],
        default=str,
    )
    assert "alert(1)" in shown, "the name is shown"
    assert "<script" not in shown and "<img" not in shown


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_of_long_runs_stay_small(kind: str) -> None:
    figure = FIGURES[kind](
        [make_run(num_steps=3000, num_ranks=1), make_run("SynchronousSGD", num_steps=3000, num_ranks=1)]
    )
    assert len(figure.to_json()) < 160_000


def test_importing_plots_loads_nothing_and_knows_its_names() -> None:
    code = "import sys, workbench.plots as p; print({'plotly', 'ipywidgets', 'torch', 'nbconvert'} & {*sys.modules}); p.nothing"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "set()" and "has no attribute 'nothing'" in process.stderr
    assert all(callable(getattr(plots, name)) for name in plots.__all__)
    assert dir(plots) == sorted(plots.__all__)


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
    live._axes.x_axis.value = "bytes"
    assert live._figure.layout.xaxis.ticksuffix == "B" and live._figure.data[0].x[0] == 2 * 12288
    assert (
        live._figure.layout.xaxis2.title.text
        == live._figure.layout.xaxis.title.text
        == "bytes sent, all ranks together"
    )
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
    assert "OSError:</b> &lt;gone&gt;" in live._status.value and live._ended.is_set()


def test_the_table_of_ranks_names_steps_failures_and_many_ranks(tmp_path: Path) -> None:
    run = make_run().save(tmp_path / "run")
    (run / "failed-00001.json").write_text(json.dumps({"rank": 1, "error": "<b>KeyError</b>: 3", "traceback": ""}))
    table = status_table([Run.load(run)])
    assert [(row["rank"], row["state"], row["step"]) for row in table] == [
        (0, "finished", 60),
        (1, "<b>KeyError</b>: 3", 60),
    ]
    assert "<b>" not in table._repr_html_()
    many = status_table([make_run(num_ranks=20, num_steps=3)])
    assert len(many) == 1 and many[0]["rank"] == "20 ranks" and many[0]["step"] == "3 to 3"
    assert len(status_table([])) == 0


# ---------------------------------------------------------------- pages


def notebook(*figures: Any) -> Any:
    content = nbformat.v4.new_notebook(metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {}}})
    content.cells = [nbformat.v4.new_markdown_cell("# A tour"), nbformat.v4.new_code_cell("figure")]
    bundles = [pio.renderers["plotly_mimetype"].to_mimebundle(json.loads(figure.to_json())) for figure in figures]
    content.cells[1].outputs = [nbformat.v4.new_output("display_data", data=bundle) for bundle in bundles]
    content.cells[1].outputs.append(
        nbformat.v4.new_output("display_data", data={WIDGET: {"model_id": "1"}, "text/plain": "VBox()"})
    )
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


def test_a_page_begins_with_the_outputs_of_tagged_cells(tmp_path: Path) -> None:
    """In the order of the tags, without their code; they stay at their place, too."""
    content = notebook(plots.curves([make_run()]))
    for words in ("the numbers", "the answer"):
        cell = nbformat.v4.new_code_cell(f"# code of {words}", metadata={"tags": [words.split()[-1]]})
        cell.outputs = [nbformat.v4.new_output("stream", text=f"here is {words}")]
        content.cells.append(cell)
    nbformat.write(content, tmp_path / "a.ipynb")
    page = plots.export_html(tmp_path / "a.ipynb", tmp_path / "a.html", first=("answer", "numbers")).read_text()
    body = page[page.index("<body") :]
    found = [match[1] for match in re.finditer(r"here is the (answer|numbers)|Plotly\.newPlot", body)]
    assert found == ["answer", "numbers", None, "numbers", "answer"]
    assert body.count("# code of the answer") == 1


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
    with pytest.raises(ConfigError, match="is not a notebook"):
        plots.export_html(tmp_path / "text.ipynb", tmp_path / "a.html")


def test_a_notebook_keeps_the_data_of_a_figure_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own formatter as a cell's value, and by Plotly's renderer in `figure.show()`."""
    monkeypatch.setenv("PLOTLY_RENDERER", "")
    monkeypatch.setattr(pio.renderers, "_default_renderers", [])
    monkeypatch.setattr(pio.renderers, "_default_name", "")
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(renderer, "in_notebook", lambda: True)
    monkeypatch.setattr(renderer, "get_ipython", lambda: shell)
    monkeypatch.setattr(renderer, "display", lambda data, raw: kept.append(data))
    plots.use_notebook_renderer()
    figure = plots.curves([make_run()])
    assert shell.display_formatter.format(figure) == ({}, {})
    assert [list(data) for data in kept] == [[PLOTLY]]
    assert list(figure._repr_mimebundle_()) == [PLOTLY]


def test_a_first_live_view_does_not_wait_for_imports() -> None:
    """nbconvert and nbformat, which write pages, take a second to import, and SciPy's statistics more than half a second."""
    code = (
        "import sys, workbench.plots as plots; plots.LiveCurves().static(); plots.LiveTimeline; plots.use_notebook_renderer(); "
        "print(*sys.modules)"
    )
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "plotly.graph_objs" in names and {"nbconvert", "nbformat", "scipy.stats"}.isdisjoint(names)
