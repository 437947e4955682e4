"""Convergence curves that grow while a run trains, in JupyterLab; a plain figure replaces them at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, RLock, Thread
from typing import Any, final

import ipywidgets
import plotly.graph_objects as go
from IPython.display import HTML, display

from workbench.analysis.labels import distinct_labels
from workbench.analysis.table import MISSING, Column, Table, format_age, num_bytes, seconds, three_digits
from workbench.errors import ConfigError
from workbench.plots.lines import convergence
from workbench.plots.live.axes import AxisControls
from workbench.plots.live.buttons import Action, RunButtons, answer_while_busy, error_line, without_null_tooltips
from workbench.plots.live.header import header, no_longer_followed
from workbench.plots.live.moving_figure import VIEW_CLASS, MovingFigure
from workbench.plots.live.pace import PollTimer, pause_after
from workbench.plots.live.still import as_of, picture, still
from workbench.plots.renderer import as_data
from workbench.trace.follow import Follower
from workbench.trace.processes import ENDED, OVER
from workbench.trace.read import metrics_paths
from workbench.trace.run import Run, as_runs
from workbench.trace.views import XAxis

HEADER_S = 1.0  # between two versions of the HTML, which a notebook keeps
INTERVAL_S = 0.2  # every update sends complete curves to the browser: five a second look continuous
LIVE_POINTS = 500
MAX_RANKS = 8  # up to this number, each rank has a row

STATUS_COLUMNS = (
    Column("run", "run"),
    Column("rank", "rank"),
    Column("state", "state"),
    Column("step", "step"),
    Column("seconds", "training", seconds),
    Column("loss", "loss", three_digits),
    Column("bytes_sent", "sent", num_bytes),
    Column("staleness", "staleness"),
    Column("age_s", "last row", format_age),
)


@final
class LiveCurves:
    """A header, curves, a table of the ranks, switches of the axes, and buttons. Show it as a cell's last expression.

    Call `update` when there is new data, or let `follow` poll for it. Any thread may do so. Runs that differ only in
    their seed are one curve, their mean, in a band from the lowest to the highest.

    It has two outputs. The first one is HTML: the header, and a picture of the curves while the run trains. A saved
    notebook keeps it, and the browser shows it before the widget is ready and after a kernel restart. The second one
    is the widget, which has the header too; a plain figure replaces it at the end.

    Args:
        x: the first x axis.
        on_stop: called when Stop is pressed; None for no such button.
        on_pause, on_resume: called when the button for both is pressed; None for no such button.
    """

    def __init__(
        self,
        *,
        x: XAxis = "seconds",
        on_stop: Action | None = None,
        on_pause: Action | None = None,
        on_resume: Action | None = None,
    ) -> None:
        self._runs: list[Run] = []
        self._poll: Callable[[], Sequence[Run]] | None = None
        self._lock = RLock()
        self._drawn_s = 0.0
        self._pause_s = INTERVAL_S
        self._ended = Event()
        self._timer = PollTimer()
        self._seen: list[Any] = []  # the runs' states, and whether there is a curve
        self._problem = ""
        self._handle: Any = None  # of the widget's output
        self._header: Any = None  # of the HTML
        self._header_text, self._header_s = "", 0.0
        self._axes = AxisControls(x, self._redraw)
        self._curves = MovingFigure(convergence([], x))
        self._buttons = RunButtons(on_stop, on_pause, on_resume, on_click=self._timer.poll_often)
        self._stop = self._buttons.stop
        self._status = ipywidgets.HTML()
        self._live_header = ipywidgets.HTML()
        self._live_header.add_class("workbench-header")
        controls = ipywidgets.HBox([self._axes.widget, self._buttons.widget], layout={"flex_flow": "row wrap"})
        self.widget = ipywidgets.VBox([self._live_header, controls, self._curves.widget, self._status])
        self.widget.add_class(VIEW_CLASS)
        answer_while_busy(self.widget)
        without_null_tooltips(self.widget)

    @property
    def _figure(self) -> go.Figure:
        return self._curves.figure

    @property
    def pause_s(self) -> float:
        """Seconds between two drawings: more if drawing takes long, or if all cores of the machine are busy."""
        return self._pause_s

    @property
    def x(self) -> XAxis:
        """The present x axis."""
        return self._axes.x

    def update(self, runs: Sequence[Run], *, force: bool = False) -> bool:
        """Show the runs as they are, unless the last drawing was less than `pause_s` ago. Return whether it drew.

        A change of a run's state is shown at once, and so is the first curve. Nothing else is drawn while no page shows
        the view.
        """
        with self._lock:
            if self._ended.is_set():
                return False
            self._runs = list(runs)
            seen = [run.info.get("status") for run in self._runs]
            seen.append(any(len(rows) > 1 for run in self._runs for rows in run.metrics.values()))
            if seen != self._seen:
                self._seen, force = seen, True
                self._timer.poll_as_usual()
            if not force and (self._curves.was_removed or time.monotonic() - self._drawn_s < self._pause_s):
                return False
            begin_s = time.thread_time()
            self._redraw()
            if time.monotonic() - self._header_s >= HEADER_S or force:
                self._show_header()
            self._drawn_s = time.monotonic()
            self._pause_s = pause_after(time.thread_time() - begin_s, INTERVAL_S)
            return True

    def follow(self, poll: Callable[[], Sequence[Run]]) -> Thread:
        """Poll the runs five times a second in a separate thread until all have ended or are lost, then call `finish`."""
        self._poll = poll
        thread = Thread(target=self._follow, args=(poll,), name="workbench-live", daemon=True)
        thread.start()
        return thread

    def _follow(self, poll: Callable[[], Sequence[Run]]) -> None:
        try:
            while not self._ended.is_set():
                runs = poll()
                self.update(runs)
                if runs and all(run.info.get("status") in OVER for run in runs):
                    return
                self._timer.wait(self._pause_s)
        except Exception as error:  # noqa: BLE001 - a thread has no caller that could handle it: the view shows it
            self._problem = f"<p><b>Not updated any more:</b> {error_line(error)}</p>"
        finally:
            self.finish()

    def settle(self) -> None:
        """Update once more, and `finish` if all runs have ended, so that a notebook that ends here has the whole curve.

        If the thread has finished already, send the plain figure again from the running cell. Without a browser, as
        under papermill, output that a thread sends for a finished cell is lost.
        """
        runs = self._poll() if self._poll is not None else self._runs
        if all(run.info.get("status") in OVER for run in runs):
            with self._lock:
                if self._ended.is_set():
                    self._problem = ""  # the update has worked
                    self._keep(runs)
                self.finish(runs)

    def finish(self, runs: Sequence[Run] | None = None) -> None:
        """Draw a last time and replace the widget by a plain figure, which a saved notebook keeps."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            self._timer.wake()
            self._keep(self._runs if runs is None else runs)

    def _keep(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)
        try:
            self._redraw()
        except Exception as error:  # noqa: BLE001 - as above
            self._problem = f"<p><b>Not drawn:</b> {error_line(error)}</p>"
        self._show_header()
        if self._handle is not None:
            self._handle.update({"text/html": self._problem} if self._problem else as_data(self.static()), raw=True)

    def static(self) -> go.Figure:
        """Return the curves as a plain figure."""
        return self._axes.figure(self._runs)

    def _ipython_display_(self) -> None:
        with self._lock:
            self._header = display(HTML(self._as_html()), display_id=True)  # type: ignore[no-untyped-call]
            if self._ended.is_set():
                display(HTML(self._problem) if self._problem else self.static())  # type: ignore[no-untyped-call]
            else:
                self._handle = display(self.widget, display_id=True)  # type: ignore[no-untyped-call]

    def _as_html(self) -> str:
        """What a saved notebook keeps: the header; and a picture, unless a plain figure follows."""
        if self._ended.is_set():
            return header(self._runs) + no_longer_followed(self._runs)
        return still(f"{header(self._runs)}{picture(self._figure)}{as_of()}")

    def _show_header(self) -> None:
        self._header_s = time.monotonic()
        self._live_header.value = header(self._runs)
        text = self._as_html() if self._header is not None else ""
        if text != self._header_text:
            self._header_text = text
            self._header.update(HTML(text))  # type: ignore[no-untyped-call]

    def _redraw(self) -> None:
        with self._lock:
            self._curves.draw(self._axes.figure(self._runs, max_points=LIVE_POINTS))
            active = not self._ended.is_set() and any(run.info.get("status") not in ENDED for run in self._runs)
            self._buttons.show(any(run.info.get("status") == "paused" for run in self._runs), active)
            self._status.value = status_table(self._runs)._repr_html_() + self._problem


