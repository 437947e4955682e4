"""Views of running trainings: buttons, several runs at once, the newest steps."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("ipywidgets", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from tests.waiting import until
from workbench import plots
from workbench.errors import ConfigError, WorkbenchError
from workbench.plots.live import axes, curves, timeline
from workbench.plots.live.buttons import RunButtons, parts_of
from workbench.plots.live.curves import status_table
from workbench.plots.live.header import header
from workbench.plots.live.moving_figure import MovingFigure
from workbench.plots.live.still import picture
from workbench.plots.renderer import PLOTLY
from workbench.plots.trace_viewer.newest import NUM_STEPS, newest_steps
from workbench.replica.local_training import trace_note
from workbench.settings import Settings
from workbench.trace import FileRecorder, Run, new_run, update_run
from workbench.trace.follow import Follower
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
    buttons.show(paused=False, active=False)
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
    monkeypatch.setattr(axes, "convergence", broken)
    view.follow(lambda: [Run.load(writer.folder)]).join(20)
    assert view._ended.is_set() and "<b>ValueError:</b> no room" in shown.sent[-1]["text/html"]


def test_the_header_says_how_far_a_run_is_and_how_it_ended(tmp_path: Path) -> None:
    writer = Writer(tmp_path, num_steps=40, settings={"epochs": 4}).steps(10)
    running = plain(header([Run.load(writer.folder)]))
    assert "running" in running and "step 10 of 40" in running and "epoch 1.0 of 4" in running
    assert "00:00 left" in running, "30 steps of 10 ms"
    assert f'data-run="{writer.folder.name}"' in header([Run.load(writer.folder)]), "for the extension of JupyterLab"
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
    (writer.folder / "failed-1.json").write_text(
        json.dumps({"rank": 1, "error": "rank 1 failed at step 9: ValueError"})
    )
    assert plain(header([Run.load(writer.folder)])).endswith("rank 1 failed at step 9: ValueError")
    assert "rank 1: rank 1" not in plain(header([Run.load(writer.folder)])), "the rank is named once"
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
    config = second.sent[-1][PLOTLY]["config"]
    assert "sendChartToCloud" in config["modeBarButtonsToRemove"] and config["toImageButtonOptions"]["format"] == "svg"
    figure = MovingFigure(view.static())
    states = [len(json.dumps(part.get_state(), default=str)) for part in parts_of(figure.widget)]
    assert sum(states) < 20_000, "what papermill would save for each figure"
    asked: list[tuple[Any, Any]] = []
    object.__setattr__(figure.widget, "send", lambda content, buffers: asked.append((content, buffers)))
    figure.widget._answer(None, {"want": "plotly"}, [])
    assert asked[0][0] == {"plotly": True} and b"Plotly" in asked[0][1][0] and len(asked[0][1][0]) > 1_000_000


def test_a_notebook_that_is_saved_during_a_run_keeps_its_curves(tmp_path: Path) -> None:
    """As HTML, without a kernel and a script; and once more when there are more steps."""
    writer = Writer(tmp_path, num_steps=400, algorithm={"name": "<A & B>", "settings": {}}).steps(20)
    view = plots.LiveCurves(x="steps")
    view._header = shown = Display()
    view.update([Run.load(writer.folder)], force=True)
    writer.steps(200)
    view.update([Run.load(writer.folder)], force=True)
    first, second = shown.sent
    assert "step 20 of 400" in first and "step 220 of 400" in second and "as of " in second
    image = svg(second)
    assert image.count("<polyline") == 1 and len(image) < 8_000 and "&lt;A &amp; B&gt;" in image
    assert {"training loss", "step", "Convergence: digits"} <= set(re.findall(r"<text[^>]*>([^<]*)<", image))
    assert rightmost(svg(first)) == pytest.approx(rightmost(image), abs=2), "the axis grows with the curve"
    assert [float(one) for one in re.findall(r">(\d+)</text>", image)][-1] < 220
    view._axes.log_x.value = view._axes.log_y.value = True
    view.update([Run.load(writer.folder)], force=True)
    assert {"0.01", "0.1", "10", "100"} <= set(re.findall(r"<text[^>]*>([^<]*)<", svg(shown.sent[-1])))
    writer.end()
    view.update([Run.load(writer.folder)], force=True)
    view.finish()
    assert "<img" not in shown.sent[-1] and "finished" in shown.sent[-1], "the plain figure is next to it"


def svg(text: str) -> str:
    """The image in a view's HTML; it must be well-formed."""
    found = re.search(r'src="data:image/svg\+xml;base64,([^"]*)"', text)
    assert found is not None
    image = base64.b64decode(found[1]).decode()
    ElementTree.fromstring(image)
    return image


