"""Numbers from runs: interval arithmetic against a twin that counts cells, summaries against numbers computed by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.analysis import Table, compare, overlap, summary, time_to_accuracy, time_to_loss
from workbench.analysis.overlap import measure_before, union
from workbench.analysis.summary import mean_step_s, step_seconds, typical_window
from workbench.analysis.table import Column, num_bytes, percent, seconds
from workbench.errors import ConfigError
from workbench.trace import MemoryRecorder, Run, Spans
from workbench.trace.kinds import COMMUNICATION_KINDS, COMPUTE_KINDS

Row = tuple[str, str, float, float, int, int, int, int]


def span(kind: str, start_s: float, end_s: float, step: int = 0) -> Row:
    lane = "comm" if kind in COMMUNICATION_KINDS else "compute"
    return (kind, lane, start_s, end_s, step, -1, 0, -1)


# ---------------------------------------------------------------- overlap


LENGTHS = ("window_s", "compute_s", "communication_s", "hidden_s", "exposed_s", "load_s", "idle_s")


def count_cells(rows: list[Row]) -> dict[int, dict[str, int]]:
    """step -> seconds, by looking at every whole second: the slow, readable twin of `overlap` for whole numbers."""
    steps = [row for row in rows if row[4] >= 0 and row[0] != "evaluate"]
    beginners = [row for row in steps if row[0] in ("load", "forward")] or steps
    starts = {step: min(int(row[2]) for row in beginners if row[4] == step) for step in {row[4] for row in beginners}}
    order = sorted(starts, key=lambda step: (starts[step], step))
    found = {}
    for step, following in zip(order, [*order, None][1:], strict=True):
        stop = starts[following] if following is not None else max(int(row[3]) for row in steps)
        cells = dict.fromkeys(LENGTHS, 0)
        for second in range(starts[step], stop):
            running = {row[0] for row in rows if row[2] <= second < row[3]}
            computing, communicating = running & set(COMPUTE_KINDS), running & set(COMMUNICATION_KINDS)
            if "evaluate" in running:
                continue
            cells["window_s"] += 1
            cells["compute_s"] += bool(computing)
            cells["communication_s"] += bool(communicating)
            cells["hidden_s"] += bool(computing and communicating)
            cells["exposed_s"] += bool(communicating and not computing)
            loading = "load" in running and not computing and not communicating
            cells["load_s"] += loading
            cells["idle_s"] += not computing and not communicating and not loading
        found[step] = cells
    return found


KINDS_DRAWN = ("forward", "backward", "apply", "evaluate", "wait", "all_reduce", "send", "encode", "load")
drawn_spans = st.lists(
    st.builds(
        lambda kind, start, length, step: span(kind, float(start), float(start + length), step),
        st.sampled_from(KINDS_DRAWN),
        st.integers(0, 40),
        st.integers(0, 12),
        st.integers(-1, 3),
    ),
    max_size=16,
)


@settings(max_examples=300, deadline=None)
@given(rows_of_rank=st.lists(drawn_spans, max_size=3))
def test_overlap_equals_counting_every_second(rows_of_rank: list[list[Row]]) -> None:
    found = overlap(Spans.concatenate(Spans.from_rows(rank, rows) for rank, rows in enumerate(rows_of_rank)))
    for rank, rows in enumerate(rows_of_rank):
        part, expected = found.of_rank(rank), count_cells(rows)
        assert part.step.tolist() == list(expected)
        for name in LENGTHS:
            np.testing.assert_allclose(
                getattr(part, name), [cells[name] for cells in expected.values()], atol=1e-9, err_msg=name
            )
    assert found.fraction is None or 0 <= found.fraction <= 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=12), st.integers(-1, 27))
def test_union_and_measure(drawn: list[tuple[int, int]], until: int) -> None:
    start_s = np.array([start for start, _ in drawn], float)
    end_s = np.array([start + length for start, length in drawn], float)
    starts, ends = union(start_s, end_s)
    assert np.all(starts[1:] > ends[:-1])
    covered = {cell for start, length in drawn for cell in range(start, start + length)}
    assert {cell for a, b in zip(starts, ends, strict=True) for cell in range(int(a), int(b))} == covered
    assert measure_before(np.array([until]), starts, ends)[0] == sum(cell < until for cell in covered)


def test_communication_that_runs_into_the_next_step_counts_there() -> None:
    rows = [
        span("forward", 0, 4, 0),
        # 1 s hidden in step 0; 2 s exposed in it, until 6; 2 s hidden in step 1, 1 s exposed
        span("all_reduce", 3, 9, 0),
        span("forward", 6, 8, 1),
        span("evaluate", 10, 50, 1),
        span("apply", 50, 51, 1),
    ]
    found = overlap(Spans.from_rows(3, rows))
    assert found.rank.tolist() == [3, 3] and found.step.tolist() == [0, 1]
    assert found.hidden_s.tolist() == [1, 2] and found.exposed_s.tolist() == [2, 1]
    assert found.compute_s.tolist() == [4, 3] and found.idle_s.tolist() == [0, 1] and found.window_s.tolist() == [6, 5]
    assert found.fraction == 0.5
    assert overlap(Spans.from_rows(3, rows), steps=slice(1, None)).fraction == pytest.approx(2 / 3)
    assert "50.0 %" in str(found) and ">all</td>" in found._repr_html_()


def test_what_is_one_after_the_other_hides_nothing_at_all() -> None:
    """Also where the seconds are no whole numbers, and sums of them are rounded."""
    ends = np.cumsum([0.1] * 25).tolist()
    kinds = ("forward", "backward", "all_reduce", "apply")
    rows = [span(kinds[at % 4], ends[at], ends[at + 1], at // 4) for at in range(24)]
    found = overlap(Spans.from_rows(0, rows))
    assert found.hidden_s.tolist() == found.idle_s.tolist() == [0] * 6
    assert found.exposed_s == pytest.approx([0.1] * 6)


def test_without_communication_the_overlap_is_none_and_nothing_is_nan() -> None:
    alone = overlap(Spans.from_rows(0, [span("forward", 0, 1), span("apply", 1, 2)]))
    assert alone.fraction is None and alone.per_step()["exposed_s"] == 0
    nothing = overlap(Spans.concatenate([]))
    assert nothing.fraction is None and nothing.per_step() == {} and nothing.num_steps == 0
    assert str(nothing).count("\N{EN DASH}") == 8


def test_a_million_spans_take_a_couple_of_seconds() -> None:
    num_steps, num_buckets = 9000, 25
    step = np.repeat(np.arange(num_steps), num_buckets)
    rows = [span("forward", begin, begin + 0.7, begin) for begin in range(num_steps)]
    buckets = np.tile(np.arange(num_buckets), num_steps)
    starts = step + 0.2 + buckets * 0.02
    rows += [
        span("send", start, start + 0.05, int(number)) for start, number in zip(starts.tolist(), step, strict=True)
    ]
    part = Spans.from_rows(0, rows)
    spans = Spans.concatenate(Spans(_as_rank(part.table, rank), part.lanes) for rank in range(5))
    assert len(spans) > 1_000_000
    begin = time.process_time()
    found = overlap(spans)
    assert time.process_time() - begin < 2.5
    np.testing.assert_allclose(found.hidden_s, 0.5, rtol=1e-6)
    np.testing.assert_allclose(found.exposed_s, 0.03, rtol=1e-6)


def _as_rank(table: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    table = table.copy()
    table["rank"] = rank
    return table


def test_analysing_and_drawing_load_no_torch() -> None:
    pytest.importorskip("plotly", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")
    code = "import sys, workbench.analysis, workbench.plots.gantt.figures; print({'torch', 'scipy', 'sklearn'} & {*sys.modules})"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


# ---------------------------------------------------------------- summary and comparison


def run_of(
    name: str = "PipeSGD", accuracies: tuple[float, ...] = (0.5, 0.95, 0.9), num_steps: int = 30, **info: Any
) -> Run:
    """Two ranks; a step takes 0.1 s but the first, which takes 5 s, and evaluations are spread over the run."""
    recorders = [MemoryRecorder(rank) for rank in range(2)]
    every = num_steps // len(accuracies)
    for recorder in recorders:
        for step in range(num_steps):
            end = 5.0 + 0.1 * step
            recorder.span("forward", "compute", end - 0.1, end - 0.04, step)
            recorder.span("all_reduce", "comm", end - 0.06, end - 0.02, step, 0, 4000)
            common = {"step": step, "seconds": end, "samples": 64 * (step + 1), "bytes_sent": 4000 * (step + 1)}
            recorder.metrics(
                {**common, "staleness": min(step, 1), "loss": 2.0 - 0.01 * step, "num_samples": 32, "lr": 0.1}
            )
            if (step + 1) % every == 0:
                accuracy = accuracies[(step + 1) // every - 1]
                numbers = {
                    "loss_sum": 100 * (1.5 - accuracy),
                    "correct": round(100 * accuracy),
                    "judged": 100,
                    "count": 100,
                }
                recorder.metrics({**common, "evaluation": numbers})
    usual = {
        "algorithm": {"name": name, "settings": {"width": 2}},
        "problem": {"name": "digits-mlp"},
        "runtime": "mpi",
        "num_workers": 2,
    }
    return Run.from_memory({**usual, "status": "finished", "clock": "wall", "id": f"run-{name}", **info}, recorders)


def test_summary_in_numbers_done_in_the_head() -> None:
    found = summary(run_of())
    assert json.loads(json.dumps(found)) == found
    exact = {
        "algorithm": "PipeSGD",
        "problem": "digits-mlp",
        "runtime": "mpi",
        "workers": 2,
        "steps": 30,
        "samples": 1920,
        "status": "finished",
    }
    assert {key: found[key] for key in exact} == exact
    assert found["bytes_sent"] == 2 * 120_000 and found["staleness_max"] == 1 and found["run"] == "run-PipeSGD"
    near = {
        "accuracy": 0.9,
        "loss": 0.6,
        "seconds": 7.9,
        "step_seconds_median": 0.1,
        "train_loss": 2.0 - 0.28,
        "overlap": 0.5,
    }
    near |= {"step_s": 0.1, "compute_s": 0.06, "hidden_s": 0.02, "exposed_s": 0.02, "idle_s": 0.02}
    # The last step's window ends with its last span
    assert {key: found[key] for key in near} == pytest.approx(near, rel=0.04)


def test_the_first_steps_and_gaps_do_not_count_as_usual_steps() -> None:
    recorder = MemoryRecorder(0)
    ends = [3.0, 4.0, 4.1, 4.2, 14.2]
    for step, end in zip([0, 1, 2, 3, 7], ends, strict=True):
        recorder.metrics(
            {
                "step": step,
                "seconds": end,
                "samples": 0,
                "bytes_sent": 0,
                "staleness": None,
                "loss": None,
                "num_samples": 0,
            }
        )
    run = Run.from_memory({}, [recorder])
    assert step_seconds(run) == pytest.approx([1.0, 0.1, 0.1])
    assert summary(run)["train_loss"] is None and summary(run)["staleness_max"] is None


def test_slow_steps_of_a_warm_up_are_left_out() -> None:
    recorder = MemoryRecorder(0)
    seconds_ = np.cumsum([9.0] * 5 + [0.1] * 45)  # the first tenth is slow
    for step, end in enumerate(seconds_.tolist()):
        recorder.span("forward", "compute", end - 0.05, end, step)
        recorder.metrics({"step": step, "seconds": end, "samples": 0, "bytes_sent": 0, "loss": None, "num_samples": 0})
    run = Run.from_memory({}, [recorder])
    assert len(step_seconds(run)) == 45 and step_seconds(run).max() == pytest.approx(0.1)
    assert summary(run)["compute_s"] == pytest.approx(0.05) and summary(run)["step_s"] == pytest.approx(0.1, rel=0.02)


def test_a_trace_of_the_first_steps_alone_is_enough_for_the_overlap() -> None:
    run = run_of(num_steps=300)
    traced = [row for rank, trace in (run.traces or {}).items() for row in trace.spans if row[4] < 4 and rank == 0]
    recorder = MemoryRecorder(0)
    recorder.spans, recorder.rows = traced, run.metrics[0]
    found = summary(Run.from_memory(run.info, [recorder]))
    assert (
        found["steps"] == 300 and found["overlap"] == pytest.approx(0.5) and found["exposed_s"] == pytest.approx(0.02)
    )


def test_a_run_that_recorded_nothing_has_a_summary() -> None:
    found = summary(Run.from_memory({"algorithm": {"name": "PipeSGD"}, "status": "failed"}, [MemoryRecorder(0)]))
    assert found["steps"] == 0 and found["accuracy"] is None and found["seconds"] is None and found["overlap"] is None
    json.dumps(found, allow_nan=False)


def test_time_to_a_target_is_interpolated_between_evaluations() -> None:
    run = run_of()
    assert time_to_accuracy(run, 0.94) == pytest.approx(5.0 + 1.9)
    assert time_to_accuracy(run, 0.5) == pytest.approx(5.9)
    assert time_to_accuracy(run, 0.96) is None
    assert time_to_loss(run, 0.6) == pytest.approx(6.8) and time_to_loss(run, 0.5) is None


def test_comparison_shows_runs_side_by_side() -> None:
    table = compare(
        [
            run_of("PipeSGD"),
            run_of("<script>alert(1)</script>", (0.2, 0.3), problem={"name": "x", "note": "synthetic & small"}),
        ]
    )
    assert [row["algorithm"] for row in table.rows] == ["PipeSGD", "<script>alert(1)</script>"]
    assert "<script>" not in table._repr_html_() and "synthetic &amp; small" in table._repr_html_()
    text = str(table).splitlines()
    assert (
        text[0] == "synthetic & small" and "PipeSGD(width=2)" in text[3] and "90.0 %" in text[3] and "240 kB" in text[3]
    )
    times = table.time_to_accuracy(0.95)
    assert [row["seconds"] for row in times] == [pytest.approx(6.9), None] and times[0]["step"] == 19
    assert "at least 95.0 %" in str(times) and str(times).splitlines()[-1].endswith("\N{EN DASH}")
    assert [row["seconds"] is None for row in table.time_to_loss(0.7)] == [False, True]


def test_tables_write_units() -> None:
    table = Table(
        [{"a": 0.00123, "b": None}],
        (Column("a", "time", seconds), Column("b", "sent", num_bytes), Column("c", "share", percent)),
    )
    assert str(table).splitlines()[2].split() == ["1.23", "ms", "\N{EN DASH}", "\N{EN DASH}"]
    assert [num_bytes(value) for value in (0, 999, 1000, 2.5e9)] == ["0 B", "999 B", "1.00 kB", "2.50 GB"]
    assert len(table) == 1 and table[0]["a"] == 0.00123


def steps_that_end_at(*ends_s: float, first: int = 0) -> Run:
    row = {"samples": 0, "bytes_sent": 0, "staleness": None, "loss": None, "num_samples": 0}
    rows = [{**row, "step": step, "seconds": end_s} for step, end_s in enumerate(ends_s, first)]
    return Run(info={}, metrics={0: rows})


def test_mean_seconds_of_the_steps_after_the_first_ones() -> None:
    assert mean_step_s(steps_that_end_at(10.0, 11.0, 13.0, 17.0), 1) == 3.0
    with pytest.raises(ConfigError, match="at least 5 are needed"):
        mean_step_s(steps_that_end_at(1.0, 2.0, 3.0, 4.0), 3)


def test_the_typical_window_is_neither_the_quickest_nor_the_slowest() -> None:
    run = steps_that_end_at(9.0, 10.0, 16.0, 18.0, 21.0)  # steps of 1, 6, 2 and 3 s after the first
    assert typical_window(run, 1) == slice(3, 4), "the lower of two in the middle"
    assert typical_window(run, 2) == slice(1, 3), "7, 8 and 5 s"
    with pytest.raises(ConfigError, match="fewer than 5 after the warm-up"):
        typical_window(run, 5)
    resumed = steps_that_end_at(9.0, 10.0, 16.0, 18.0, 21.0, first=100)
    assert typical_window(resumed, 1) == slice(103, 104), "steps, not places in the record"
