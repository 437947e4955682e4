"""The timeline of a run's newest steps, redrawn while it trains; a plain figure replaces it at its end."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, final

import ipywidgets
import numpy as np
import plotly.graph_objects as go
from IPython.display import HTML, display

from workbench.analysis.overlap import step_windows
from workbench.errors import ConfigError, RunNotFound
from workbench.plots.gantt.figures import timelines
from workbench.plots.gantt.layout import MAX_RANKS
from workbench.plots.live.buttons import error_line
from workbench.plots.live.curves import as_data
from workbench.plots.live.moving_figure import MovingFigure
from workbench.plots.live.pace import pause_after
from workbench.trace.run import Run
from workbench.trace.store import ENDED, read_info
from workbench.trace.tail import TAIL_BYTES, read_tail

INTERVAL_S = 2.0
NUM_STEPS = 3
MAX_TAIL_BYTES = 8 * 1024 * 1024  # largest tail of a rank's trace to read, for steps with many spans
MAX_SPANS = 1500  # largest number shown: fewer steps if they have more spans, but at least one


@final
class LiveTimeline:
    """What every rank did in the newest steps, redrawn at most every two seconds.

    Show it as the last expression of a cell.

    It reads only the end of the ranks' traces, so a long run costs no more than a short one. Without a trace it stays
    empty.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._lock = RLock()
        self._ended = Event()
        self._handle: Any = None
        self._tail_bytes = TAIL_BYTES
        self._shown: go.Figure | None = None
        self._problem = ""
        self._moving = MovingFigure()
        self.widget = ipywidgets.VBox([])  # holds the figure once there is one

    def update(self) -> bool:
        """Read the end of the trace and draw its last complete steps. Return whether there is something to show."""
        with self._lock:
            try:
                run = read_tail(self.folder, self._tail_bytes)
                steps = newest_steps(run)
                if steps is None:
                    self._tail_bytes = min(4 * self._tail_bytes, MAX_TAIL_BYTES)
                new = None if steps is None else timelines([run], steps)
            except (ConfigError, RunNotFound):  # the trace has only begun, or was removed
                return self._shown is not None
            except Exception as error:  # noqa: BLE001 - a failed drawing must not end a training or hide its end
                self._problem = error_line(error)
                self.widget.children = (ipywidgets.HTML(self._problem),)
                return self._shown is not None
            self._problem = ""
            if new is not None and not self._ended.is_set():
                self._shown = new
                self._draw(new)
            return self._shown is not None

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
        if self._handle is not None:
            figure = as_data(self._shown) if self._shown is not None and not self._problem else None
            self._handle.update(figure or {"text/html": self._problem}, raw=True)

    def static(self) -> go.Figure | None:
        """Return the timeline as a plain figure; None without a trace."""
        return self._shown

    def _over(self) -> bool:
        try:
            return read_info(self.folder).get("status") in ENDED
        except RunNotFound:
            return True

    def _ipython_display_(self) -> None:
        with self._lock:
            if self._ended.is_set():
                display(self._shown if self._shown is not None and not self._problem else HTML(self._problem))  # type: ignore[no-untyped-call]
            else:
                self._handle = display(self.widget, display_id=True)  # type: ignore[no-untyped-call]

    def _draw(self, new: go.Figure) -> None:
        self._moving.draw(new)
        if self.widget.children != (self._moving.widget,):
            self.widget.children = (self._moving.widget,)


def newest_steps(run: Run) -> slice | None:
    """Return the last steps that all shown ranks have ended, as many as fit; None before the first complete step."""
    spans, first, last = run.spans, 0, None
    ranks = spans.ranks[:MAX_RANKS]
    for rank in ranks:
        numbers, _ = step_windows(spans.of_rank(rank))
        if len(numbers) < 2:
            return None
        first = max(first, int(numbers[1] if numbers[0] else 0))  # the first step may be cut
        # the last step is still running: it is left out
        last = int(numbers.max()) if last is None else min(last, int(numbers.max()))
    if last is None or last <= first:
        return None
    steps = spans.table["step"][np.isin(spans.table["rank"], ranks)]
    begin = last - 1
    while begin > max(first, last - NUM_STEPS) and np.count_nonzero((steps >= begin - 1) & (steps < last)) <= MAX_SPANS:
        begin -= 1
    return slice(begin, last)