def rightmost(image: str) -> float:
    """Where its first curve ends."""
    points = re.search(r'<polyline points="([^"]*)"', image)
    assert points is not None
    return float(points[1].split()[-1].split(",")[0])


def test_bands_of_seeds_are_in_the_picture_too(tmp_path: Path) -> None:
    runs = [Run.load(Writer(tmp_path, settings={"seed": seed}).steps(5, 1.0 + seed).end().folder) for seed in range(2)]
    image = svg(picture(plots.convergence(runs, "steps")))
    assert image.count("<polygon") == 1 and "PipeSGD (mean of 2)" in image
    assert svg(picture(plots.convergence([]))).count("<polyline") == 0, "nothing yet"


def test_switches_change_axes_and_smoothing_and_offer_only_what_runs_have(tmp_path: Path) -> None:
    known = Run.load(Writer(tmp_path, steps_per_epoch=5).steps(100).end().folder)
    view = plots.LiveCurves(x="epochs")
    view.update([known], force=True)
    assert view.x == "epochs" and view._figure.data[1].x[-1] == 20
    raw, smooth = view._figure.data[0].y, view._figure.data[1].y
    assert smooth.tolist() != raw.tolist()
    view._axes.smooth.value = 0.0
    losses = [trace.y.tolist() for trace in view._figure.data if len(trace.y)]
    assert losses == [raw.tolist()], "no average, and nothing behind it"
    view._axes.log_x.value, view._axes.log_y.value = True, True
    layout = view._figure.layout
    assert [layout.xaxis.type, layout.xaxis2.type, layout.yaxis.type] == ["log"] * 3
    assert view.static().layout.yaxis.type == "log", "the picture that stays is the one that was chosen"
    unknown = Run.load(Writer(tmp_path, settings={"steps": 3}).steps(3).end().folder)
    view.update([known, unknown], force=True)
    assert view.x == "steps" and "epochs" not in view._axes.x_axis.options


def test_a_point_says_where_it_is_on_every_axis_and_of_which_ranks(tmp_path: Path) -> None:
    run = Run.load(Writer(tmp_path, steps_per_epoch=5).steps(10).end().folder)
    line = plots.convergence([run], "seconds").data[0]
    for words in ("step %{customdata[0]", "epoch %{customdata[1]", "customdata[3]:.4s}B sent", "all 2 ranks"):
        assert words in line.hovertemplate
    assert line.customdata[-1].tolist() == pytest.approx([9, 2.0, 640, 2 * 40960])


# ---------------------------------------------------------------- how soon it is seen


def test_a_change_of_state_is_drawn_at_once_and_a_button_makes_the_view_look_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "pause_after", lambda *_: 60.0)  # a crowded machine
    writer = Writer(tmp_path).steps(3)
    view = plots.LiveCurves(on_pause=lambda: update_run(writer.folder, status="paused"), on_resume=lambda: None)
    looks = 0

    def look() -> list[Run]:
        nonlocal looks
        looks += 1
        return [Run.load(writer.folder)]

    thread = view.follow(look)
    until(lambda: view._pause_s == 60.0, "the first drawing")
    view._buttons.pause.click()
    until(
        lambda: (
            view._buttons.pause.description == "Resume"
            and "paused" in view._status.value
            and "paused" in view._live_header.value
        ),
        "what the button did, in the table and in the header too",
    )
    view.finish()
    thread.join(20)
    writer.close()
    assert not thread.is_alive() and looks < 10


