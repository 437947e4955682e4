"""The timeline of a run's newest steps while it trains; a plain figure replaces it at its end."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, final

import ipywidgets
import plotly.graph_objects as go
from IPython.display import HTML, display

from workbench.errors import ConfigError, RunNotFound
from workbench.plots.gantt.figures import timelines
from workbench.plots.live.buttons import error_line
from workbench.plots.live.moving_figure import VIEW_CLASS
from workbench.plots.live.pace import pause_after
from workbench.plots.live.still import as_of, still
from workbench.plots.live.still_timeline import timeline_picture
from workbench.plots.renderer import as_data
from workbench.plots.trace_viewer.newest import MAX_TAIL_BYTES, newest_steps
from workbench.plots.trace_viewer.payload import payload
from workbench.plots.trace_viewer.widget import MovingViewer
from workbench.trace.processes import OVER, with_true_status
from workbench.trace.run import Run
from workbench.trace.store import read_info
from workbench.trace.tail import TAIL_BYTES, read_tail

INTERVAL_S = 2.0
STILL_S = 5.0  # between two pictures, of which a notebook keeps the last
NUM_STEPS, MAX_SPANS = 3, 1500  # of the picture, and of the plain figure at the end


@final
class LiveTimeline:
    """What every rank did in the newest steps, redrawn at most every two seconds.

    Show it as the last expression of a cell. The window follows the newest steps until the reader moves it, and
    follows again after a click on *Follow*. It has two outputs, as `LiveCurves`: the first is a picture of the newest
    steps, which a saved notebook keeps.

    It reads only the end of the ranks' traces, so a long run costs no more than a short one. Without a trace it stays
    empty.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._lock = RLock()
        self._ended = Event()
        self._handle: Any = None  # of the widget's output
        self._still: Any = None  # of the picture
        self._still_s = float("-inf")
        self._tail_bytes = TAIL_BYTES
        self._newest: Run | None = None  # the end of the run, once it has a complete step
        self._problem = ""
        self._moving = MovingViewer()
        self.widget = ipywidgets.VBox([])  # holds the figure once there is one
        self.widget.add_class(VIEW_CLASS)

    def update(self) -> bool:
        """Read the end of the trace and draw its last complete steps. Return whether there is something to show."""
        with self._lock:
            try:
                run = read_tail(self.folder, self._tail_bytes)
                steps = newest_steps(run)
                if steps is None:
                    self._tail_bytes = min(4 * self._tail_bytes, MAX_TAIL_BYTES)
                content = None if steps is None else payload([run], steps, newest=True).content
            except (ConfigError, RunNotFound):  # the trace has only begun, or was removed
                return self._newest is not None
            except Exception as error:  # noqa: BLE001 - a failed drawing must not end a training or hide its end
                self._fail(error)
                return self._newest is not None
            self._problem = ""
            if content is not None and not self._ended.is_set():
                self._newest = run
                self._moving.draw(content)
                if self.widget.children != (self._moving.widget,):
                    self.widget.children = (self._moving.widget,)
                self._show_still()
            return self._newest is not None

    def _show_still(self) -> None:
        """Send a picture of the newest steps, unless the last one is young."""
        if self._still is None or time.monotonic() - self._still_s < STILL_S:
            return
        self._still_s = time.monotonic()
        try:
            steps = self._plain_steps()
            content = "" if self._newest is None or steps is None else timeline_picture(self._newest, steps) + as_of()
        except Exception as error:  # noqa: BLE001 - as above
            content = error_line(error)
        self._still.update({"text/html": still(content)}, raw=True)

    def _fail(self, error: Exception) -> None:
        self._problem = error_line(error)
        self.widget.children = (ipywidgets.HTML(self._problem),)

    def follow(self) -> Thread:
        """Draw every `INTERVAL_S` in a separate thread until the run has ended, and then call `finish`.

        Draw less often if drawing takes long.
        """
        thread = Thread(target=self._follow, name="workbench-live-timeline", daemon=True)
        thread.start()
        return thread

    def _follow(self) -> None:
        try:
            while not self._ended.is_set():
                begin_s = time.monotonic()
                over = self._over()
                self.update()
                if over:
                    return
                self._ended.wait(pause_after(time.monotonic() - begin_s, INTERVAL_S))
        finally:
            self.finish()

    def settle(self) -> None:
        """Call `finish` if the run has ended; see `LiveCurves.settle`."""
        if self._over():
            with self._lock:
                if self._ended.is_set():
                    self._keep()
                self.finish()

    def finish(self) -> None:
        """Draw a last time and replace the widget by a plain figure, which a saved notebook keeps."""
        with self._lock:
            if self._ended.is_set():
                return
            self.update()
            self._ended.set()
            self._keep()

    def _keep(self) -> None:
        if self._still is not None:
            self._still.update({"text/html": ""}, raw=True)  # the plain figure is next to it
        if self._handle is not None:
            figure = self._plain()
            self._handle.update({"text/html": self._problem} if figure is None else as_data(figure), raw=True)

    def static(self) -> go.Figure | None:
        """Return the timeline of the newest three steps as a plain figure; None without a trace."""
        with self._lock:
            steps = self._plain_steps()
            return None if self._newest is None or steps is None else timelines([self._newest], steps)

    def _plain_steps(self) -> slice | None:
        """The steps of the plain figure and of the picture; None without a complete step."""
        return None if self._newest is None else newest_steps(self._newest, NUM_STEPS, MAX_SPANS)

    def _plain(self) -> go.Figure | None:
        """Return the plain figure; None if there is none, or if it cannot be drawn."""
        if self._problem:
            return None
        try:
            return self.static()
        except Exception as error:  # noqa: BLE001 - a failed drawing must not hide a training's end
            self._fail(error)
            return None

    def _over(self) -> bool:
        try:
            return with_true_status(self.folder, read_info(self.folder)).get("status") in OVER
        except RunNotFound:
            return True

    def _ipython_display_(self) -> None:
        with self._lock:
            if self._ended.is_set():
                figure = self._plain()
                display(HTML(self._problem) if figure is None else figure)  # type: ignore[no-untyped-call]
            else:
                self._still = display({"text/html": still("")}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
                self._handle = display(self.widget, display_id=True)  # type: ignore[no-untyped-call]