def watch(*runs: Any, x: XAxis = "seconds") -> LiveCurves:
    """Show curves of several runs in one live view; runs in training are followed until the last one has ended.

    Args:
        runs: handles of `Cluster.train`, and runs.
        x: the first x axis.

    Example:
        `wb.plots.watch(first, second)` with two handles of `Cluster.train` shows both in one view.

    Raises:
        ConfigError: there is no run.
    """
    if not runs:
        raise ConfigError("no run to watch: give at least one, such as watch(run)")
    known = as_runs(runs)  # once: for a handle, it reads the whole record
    followers = [Follower(run.folder) if run.info.get("status") not in ENDED and run.folder else None for run in known]
    view = LiveCurves(x=x)

    def look() -> list[Run]:
        return [follower.poll() if follower else run for follower, run in zip(followers, known, strict=True)]

    view.update(look())
    for run in runs:
        if hasattr(run, "shown_by"):
            run.shown_by(view)
    view.follow(look)
    return view


def status_table(runs: Sequence[Run]) -> Table:
    """Return a row for each rank, with its newest step; for a run with more than `MAX_RANKS`, one row for all."""
    rows: list[dict[str, Any]] = []
    for label, run in zip(distinct_labels(runs), runs, strict=True):
        failures, status = run.failures, run.info.get("status")
        ages_s = _ages_s(run) if status not in ENDED else {}
        latest: dict[int, dict[str, Any]] = {}
        for rank, recorded in run.metrics.items():
            row = next((row for row in reversed(recorded) if "loss" in row), None)
            latest[rank] = {**row, "step": row["step"] + 1} if row else {}  # the number of steps, as in the header
        if len(latest) > MAX_RANKS:
            steps = sorted(row["step"] for row in latest.values() if row)
            slowest = f"{steps[0]} to {steps[-1]}" if steps else MISSING
            last, oldest_s = run.steps()[-1] if steps else {}, max(ages_s.values(), default=None)
            rows.append(
                {
                    **last,
                    "run": label,
                    "rank": f"{len(latest)} ranks",
                    "state": status,
                    "step": slowest,
                    "age_s": oldest_s,
                }
            )
        else:
            for rank in sorted({*latest, *failures}):
                state = failures[rank].get("error", "failed") if rank in failures else status
                rows.append(
                    {**latest.get(rank, {}), "run": label, "rank": rank, "state": state, "age_s": ages_s.get(rank)}
                )
    return Table(rows, STATUS_COLUMNS)


def _ages_s(run: Run) -> dict[int, float]:
    """Return rank -> seconds since it wrote its newest row; empty if the run was removed."""
    if run.folder is None:
        return {}
    now_s, found = time.time(), {}
    with suppress(OSError):
        for rank, path in metrics_paths(run.folder).items():
            found[rank] = max(0.0, now_s - path.stat().st_mtime)
    return found
