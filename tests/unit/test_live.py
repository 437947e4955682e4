"""Views of running trainings: buttons, several runs at once, the newest steps."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench import plots
from workbench.errors import ConfigError, WorkbenchError
from workbench.plots.html import PLOTLY
from workbench.plots.live import curves, timeline
from workbench.plots.live.buttons import RunButtons, parts_of
from workbench.plots.live.curves import status_table
from workbench.plots.live.header import header
from workbench.plots.live.moving_figure import MovingFigure
from workbench.plots.trace_viewer.newest import NUM_STEPS, newest_steps
from workbench.trace import FileRecorder, Run, new_run, update_run
from workbench.trace.tail import read_tail

pytestmark = pytest.mark.notebooks


class Writer:
    """A run of two ranks that is written step by step; each step has a forward, `num_sums` all-reduces and an apply."""

    def __init__(self, folder: Path, num_sums: int = 1, **info: Any) -> None:
        known = {
            "algorithm": {"name": "PipeSGD", "settings": {}},
            "problem": {"name": "digits"},
            "num_workers": 2,
            "status": "running",
        }
        self.folder = new_run({**known, **info}, folder)
        self.recorders = [FileRecorder(self.folder, rank, {"rank": rank, "host": "here"}) for rank in range(2)]
        self.num_sums, self.num_steps = num_sums, 0

    def steps(self, number: int, loss: float = 1.0) -> Writer:
        """Write that many more."""
        for _ in range(number):
            step, begin = self.num_steps, 0.01 * self.num_steps
            for rank, recorder in enumerate(self.recorders):
                recorder.span("forward", "compute", begin, begin + 0.002, step)
                for bucket in range(self.num_sums):
                    recorder.span("all_reduce", "comm", begin + 0.002, begin + 0.008, step, bucket, 4096)
                recorder.span("apply", "compute", begin + 0.008, begin + 0.009, step)
                row = {
                    "step": step,
                    "seconds": begin,
                    "samples": 64 * (step + 1),
                    "bytes_sent": 4096 * (step + 1),
                    "staleness": 0,
                }
                recorder.metrics({**row, "loss": loss / (step + 1), "num_samples": 32, "lr": 0.1, "rank": rank})
                recorder.end_step()
            self.num_steps += 1
        return self

    def end(self, status: str = "finished") -> Writer:
        """No more."""
        self.close()
        update_run(self.folder, status=status)
        return self

    def close(self) -> None:
        """Close the files; the run stays a running one."""
        for recorder in self.recorders:
            recorder.close()


class Display:
    """Where a view is shown: what was sent there."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def update(self, data: Any, raw: bool = False) -> None:
        self.sent.append(data if raw else data.data)


# ---------------------------------------------------------------- buttons


def test_one_button_pauses_and_resumes_as_the_run_does() -> None:
    asked: list[str] = []
    buttons = RunButtons(None, lambda: asked.append("pause"), lambda: asked.append("resume"))
    assert len(buttons.widget.children) == 2, "no Stop where nothing can be stopped"
    buttons.pause.click()
    buttons.show(paused=False)
    assert (asked, buttons.pause.description) == (["pause"], "Pausing"), "the ranks have not heard yet"
    buttons.show(paused=True)
    assert buttons.pause.description == "Resume"
    buttons.pause.click()
    assert (asked, buttons.pause.description) == (["pause", "resume"], "Resuming")
    buttons.show(paused=False)
    assert buttons.pause.description == "Pause"
    buttons.end()
    assert buttons.pause.disabled


def test_what_a_button_cannot_do_is_one_line_beside_it() -> None:
    def refuse() -> None:
        raise ConfigError("<this> cannot be stopped\nmore")

    buttons = RunButtons(refuse)
    buttons.stop.click()
    assert not buttons.stop.disabled and buttons.stop.description == "Stop"
    assert "<b>ConfigError:</b> &lt;this&gt; cannot be stopped</span>" in buttons._error.value


def test_a_paused_run_is_named_so_in_the_view(tmp_path: Path) -> None:
    run = Run.load(Writer(tmp_path).steps(3).end("paused").folder)
    view = plots.LiveCurves(on_pause=lambda: None, on_resume=lambda: None)
    view.update([run])
    assert view._buttons.pause.description == "Resume"
    assert [row["state"] for row in status_table([run])] == ["paused", "paused"]
    assert all(0 <= row["age_s"] < 60 for row in status_table([run]))


# ---------------------------------------------------------------- several runs