def test_a_view_that_no_page_shows_draws_only_a_change_of_state(tmp_path: Path) -> None:
    """A cell that is run again leaves the view that it showed before: both would draw, and take a core from the ranks."""
    writer = Writer(tmp_path, num_steps=400).steps(20)
    view = plots.LiveCurves(x="steps")

    def draws() -> bool:
        view._drawn_s = 0.0  # long ago
        writer.steps(1)
        return view.update([Run.load(writer.folder)])

    assert draws() and draws(), "also without a browser, as under papermill"
    for shown, drawn in ((1, True), (1, True), (-1, True), (-1, False), (1, True), (-1, False)):
        view._curves.widget._answer(None, {"shown": shown}, [])
        assert draws() == drawn
    writer.end()
    assert draws(), "a change of state"


def test_the_first_curve_is_drawn_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "pause_after", lambda *_: 60.0)  # a crowded machine
    writer = Writer(tmp_path).steps(1)
    view = plots.LiveCurves()
    view._header = shown = Display()

    def drawn() -> bool:
        return view.update([Run.load(writer.folder)])

    assert drawn() and not drawn(), "a point is no curve"
    writer.steps(1)
    assert drawn() and "<polyline" in svg(shown.sent[-1])
    writer.steps(1)
    assert not drawn()
    writer.close()


def test_buttons_of_a_run_that_has_ended_are_disabled(tmp_path: Path) -> None:
    """Also in a view that is still a widget, because the page was loaded again meanwhile."""
    writer = Writer(tmp_path).steps(3)
    view = plots.LiveCurves(on_stop=lambda: None, on_pause=lambda: None, on_resume=lambda: None)
    view.update([Run.load(writer.folder)], force=True)
    view._buttons.stop.click()
    assert view._buttons.stop.description == "Stopping"
    writer.end("stopped")
    view.follow(lambda: [Run.load(writer.folder)]).join(20)
    assert view._buttons.stop.disabled and view._buttons.pause.disabled and view._buttons.stop.description == "Stop"
    assert "stopped" in view._live_header.value


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


def test_a_notebook_that_is_saved_during_a_run_keeps_its_newest_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path).steps(10)
    view = plots.LiveTimeline(writer.folder)
    view._still, view._handle = still, widget = Display(), Display()
    assert view.update() and view.update() and len(still.sent) == 1, "not at every drawing"
    image = svg(still.sent[-1]["text/html"])
    names = set(re.findall(r"<text[^>]*>([^<]*)<", image))
    assert {"rank 0", "rank 1", "compute", "comm", "all-reduce", "step 6", "step 8"} <= names and len(image) < 8_000
    monkeypatch.setattr(timeline, "STILL_S", 0.0)
    writer.steps(1).end()
    view.update()
    assert ">step 9<" in svg(still.sent[-1]["text/html"]), "another one later"
    view.settle()
    assert still.sent[-1] == {"text/html": ""} and PLOTLY in widget.sent[-1], "the plain figure is in its place"


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


# ---------------------------------------------------------------- runs that end in an unusual way


def test_a_view_says_that_the_folder_of_its_run_was_removed(tmp_path: Path) -> None:
    writer = Writer(tmp_path).steps(5)
    (writer.folder / "failed-00001.json").write_text(json.dumps({"rank": 1, "error": "ValueError"}))
    view = plots.LiveCurves(x="steps")
    view._handle, view._header = shown, first = Display(), Display()
    follower = Follower(writer.folder)
    assert view.update([follower.poll()])
    writer.close()
    shutil.rmtree(writer.folder)
    view.follow(lambda: [follower.poll()]).join(20)
    assert "no longer exists" in shown.sent[-1]["text/html"] and len(first.sent) == 2
    assert len(view.static().data[0].x) == 5, "and can be drawn"


