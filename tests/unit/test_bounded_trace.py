"""The trace of a long run is bounded by default. The part that is kept is right, and says what it covers."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from workbench.analysis.summary import run_critical_path, run_overlap
from workbench.costs import Compute, Lognormal
from workbench.errors import ConfigError
from workbench.settings import TRACE_STEPS, Settings
from workbench.trace.recorder import FileRecorder, MemoryRecorder, Recorder, trace_name
from workbench.trace.run import Run

NUM_STEPS = 100_000
SPAN_BYTES = 80  # of a line, at most
COMPUTE = Compute(forward_s=1e-3, backward_s=2e-3, update_s=1e-5, stragglers=(Lognormal(sigma=0.3),))


def tiny_steps(recorder: Recorder) -> None:
    """Forward, backward and a sum that is half hidden: 4 ms a step, 1 ms of 2 ms of communication under backward."""
    for step in range(NUM_STEPS):
        begin = step * 4e-3
        recorder.span("forward", "compute", begin, begin + 1e-3, step)
        recorder.span("backward", "compute", begin + 1e-3, begin + 3e-3, step)
        recorder.span("all_reduce", "comm", begin + 2e-3, begin + 4e-3, step, -1, 800)
        if step % 1000 == 0:
            recorder.end_step()
    recorder.close()


def test_a_file_of_many_steps_stays_below_its_bound(tmp_path: Path) -> None:
    tiny_steps(FileRecorder(tmp_path, 0, {}, Settings(steps=NUM_STEPS).trace_steps))
    assert (tmp_path / trace_name(0)).stat().st_size < 3 * TRACE_STEPS * SPAN_BYTES


def test_memory_does_too_and_what_is_kept_is_right() -> None:
    recorder = MemoryRecorder(0, Settings(steps=NUM_STEPS).trace_steps)
    tracemalloc.start()
    tiny_steps(recorder)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(recorder.spans) == 3 * TRACE_STEPS and held < 3 * TRACE_STEPS * 400
    run = Run.from_memory({"status": "finished"}, [recorder])
    found = run_overlap(run)
    assert found.step.tolist() == list(range(TRACE_STEPS))
    assert found.window_s == pytest.approx(np.full(TRACE_STEPS, 4e-3)), "the last step ends with its own last span"
    assert found.fraction == pytest.approx(0.5)
    assert f"steps 0 to {TRACE_STEPS - 1}" in str(found.table().caption)
    path = run_critical_path(run, slice(0, 50))
    assert path.per_step()[7] == pytest.approx({"forward": 1e-3, "backward": 1e-3, "all_reduce": 2e-3}, abs=1e-6)
    assert "steps, 0 to 49" in str(path.table().caption)
    with pytest.raises(ConfigError, match=f"0 to {TRACE_STEPS - 1}"):
        wb.plots.timeline(run, slice(TRACE_STEPS + 10, TRACE_STEPS + 20))


def simulated(**how: object) -> Run:
    problem = replace(wb.problems.get("digits-softmax"), train=range(10**6), test=None)
    return wb.simulate(wb.PipeSGD(width=2), problem, workers=2, compute=COMPUTE, timing_only=True, batch_size=1, **how)  # type: ignore[arg-type]


def test_a_run_of_part_of_a_trace_says_so_and_keeps_every_row_of_metrics() -> None:
    run = simulated(steps=TRACE_STEPS + 50)
    (note,) = (note for note in run.info["notes"] if "trace" in note)
    assert "first 2,000 of 2,050 steps" in note and "trace_steps=None" in note
    assert run.spans.table["step"].max() == TRACE_STEPS - 1 and len(run.steps()) == TRACE_STEPS + 50


def test_all_of_it_is_kept_where_asked_and_the_first_part_is_the_same() -> None:
    part, whole = simulated(steps=60, trace_steps=20), simulated(steps=60, trace_steps=None)
    assert not [note for note in whole.info["notes"] if "trace" in note] and whole.spans.table["step"].max() == 59
    mine, all_ = run_overlap(part, slice(0, 18)), run_overlap(whole, slice(0, 18))
    for name in ("window_s", "compute_s", "hidden_s", "exposed_s", "idle_s"):
        assert getattr(mine, name) == pytest.approx(getattr(all_, name), abs=1e-12)


def test_figures_of_part_of_a_trace_say_which_steps_it_covers() -> None:
    """A figure says that it is not of the whole run; with a whole trace it says nothing."""
    part, whole = simulated(steps=60, trace_steps=20), simulated(steps=60, trace_steps=None)
    covered = "trace of steps 0 to 19 of 60"
    for figure in (
        wb.plots.timeline(part),
        wb.plots.per_step(part),
        wb.plots.timelines([whole, part]),
        wb.plots.overlap_bars([whole, part]),
    ):
        assert figure.to_json().count(covered) == 1
    for figure in (wb.plots.timeline(whole), wb.plots.per_step(whole), wb.plots.overlap_bars([whole])):
        assert "trace of" not in figure.to_json()


def test_a_title_writes_large_numbers_of_steps_as_the_notes_do() -> None:
    run = simulated(steps=TRACE_STEPS + 50)
    assert "trace of steps 0 to 1,999 of 2,050" in wb.plots.per_step(run).layout.title.text