def test_runs_that_differ_in_their_seed_are_a_mean_in_a_band_and_no_row_is_lost(tmp_path: Path) -> None:
    writers = [Writer(tmp_path, settings={"seed": seed}) for seed in range(3)]
    for seed, writer in enumerate(writers):
        writer.steps(2, 1.0 + seed)
    done = [Writer(tmp_path, algorithm={"name": "LocalSGD", "settings": {}}).steps(5).end()]
    view = plots.watch(*[Run.load(writer.folder) for writer in (*writers, *done)], x="steps")

    def grow(seed: int) -> None:
        for _ in range(20):
            writers[seed].steps(5, 1.0 + seed)
            time.sleep(0.01)
        writers[seed].end()

    threads = [threading.Thread(target=grow, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    assert view._ended.wait(30)
    mean = next(trace for trace in view.static().data if trace.name == "PipeSGD (mean of 3)")
    assert mean.x.tolist() == list(range(102))
    assert mean.y[-1] == pytest.approx(2 / 102, rel=0.05), "the mean of 1, 2 and 3"
    (band, *_) = (trace for trace in view.static().data if trace.fill == "toself")
    assert (min(band.y), max(band.y)) == (pytest.approx(1 / 102, rel=0.05), pytest.approx(3.0, rel=0.6))
    assert any(trace.name == "LocalSGD" for trace in view.static().data)


def test_a_handle_is_told_who_shows_it_and_settles_the_view(tmp_path: Path) -> None:
    writer = Writer(tmp_path).steps(2)
    views: list[Any] = []

    reads = 0

    class Handle:
        folder = writer.folder
        shown_by = staticmethod(views.append)

        @property
        def run(self) -> Run:
            nonlocal reads
            reads += 1
            return Run.load(self.folder)

    assert [len(make([Handle()], "steps").data[0].x) for make in (plots.curves, plots.convergence)] == [2, 2]
    reads = 0
    view = plots.watch(Handle(), x="steps")
    assert views == [view]
    view.settle()
    assert not view._ended.is_set(), "it goes on"
    writer.steps(3).end()
    view.settle()
    assert len(view.static().data[0].x) == 5
    assert reads == 1, "the whole record is read once, what is new of it by each look"


def test_a_picture_that_a_thread_left_is_sent_again_by_the_cell_that_waits(tmp_path: Path) -> None:
    """nbclient drops output for a cell that is over, and the thread's output may come that late."""

    writer = Writer(tmp_path).steps(5)
    for view in (plots.watch(Run.load(writer.folder)), plots.LiveTimeline(writer.folder)):
        view._handle = shown = Display()
        if writer.num_steps == 5:
            writer.steps(1).end()
        view.finish()  # as the thread does
        before = len(shown.sent)
        view.settle()
        assert (before, len(shown.sent)) == (1, 2)


def test_why_curves_are_no_longer_drawn_stays_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path).steps(3)
    looks = 0

    def look() -> list[Run]:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise OSError("<stale>")
        return [Run.load(writer.folder)]

    view = plots.LiveCurves(x="steps")
    view._handle = shown = Display()
    view.follow(look).join(20)
    assert [list(data) for data in shown.sent] == [["text/html"]]
    assert (
        "Not updated any more" in shown.sent[0]["text/html"]
        and "<b>OSError:</b> &lt;stale&gt;" in shown.sent[0]["text/html"]
    )
    writer.steps(2).end()
    view.settle()
    assert list(shown.sent[-1]) == [PLOTLY] and len(view.static().data[0].x) == 5, (
        "who waits for the run has the whole curve"
    )

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no room")

    view = plots.LiveCurves()
    view._handle = shown = Display()
    monkeypatch.setattr(curves, "convergence", broken)
    view.follow(lambda: [Run.load(writer.folder)]).join(20)
    assert view._ended.is_set() and "<b>ValueError:</b> no room" in shown.sent[-1]["text/html"]


def test_the_header_says_how_far_a_run_is_and_how_it_ended(tmp_path: Path) -> None:
    writer = Writer(tmp_path, num_steps=40, settings={"epochs": 4}).steps(10)
    running = plain(header([Run.load(writer.folder)]))
    assert "running" in running and "step 10 of 40" in running and "epoch 1.0 of 4" in running
    assert "00:00 left" in running, "30 steps of 10 ms"
    assert "loss 0.1" in running and str(writer.folder) in running
    slow = Run(
        {"status": "running", "num_steps": 200}, {0: [{"step": n, "seconds": 2.0 * n, "loss": 1.0} for n in (9, 19)]}
    )
    assert "step 20 of 200" in plain(header([slow])) and "06:00 left" in plain(header([slow]))
    for recorder in writer.recorders:
        recorder.close()
    for rank, error in enumerate(("PeerFailed: rank 1 failed", "ValueError: <no> room")):
        (writer.folder / f"failed-{rank}.json").write_text(json.dumps({"rank": rank, "error": error}))
    update_run(writer.folder, status="failed", error="PeerFailed: rank 1 failed")
    failed = header([Run.load(writer.folder)])
    assert "rank 1: ValueError: &lt;no&gt; room" in failed and "left" not in plain(failed), "the rank with the cause"
    many = plain(header([Run.load(writer.folder)] * 15))
    assert many.count("step 10 of 40") == 12 and "and 3 more runs" in many


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_a_notebook_keeps_the_header_and_no_plotly_js(tmp_path: Path) -> None:
    writer = Writer(tmp_path, num_steps=40).steps(10)
    view = plots.watch(Run.load(writer.folder))
    view._header, view._handle = first, second = Display(), Display()
    writer.steps(1).end()
    view.settle()
    view.finish()
    assert "step 11 of 40" in first.sent[-1] and "finished" in first.sent[-1]
    assert PLOTLY in second.sent[-1]
    figure = MovingFigure(view.static())
    states = [len(json.dumps(part.get_state(), default=str)) for part in parts_of(figure.widget)]
    assert sum(states) < 20_000, "what papermill would save for each figure"
    asked: list[tuple[Any, Any]] = []
    object.__setattr__(figure.widget, "send", lambda content, buffers: asked.append((content, buffers)))
    figure.widget._answer(None, {"want": "plotly"}, [])
    assert asked[0][0] == {"plotly": True} and b"Plotly" in asked[0][1][0] and len(asked[0][1][0]) > 1_000_000


def test_there_must_be_something_to_watch() -> None:
    with pytest.raises(ConfigError, match=r"no run to watch: give at least one, such as watch\(run\)"):
        plots.watch()


# ---------------------------------------------------------------- the newest steps


def sent(view: plots.LiveTimeline) -> Any:
    """What the browser was sent of the run last."""
    content = json.loads(view._moving._source.value)
    assert content["live"], "the window follows, until the reader moves it"
    return content["runs"][0]


def test_the_end_of_a_trace_is_read_without_the_rest(tmp_path: Path) -> None:
    folder = Writer(tmp_path).steps(200).end().folder
    with (folder / "trace-00001.jsonl").open("a") as file:
        file.write('["forward", "compute", 2.0')  # in the middle of a write
    tail, whole = read_tail(folder, 3000), Run.load(folder)
    assert tail.headers[1]["host"] == "here"
    for rank in range(2):
        spans = [row["step"] for row in tail.spans.of_rank(rank).table]
        assert 10 < len(spans) < 100
        assert spans == [row["step"] for row in whole.spans.of_rank(rank).table][-len(spans) :]
    assert len(read_tail(folder, 10**9).spans.table) == len(whole.spans.table)


@pytest.mark.parametrize(("num_sums", "steps"), [(1, slice(36, 39)), (13, slice(37, 39)), (60, slice(38, 39))])
def test_as_many_whole_steps_are_shown_as_can_be_looked_at(tmp_path: Path, num_sums: int, steps: slice) -> None:
    writer = Writer(tmp_path, num_sums).steps(40)
    assert newest_steps(read_tail(writer.folder, 10**9), num_steps=3, max_spans=60) == steps
    writer.close()


def test_the_timeline_moves_with_the_run_and_is_a_plain_figure_in_the_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    view = plots.LiveTimeline(writer.folder)
    assert not view.update() and not view.widget.children, "nothing yet"
    writer.steps(10)
    assert view.update() and view.widget.children
    assert sent(view)["steps"] == list(range(9)), "without the step that still runs"
    writer.steps(30)
    assert view.update()
    assert sent(view)["steps"] == list(range(39 - NUM_STEPS, 39))
    view.settle()
    assert not view._ended.is_set()
    writer.end()
    view.follow().join(20)
    assert view._ended.is_set()
    figure = view.static()
    assert sum(len(bars.x) for bars in figure.data) == 2 * 3 * 3
    assert "step 38" in json.dumps(figure.to_plotly_json()["layout"]["annotations"], default=str)


def test_steps_of_many_spans_are_found_by_reading_further_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "TAIL_BYTES", 2000)
    writer = Writer(tmp_path, 100).steps(4)
    view = plots.LiveTimeline(writer.folder)
    assert [view.update() for _ in range(3)][-1], "each look reads four times as much"
    assert sent(view)["steps"][-1] == 2
    writer.close()


@pytest.mark.parametrize("drawing", ["payload", "timelines"])
def test_what_cannot_be_drawn_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawing: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("<no room>")

    writer = Writer(tmp_path).steps(5).end()
    view = plots.LiveTimeline(writer.folder)
    view._handle = shown = Display()
    monkeypatch.setattr(timeline, drawing, broken)
    view.settle()
    assert shown.sent == [{"text/html": view.widget.children[0].value}], "and can be seen"
    assert "<b>ValueError:</b> &lt;no room&gt;" in view.widget.children[0].value and view._ended.is_set()


def test_a_run_without_a_trace_or_a_folder_is_shown_nothing_of(tmp_path: Path) -> None:
    folder = new_run({"algorithm": {"name": "PipeSGD"}, "status": "finished"}, tmp_path)
    view = plots.LiveTimeline(folder)
    view.follow().join(20)
    assert view._ended.is_set() and view.static() is None
    gone = plots.LiveTimeline(tmp_path / "gone")
    gone.follow().join(20)
    assert gone._ended.is_set() and gone.static() is None
    with pytest.raises(WorkbenchError):
        read_tail(tmp_path / "gone")