def test_a_view_of_a_lost_run_ends_and_says_how_to_follow_it_again(tmp_path: Path) -> None:
    """Its processes are on another machine; nobody can say whether they are alive."""
    writer = Writer(tmp_path, process={"host": "another"}).steps(5)
    writer.close()
    for path in writer.folder.iterdir():
        os.utime(path, (1e9, 1e9))
    follower = Follower(writer.folder)
    view = plots.LiveCurves(x="steps")
    view._handle, view._header = figure, first = Display(), Display()
    threads = [view.follow(lambda: [follower.poll()]), plots.LiveTimeline(writer.folder).follow()]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    words = html.unescape(str(first.sent[-1]))
    assert "<b>lost</b>" in words and "has not changed for ten minutes" in words
    assert f'wb.plots.watch(wb.open_run("{writer.folder.name}"))' in words
    assert list(figure.sent[-1]) == [PLOTLY], "a figure stays"
    update_run(writer.folder, status="finished")  # it wrote again
    view.settle()
    assert "<b>finished</b>" in str(first.sent[-1]) and "view has ended" not in str(first.sent[-1])


def test_the_timeline_of_a_killed_run_ends(tmp_path: Path) -> None:
    """Its `run.json` says for ever that it runs."""
    writer = Writer(tmp_path).steps(5)
    gone = {"host": socket.gethostname(), "pid": 2**22 - 1, "process_started": 1.0}
    update_run(writer.folder, process=gone)
    writer.close()
    for path in writer.folder.iterdir():
        os.utime(path, (1e9, 1e9))
    view = plots.LiveTimeline(writer.folder)
    view.follow().join(20)
    assert view._ended.is_set() and view.static() is not None


def test_the_timeline_follows_the_ranks_that_remain(tmp_path: Path) -> None:
    writer = Writer(tmp_path).steps(10)
    left = writer.recorders.pop()
    left.close()
    writer.steps(50)
    assert newest_steps(read_tail(writer.folder, 3000)) is None, "a rank that is in the run, and takes no step"
    update_run(writer.folder, shrunk=[{"step": 10, "ranks": [0], "weights_of": 0}])
    tail = read_tail(writer.folder)
    assert tail.spans.ranks == [0] and newest_steps(tail) == slice(59 - NUM_STEPS, 59)
    writer.close()


def test_the_header_has_the_loss_after_an_evaluation_without_an_accuracy(tmp_path: Path) -> None:
    """As of a language model; an evaluation is the last row of a run that has finished."""
    writer = Writer(tmp_path).steps(4, loss=2.0)
    row = {"step": 3, "seconds": 0.03, "samples": 256, "bytes_sent": 4096}
    shares = {"loss_sum": 30.0, "count": 10, "correct": None, "judged": None}
    for recorder in writer.recorders:
        recorder.metrics({**row, "evaluation": shares})
    writer.end()
    assert "loss 0.5" in plain(header([Run.load(writer.folder)]))


def test_the_header_says_why_a_run_is_lost() -> None:
    lost = Run({"status": "lost", "error": "its folder has not changed for ten minutes"}, {})
    assert "not changed for ten minutes" in plain(header([lost]))


def test_the_timeline_says_that_the_trace_ends_before_the_run(tmp_path: Path) -> None:
    """Its newest steps stand still then."""
    writer = Writer(tmp_path, notes=["slept compute", *trace_note(Settings(steps=10_000), 10_000)]).steps(10)
    view = plots.LiveTimeline(writer.folder)
    assert view.update() and sent(view)["note"].startswith("the trace holds the first 2,000 of 10,000 steps")
    writer.close()
