"""What the interactive timeline is sent: spans, links, windows and differences; and the pages that hold it."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.unit.test_plots import ring_run
from workbench import plots
from workbench.analysis import critical_path, overlap
from workbench.bench.spans import write_trace
from workbench.errors import ConfigError
from workbench.plots.gantt.layout import MAX_RANKS, usual_time
from workbench.plots.trace_viewer.difference import step_difference
from workbench.plots.trace_viewer.payload import payload
from workbench.trace import MemoryRecorder, Run
from workbench.trace.kinds import CODES
from workbench.trace.spans import Spans

EVIL = "</script><img src=x onerror=document.title='harmed'>"
OF_PATH = {"start": "<f8", "end": "<f8"}
OF_SPANS = {**OF_PATH, "row": "<u2", "kind": "<u1", "bytes": "<f8"}


def columns_of(packed: dict[str, str], types: dict[str, str]) -> dict[str, Any]:
    """The numbers that a browser unpacks."""
    return {
        name: np.frombuffer(gzip.decompress(base64.b64decode(text)), types.get(name, "<i4"))
        for name, text in packed.items()
    }


def sent(run: Run, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    content = json.loads(json.dumps(payload([run], **options).content))["runs"][0]
    return content, columns_of(content["columns"], OF_SPANS)


def uneven_run(lengths_s: list[float], name: str = "SynchronousSGD", num_ranks: int = 2) -> Run:
    """A run whose steps take these times: half of each is a forward, a quarter an all-reduce, and a quarter is idle."""
    recorders = [MemoryRecorder(rank) for rank in range(num_ranks)]
    for recorder in recorders:
        begin = 0.0
        for step, length_s in enumerate(lengths_s):
            recorder.span("forward", "compute", begin, begin + length_s / 2, step)
            recorder.span("all_reduce", "comm", begin + length_s / 2, begin + length_s * 0.75, step, 0, 8)
            begin += length_s
        recorder.span("forward", "compute", begin, begin + 1e-6, len(lengths_s))
    return Run.from_memory({"id": name, "algorithm": {"name": name}, "num_workers": num_ranks}, recorders)


# ---------------------------------------------------------------- spans and links


def test_each_span_is_sent_once_with_its_row_and_its_times() -> None:
    run = ring_run(num_steps=6)
    content, columns = sent(run, steps=slice(2, 4))
    assert content["steps"] == [2, 3] and content["begins"] == pytest.approx([0.0, 0.01])
    assert content["traced"] == [0, 5] and content["length"] == pytest.approx(0.02)
    table = run.spans.select(steps=slice(2, 4)).table
    assert len(columns["start"]) == len(table)
    assert columns["start"] == pytest.approx(table["start_s"] - 0.02)
    assert columns["end"] == pytest.approx(table["end_s"] - 0.02)
    for name in ("kind", "step", "bucket", "bytes", "peer"):
        assert columns[name].tolist() == table[name].tolist(), name
    rows = [content["rows"][row] for row in columns["row"]]
    assert [row["rank"] for row in rows] == table["rank"].tolist()
    assert [row["lane"] for row in rows] == run.spans.select(steps=slice(2, 4)).lane_names.tolist()
    assert [row["computes"] for row in rows] == [row["lane"] == "compute" for row in rows]


def test_no_two_spans_of_a_row_overlap() -> None:
    content, columns = sent(ring_run())
    assert {row["number"] for row in content["rows"] if row["lane"] == "comm"} == {0, 1}, "send and recv at one time"
    for place in range(len(content["rows"])):
        mine = np.flatnonzero(columns["row"] == place)
        assert np.all(columns["start"][mine][1:] >= columns["end"][mine][:-1] - 1e-12)


def test_links_join_a_send_with_the_receive_of_its_peer() -> None:
    content, columns = sent(ring_run(), steps=slice(2, 4))
    assert len(columns["sent"]) == len(columns["received"]) == 2 * 2 * 2
    ranks = np.array([row["rank"] for row in content["rows"]])[columns["row"]]
    for send, receive in zip(columns["sent"], columns["received"], strict=True):
        assert (columns["kind"][send], columns["kind"][receive]) == (CODES["send"], CODES["recv"])
        assert columns["peer"][send] == ranks[receive] != ranks[send]
        assert columns["end"][send] == pytest.approx(columns["end"][receive])


def test_calls_of_a_collective_on_all_ranks_have_one_number() -> None:
    _, columns = sent(uneven_run([0.01] * 4, num_ranks=3))
    groups = columns["group"][columns["kind"] == CODES["all_reduce"]]
    assert np.unique(groups, return_counts=True)[1].tolist() == [3] * 4
    assert set(columns["group"][columns["kind"] == CODES["forward"]].tolist()) == {-1}


@pytest.mark.parametrize("ranks", [None, [1]])
def test_pieces_of_the_critical_path_name_their_spans(ranks: list[int] | None) -> None:
    run = ring_run()
    content, columns = sent(run, steps=slice(1, 5), ranks=ranks)
    path = columns_of(content["path"], OF_PATH)
    found = critical_path(run.spans, slice(1, 5), ranks)
    assert path["step"].tolist() == found.step.tolist() and path["rank"].tolist() == found.rank.tolist()
    assert path["end"] - path["start"] == pytest.approx(found.end_s - found.start_s)
    rows = np.array([row["rank"] for row in content["rows"]])
    for place in np.flatnonzero(path["span"] >= 0).tolist():
        span = path["span"][place]
        assert columns["kind"][span] == path["kind"][place] and rows[columns["row"][span]] == path["rank"][place]
        assert columns["start"][span] - 1e-9 <= path["end"][place] <= columns["end"][span] + 1e-9
    assert "path" not in payload([run], critical=False).content["runs"][0]


def test_a_long_run_is_sent_in_part(tmp_path: Path) -> None:
    run = Run.load(write_trace(tmp_path, num_ranks=3, num_steps=400))
    of_step = len(run.spans) // 400
    content, columns = sent(run, max_spans=50 * of_step)
    assert 40 <= len(content["steps"]) <= 50 and len(columns["start"]) <= 51 * of_step
    assert abs(content["steps"][len(content["steps"]) // 2] - 200) <= 5, "from the middle"
    content, _ = sent(run, steps=slice(100, 400), max_spans=50 * of_step)
    assert content["steps"][0] == 100 and 40 <= len(content["steps"]) <= 50, "from the first that was asked for"
    content, _ = sent(run, steps=slice(100, 103), max_spans=1)
    assert content["steps"] == [100], "one at least"


def test_steps_after_the_lowest_rank_has_left_are_shown() -> None:
    run = uneven_run([1.0] * 10)
    assert run.traces is not None and isinstance(run.traces[0].spans, tuple)
    left = replace(run.traces[0], spans=tuple(span for span in run.traces[0].spans if span[4] < 3))
    fewer = replace(run, info={**run.info, "shrunk": [{"step": 3, "ranks": [1]}]}, traces={**run.traces, 0: left})
    assert [sent(fewer, steps=steps)[0]["steps"] for steps in (slice(1, 3), slice(6, 8))] == [[1, 2], [6, 7]]


def test_what_is_not_there_is_refused() -> None:
    run = ring_run()
    with pytest.raises(ConfigError, match="0 runs: give one, or two to compare"):
        payload([])
    with pytest.raises(ConfigError, match="3 runs: give one"):
        payload([run] * 3)
    with pytest.raises(ConfigError, match=r"steps 0 to 5; ask for some"):
        payload([run], slice(20, 25))
    with pytest.raises(ConfigError, match=r"ranks=\[0, 7\].* has traces of ranks 0 to 1"):
        payload([run], ranks=[0, 7])
    with pytest.raises(ConfigError, match="has no trace"):
        payload([Run.from_memory({"id": "none"}, [])])


# ---------------------------------------------------------------- windows


def test_an_outlier_does_not_set_the_window_at_first() -> None:
    content, _ = sent(uneven_run([0.01] * 4 + [0.2] + [0.01] * 5))
    begin_s, end_s = content["window"]
    assert [begin_s, end_s] == pytest.approx([0.24, 0.29]), "the five steps after it"
    assert content["unusual"] == [[4, 20.0]]
    usual, _ = sent(uneven_run([0.01] * 10))
    assert usual["unusual"] == [] and usual["window"][1] - usual["window"][0] == pytest.approx(0.05)


def test_the_usual_time_is_the_longest_stretch_without_an_outlier() -> None:
    def found(*lengths: float) -> tuple[float, float, list[int]]:
        begins = np.append(0.0, np.cumsum(lengths))
        begin_s, end_s, others = usual_time(dict(enumerate(begins[:-1].tolist())), float(begins[-1]))
        return round(begin_s, 6), round(end_s, 6), list(others)

    assert found(1, 1, 1) == (0, 3, [])
    assert found(9, 1, 1, 1) == (9, 12, [0])
    assert found(1, 1, 9, 1, 1, 1) == (11, 14, [2])
    assert found(1, 1, 1, 9) == (0, 3, [3])
    assert found(1, 2.9, 1) == (0, 4.9, []), "less than three times the median"
    assert found(1, 100) == (0, 101, []), "of two steps, none is usual"
    assert usual_time({}, 1.0) == (0.0, 1.0, {})


def test_a_figure_says_which_step_is_outside_its_axis() -> None:
    run = uneven_run([0.01] * 5 + [0.2] + [0.01] * 4)
    figure = plots.timeline(run)
    begin, end = figure.layout.xaxis.range
    assert end - begin == pytest.approx(40), "milliseconds: four of its five steps"
    assert "step 5 takes 20 times the median: double-click to see all steps" in figure.layout.annotations[0].text
    asked = plots.timeline(run, slice(4, 8))
    assert asked.layout.xaxis.range[1] == pytest.approx(230), "steps that were asked for are all shown"
    assert "median" not in asked.layout.annotations[0].text


# ---------------------------------------------------------------- many ranks as a figure


def test_a_figure_of_many_ranks_has_one_row_for_each() -> None:
    run = uneven_run([0.01] * 8, num_ranks=MAX_RANKS + 1)
    figure = plots.timeline(run)
    assert list(figure.layout.yaxis.ticktext) == [f"rank {rank} " for rank in range(MAX_RANKS + 1)]
    tops, axis = [], np.array(figure.layout.yaxis.tickvals)
    for bar in figure.data:
        nearest = axis[np.abs(np.array(bar.y)[:, None] - axis).argmin(axis=1)]
        tops.append((bar.name, float(np.sign(np.array(bar.y) - nearest)[0])))
        assert np.all(np.abs(bar.y - nearest) + np.array(bar.width) / 2 < (axis[1] - axis[0]) / 2), "in its row"
    assert dict(tops) == {"forward": -1.0, "all-reduce": 1.0}, "computation above communication"
    few = uneven_run([0.01] * 8, num_ranks=MAX_RANKS)
    assert len(plots.timeline(few).layout.yaxis.ticktext) == 2 * MAX_RANKS
    assert len(plots.timeline(few, folded=True).layout.yaxis.ticktext) == MAX_RANKS
    assert len(plots.timeline(run, folded=False).layout.yaxis.ticktext) == 2 * (MAX_RANKS + 1)
    assert len(plots.timeline(run, ranks=[8]).layout.yaxis.ticktext) == 2, "ranks that were asked for are unfolded"


def test_a_figure_of_64_ranks_is_bounded_and_its_areas_are_times(tmp_path: Path) -> None:
    run = Run.load(write_trace(tmp_path, num_ranks=64, num_steps=40))
    figure = plots.timeline(run, slice(None))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert len(figure.layout.yaxis.ticktext) == 64 and sum(len(bar.x) for bar in bars) <= 20_000
    backward = next(bar for bar in bars if bar.name == "backward")
    areas = (np.array(backward.x) * np.array(backward.width)).sum()
    forward = next(bar for bar in bars if bar.name == "forward")
    spans = {kind: run.spans.select(kinds=[kind]).table for kind in ("forward", "backward")}
    times = {kind: float((table["end_s"] - table["start_s"]).sum()) for kind, table in spans.items()}
    ratio = areas / (np.array(forward.x) * np.array(forward.width)).sum()
    assert ratio == pytest.approx(times["backward"] / times["forward"], rel=0.02)


# ---------------------------------------------------------------- two runs


def test_the_difference_of_two_runs_by_hand() -> None:
    first, second = uneven_run([0.01, 0.03, 0.01, 0.03]), uneven_run([0.03, 0.05, 0.03, 0.05])
    table = step_difference(first.spans, second.spans, (slice(0, 4), slice(0, 4)))
    rows = {row["part"]: row for row in table}
    assert list(rows) == ["step", "computation alone", "exposed communication", "waiting (idle)"]
    step = rows["step"]
    assert (step["first_s"], step["second_s"], step["difference_s"]) == pytest.approx((0.02, 0.04, 0.02))
    # Both variances are 4e-4/3, so the difference has the standard error sqrt(2 * 1e-4 / 3), with 6 degrees of freedom
    half_s = 2.446912 * (2e-4 / 3) ** 0.5
    assert (step["low_s"], step["high_s"]) == pytest.approx((0.02 - half_s, 0.02 + half_s), abs=1e-7)
    for part, share in (("computation alone", 0.5), ("exposed communication", 0.25), ("waiting (idle)", 0.25)):
        assert rows[part]["difference_s"] == pytest.approx(0.02 * share), part
    parts = [row["difference_s"] for part, row in rows.items() if part != "step"]
    assert sum(parts) == pytest.approx(step["difference_s"]), "the parts fill the step"
    assert "4 and 4 steps" in table.caption and "repetitions" in table.footnotes[0]


def test_the_difference_is_that_of_the_overlap_of_the_steps_shown() -> None:
    first, second = ring_run(), uneven_run([0.01] * 6)
    viewer = plots.TraceViewer([first, second], slice(1, 5), names=["ring", "sum"])
    means = [overlap(run.spans, slice(1, 5)).per_step() for run in (first, second)]
    rows = {row["part"]: row for row in viewer.difference or ()}
    for part, name in (("step", "window_s"), ("exposed communication", "exposed_s"), ("waiting (idle)", "idle_s")):
        assert rows[part]["first_s"] == pytest.approx(means[0][name])
        assert rows[part]["second_s"] == pytest.approx(means[1][name])
    shown = viewer.content["difference"]
    assert shown["titles"][1:3] == ["ring", "sum"] and len(shown["cells"]) == len(rows)
    assert plots.TraceViewer(first).difference is None and "difference" not in plots.TraceViewer(first).content


def test_one_step_has_no_interval() -> None:
    run = uneven_run([0.01] * 4)
    (step, *_) = step_difference(run.spans, run.spans, (slice(0, 1), slice(1, 2)))
    assert (step["difference_s"], step["low_s"], step["interval"]) == (pytest.approx(0.0), None, None)
    equal = step_difference(run.spans, run.spans)[0]
    assert equal["low_s"] <= 0 <= equal["high_s"]
    assert len(step_difference(Spans.from_rows(0, []), Spans.from_rows(0, []))) == 0


# ---------------------------------------------------------------- pages


def test_a_page_is_whole_and_names_end_no_script(tmp_path: Path) -> None:
    page = plots.TraceViewer(uneven_run([0.01] * 4, EVIL)).save(tmp_path / "new" / "page.html")
    text = page.read_text()
    assert not re.search(r"(src|href)=.?https?:", text), "it loads nothing"
    data = re.findall(r'<script type="application/json" id="timeline-data">(.*?)</script>', text)
    assert json.loads(data[0])["runs"][0]["name"] == EVIL
    assert text.count("</script>") == 2 and "<title>&lt;/script&gt;" in text


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    viewer = plots.TraceViewer(ring_run())
    frame = viewer._repr_html_()
    (document,) = re.findall(r'srcdoc="(.*?)"', frame, re.DOTALL)
    assert "mount(document" in html.unescape(document) and frame.startswith("<iframe") and "<script" not in frame
