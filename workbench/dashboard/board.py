"""`Dashboard`: the widgets."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from threading import RLock, Thread
from typing import Any, final

import ipywidgets
import torch
from IPython.display import HTML, display
from torch.optim import lr_scheduler

from workbench import algorithms, costs, problems
from workbench.analysis import compare
from workbench.analysis.labels import distinct_labels
from workbench.analysis.table import three_digits
from workbench.dashboard.form import LABEL, WIDE, AlgorithmForm, optional_number
from workbench.dashboard.session import Choice, Entry, Session
from workbench.machine import in_notebook
from workbench.plots.comparison import comparison_html
from workbench.plots.live.axes import AxisControls
from workbench.plots.live.buttons import RunButtons, answer_while_busy, error_line, without_null_tooltips
from workbench.plots.live.curves import LIVE_POINTS, status_table
from workbench.plots.live.moving_figure import LIVE_CLASS, VIEW_CLASS, MovingFigure
from workbench.plots.live.pace import pause_after
from workbench.plots.live.still import picture, still
from workbench.plots.renderer import as_data
from workbench.problems.base import Problem
from workbench.run_spec import compute_of, names_in, optimizer_of, schedule_of
from workbench.trace.run import Run

INTERVAL_S, KEEP_S = 0.5, 1.0
RANKS, SIMULATED = "MPI ranks", "simulated workers"
# Names of runs take several lines instead of being cut.
RUN_NAMES = "<style>.workbench-view .widget-checkbox .widget-label-basic { white-space: normal; height: auto }</style>"


@final
class Dashboard:
    """Choose an algorithm, a problem and settings; start, pause, stop and compare trainings.

    Show it as a cell's last expression.

    One training runs at a time, in the background. Cells run meanwhile, and the buttons work during a cell. The
    curves below the controls are live during a training and a static figure otherwise. A saved notebook keeps
    this figure and the table.

    Args:
        cluster: where to train. None: start a cluster with the chosen number of ranks when it is needed.
        own: your own problems, in addition to those of `workbench.problems`.

    Example:
        dashboard = wb.Dashboard()
        dashboard
    """

    def __init__(self, cluster: Any = None, *, own: Sequence[Problem] = ()) -> None:
        self._session = Session(cluster)
        self._own = {problem.name: problem for problem in own}
        self._lock = RLock()
        self._boxes: dict[int, Any] = {}
        self._controls: Any = None  # display of the widget
        self._kept: Any = None  # display of the HTML that a saved notebook keeps instead of the widget
        self._figure: Any = None  # display of the curves as a static figure
        self._table: Any = None  # display of the table
        self._curves = MovingFigure()
        self._stage = ipywidgets.VBox()  # holds the live curves during a training
        self._drawn: tuple[Any, ...] = ()
        self._compared: tuple[Any, ...] = ()
        self._ticker: Thread | None = None
        self._closed = False
        self._kept_text, self._kept_s = "", 0.0
        self._make_choice()
        self._make_settings()
        self._make_place(cluster)
        self._make_runs()
        left = ipywidgets.VBox([self._algorithm, self._form_box, self._problem, self._training, self._place])
        columns = ipywidgets.HBox([left, self._right], layout={"flex_flow": "row wrap"})
        self.widget = ipywidgets.VBox([ipywidgets.HTML(RUN_NAMES), columns, self._line, self._stage])
        self.widget.add_class(VIEW_CLASS)
        self.widget.add_class(LIVE_CLASS)
        answer_while_busy(self.widget)
        without_null_tooltips(self.widget)

    @property
    def runs(self) -> list[Run]:
        """The session's runs that have begun, in order."""
        runs = [entry.poll() for entry in self._session.entries]
        return [run for run in runs if run is not None]

    @property
    def cluster(self) -> Any:
        """The cluster that trains; None before the first training on ranks."""
        return self._session.cluster

    def close(self) -> None:
        """Stop the training, and the cluster if the dashboard started it.

        A list of the runs replaces the controls.
        """
        self._session.close()
        if self._ticker is not None:
            self._ticker.join(10)
        self._refresh()
        self._closed = True
        self._show_buttons()
        if self._controls is not None:
            self._controls.update({"text/html": self._lines("Dashboard, closed")}, raw=True)
            self._kept.update({"text/html": ""}, raw=True)

    def _lines(self, title: str) -> str:
        """Return the list of runs as HTML."""
        lines = [html.escape(box.description) for box in self._list.children] or ["nothing was trained"]
        return "<br>".join([f"<b>{title}</b>", *lines])

    def _make_choice(self) -> None:
        """Make the fields of the algorithm and of the problem."""
        common = {"style": LABEL, "layout": WIDE}
        self._algorithm = ipywidgets.Dropdown(
            options=list(algorithms.names()), value="pipe-sgd", description="algorithm", **common
        )
        self._form_box = ipywidgets.VBox()
        self._choose_algorithm()
        self._algorithm.observe(self._choose_algorithm, names="value")
        names = [*self._own, *(name for name in problems.names() if name not in self._own)]
        self._problem = ipywidgets.Dropdown(
            options=names, value=next(iter(self._own), "digits-mlp"), description="problem", **common
        )

    def _make_settings(self) -> None:
        """Make the fields of how to train."""
        common = {"style": LABEL, "layout": WIDE}
        self._length = ipywidgets.BoundedIntText(
            value=5, min=1, max=10**9, description="length", style=LABEL, layout={"width": "210px"}
        )
        self._unit = ipywidgets.Dropdown(options=["epochs", "steps"], layout={"width": "116px"})
        self._lr = ipywidgets.Text(
            description="lr", placeholder="the problem's own", tooltip="learning rate, above 0", **common
        )
        self._optimizer = ipywidgets.Combobox(
            options=names_in(torch.optim, torch.optim.Optimizer),
            description="optimizer",
            placeholder="the problem's own",
            tooltip="a class of torch.optim, with arguments after it: SGD momentum=0.9",
            **common,
        )
        self._schedule = ipywidgets.Combobox(
            options=names_in(lr_scheduler, lr_scheduler.LRScheduler),
            description="schedule",
            placeholder="constant",
            tooltip="a class of torch.optim.lr_scheduler, with arguments after it, in updates: CosineAnnealingLR T_max=200",
            **common,
        )
        self._batch = ipywidgets.Text(
            description="batch size", placeholder="the problem's own", tooltip="samples per worker and step", **common
        )
        self._seed = ipywidgets.IntText(
            value=0, description="seed", tooltip="of data order, initial weights and dropout", **common
        )
        self._compute = ipywidgets.Text(
            description="compute",
            placeholder="forward_s=0.03 backward_s=0.07",
            tooltip="seconds of each step, for which ranks sleep; empty: as long as it takes (simulated: measured)",
            **common,
        )
        self._stragglers = ipywidgets.Text(
            description="stragglers",
            placeholder="lognormal:0.3",
            tooltip="distributions that multiply the seconds of compute",
            **common,
        )
        length = ipywidgets.HBox([self._length, self._unit])
        self._training = ipywidgets.VBox(
            [
                length,
                self._lr,
                self._optimizer,
                self._schedule,
                self._batch,
                self._seed,
                self._compute,
                self._stragglers,
            ]
        )

    def _make_place(self, cluster: Any) -> None:
        """Make the fields of where to train: on ranks, or simulated."""
        common = {"style": LABEL, "layout": WIDE}
        self._where = ipywidgets.ToggleButtons(
            options=[RANKS, SIMULATED],
            tooltips=["processes of a cluster", "in this process, on a network that is calculated"],
            style={"button_width": "150px"},
        )
        ranks = 2 if cluster is None else cluster.num_ranks
        self._ranks = ipywidgets.BoundedIntText(
            value=ranks, min=1, max=1024, description="ranks", disabled=cluster is not None, **common
        )
        self._workers = ipywidgets.BoundedIntText(value=16, min=1, max=100_000, description="workers", **common)
        self._network = ipywidgets.Dropdown(
            options=list(costs.names()), value="ethernet-10g", description="network", **common
        )
        self._place = ipywidgets.VBox()
        self._choose_place()
        self._where.observe(self._choose_place, names="value")

    def _make_runs(self) -> None:
        self._start = ipywidgets.Button(description="Start", icon="play", button_style="primary")
        self._start.on_click(self._start_clicked)
        self._buttons = RunButtons(
            self._session.stop, self._session.pause, self._session.resume, on_click=self._session.poll_often
        )
        self._line = ipywidgets.HTML()
        self._axes = AxisControls("seconds", self._refresh)
        self._list = ipywidgets.VBox()
        self._ranks_table = ipywidgets.HTML()
        buttons = ipywidgets.HBox([self._start, self._buttons.widget])
        title = ipywidgets.HTML("<b>Runs</b> (ticked ones are compared)")
        self._right = ipywidgets.VBox(
            [buttons, title, self._list, self._axes.widget, self._ranks_table],
            layout={"padding": "0 0 0 24px", "flex": "1 1 400px", "min_width": "0"},
        )
        self._show_buttons()

    def _choose_algorithm(self, _: Any = None) -> None:
        self._form = AlgorithmForm(self._algorithm.value)
        answer_while_busy(self._form.widget)
        without_null_tooltips(self._form.widget)
        self._form_box.children = (self._form.widget,)

    def _choose_place(self, _: Any = None) -> None:
        fields = (self._ranks,) if self._where.value == RANKS else (self._workers, self._network)
        self._place.children = (self._where, *fields)

    def _choice(self) -> Choice:
        """The training that the fields describe.

        Raises:
            ConfigError: a value is not valid.
        """
        simulated = self._where.value == SIMULATED
        settings = {self._unit.value: self._length.value, "seed": self._seed.value}
        optimizer, schedule = self._optimizer.value.split(), self._schedule.value.split()
        given = {
            "lr": optional_number(self._lr.value),
            "optimizer": optimizer_of(optimizer[0], optimizer[1:], "optimizer") if optimizer else None,
            "schedule": schedule_of(schedule[0], schedule[1:]) if schedule else None,
            "batch_size": optional_number(self._batch.value),
            "compute": compute_of(self._compute.value.split(), self._stragglers.value.split()),
        }
        return Choice(
            algorithm=algorithms.get(self._form.name, **self._form.options()),
            problem=self._own.get(self._problem.value, self._problem.value),
            workers=self._workers.value if simulated else self._ranks.value,
            network=self._network.value if simulated else None,
            settings=settings | {key: value for key, value in given.items() if value is not None},
        )

    def _start_clicked(self, _: Any) -> None:
        self._line.value = ""
        try:
            self._session.start(self._choice())
        except Exception as error:  # noqa: BLE001 - a button has no caller, so any error is shown
            self._line.value = error_line(error)
            return
        self._refresh()
        if self._ticker is None or not self._ticker.is_alive():
            self._ticker = Thread(target=self._tick, name="workbench-dashboard", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        """Refresh repeatedly, until no training runs."""
        while True:
            begin_s, active = time.thread_time(), self._session.active
            try:
                self._refresh()
            except Exception as error:  # noqa: BLE001 - as above
                self._line.value = error_line(error)
            if active is None:
                return
            active.timer.wait(pause_after(time.thread_time() - begin_s, INTERVAL_S))

    def _refresh(self) -> None:
        """Show the present state."""
        with self._lock:
            entries = list(self._session.entries)
            for entry in entries:
                if not entry.over.is_set() or entry.number not in self._boxes:
                    entry.poll()
            self._show_list(entries)
            self._show_buttons()
            if entries and entries[-1].error is not None and entries[-1].status == "failed":
                self._line.value = error_line(entries[-1].error)
            shown = [entry for entry in entries if entry.run is not None and self._boxes[entry.number].value]
            self._show_curves(shown)
            self._show_table([entry for entry in shown if entry.over.is_set()])
            self._keep()

    def _show_list(self, entries: list[Entry]) -> None:
        begun = [entry for entry in entries if entry.run is not None]
        texts = distinct_labels([entry.run for entry in begun if entry.run])
        labels = {entry.number: text for entry, text in zip(begun, texts, strict=True)}
        for entry in entries:
            if entry.number not in self._boxes:
                box = ipywidgets.Checkbox(value=True, indent=False, layout={"width": "auto"}, tooltip="")
                answer_while_busy(box)
                box.observe(lambda _: self._refresh(), names="value")
                self._boxes[entry.number] = box
            text = f"{entry.number}. {labels.get(entry.number, str(entry.choice.algorithm))}: {progress_of(entry)}"
            self._boxes[entry.number].description = text
        if len(self._list.children) != len(entries):
            self._list.children = tuple(self._boxes[entry.number] for entry in entries)

    def _show_buttons(self) -> None:
        active = self._session.active
        self._start.disabled = active is not None or self._closed
        self._buttons.show(active is not None and active.status == "paused", active=active is not None)

    def _show_curves(self, shown: list[Entry]) -> None:
        """Show live curves during a training, else a static figure.

        JupyterLab draws such a figure once, so the old one is cleared.
        """
        active = self._session.active
        state = (
            active is None,
            *self._axes.choice,
            *((entry.number, num_rows(entry), entry.status) for entry in shown),
        )
        if self._figure is None or state == self._drawn:
            return
        self._drawn = state
        runs = [entry.run for entry in shown if entry.run is not None and num_rows(entry)]
        training = active.run if active is not None else None
        self._ranks_table.value = status_table([training])._repr_html_() if training is not None else ""
        if active is not None and runs:
            self._curves.draw(self._axes.figure(runs, max_points=LIVE_POINTS))
        moving = active is not None and bool(runs)
        if not moving or not self._stage.children:
            self._figure.update({"text/html": ""}, raw=True)
            self._stage.children = (self._curves.widget,) if moving else ()
            if runs and not moving:
                self._figure.update(as_data(self.static()), raw=True)

    def _show_table(self, ended: list[Entry]) -> None:
        state = tuple(entry.number for entry in ended)
        if self._table is None or state == self._compared:
            return
        self._compared = state
        runs = [entry.run for entry in ended if entry.run is not None]
        self._table.update({"text/html": comparison_html(compare(runs)) if runs else ""}, raw=True)

    def _keep(self) -> None:
        """Update the HTML of a saved notebook, at most once a second: the runs; and a picture, if curves are live."""
        if self._kept is None or self._closed or (time.monotonic() - self._kept_s < KEEP_S and self._session.active):
            return
        self._kept_s = time.monotonic()
        text = still(self._lines("Dashboard") + (f"<br>{picture(self._curves.figure)}" if self._stage.children else ""))
        if text != self._kept_text:
            self._kept_text = text
            self._kept.update({"text/html": text}, raw=True)

    def static(self) -> Any:
        """Return the curves of the ticked runs as a static figure."""
        runs = [
            entry.run for entry in self._session.entries if entry.run is not None and self._boxes[entry.number].value
        ]
        return self._axes.figure(runs)

    def __repr__(self) -> str:
        entries = self._session.entries
        return (
            f"<Dashboard: {len(entries)} run{'s' if len(entries) != 1 else ''}, "
            f"{'training' if self._session.active else 'idle'}>"
        )

    def _ipython_display_(self) -> None:
        if not in_notebook():  # a terminal draws no figures
            print(repr(self))
            return
        with self._lock:
            self._kept = display(HTML(""), display_id=True)  # type: ignore[no-untyped-call]
            self._controls = display(self.widget, display_id=True)  # type: ignore[no-untyped-call]
            self._figure = display(HTML(""), display_id=True)  # type: ignore[no-untyped-call]
            self._table = display(HTML(""), display_id=True)  # type: ignore[no-untyped-call]
            self._drawn = self._compared = ()
            self._refresh()


def num_rows(entry: Entry) -> int:
    """Return the number of rows of metrics that a training has written."""
    return sum(map(len, entry.run.metrics.values())) if entry.run is not None else 0


def progress_of(entry: Entry) -> str:
    """Return the state of a training as a short text."""
    status = entry.status
    if status in ("starting", "simulating") or entry.run is None:
        return f"{status}, {entry.num_gradients} gradients" if entry.num_gradients else status
    rows = next((rows for rows in entry.run.metrics.values() if rows), [])
    last = next((row for row in reversed(rows) if row.get("loss") is not None), None)
    if last is None:
        return status
    return f"{status}, step {last['step'] + 1}, loss {three_digits(last['loss'])}"
