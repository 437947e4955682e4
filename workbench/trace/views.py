"""Methods of a run that call the analysis and the figures. A stored run and a running training share them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, Literal

XAxis = Literal["steps", "epochs", "seconds", "samples", "bytes"]
YAxis = str  # "loss", "test_loss", "accuracy", or the name of one of the problem's metrics


class Views(ABC):
    """The common methods of `Run` and `RunHandle`.

    Each calls one function of `workbench.analysis`, `workbench.plots` or `workbench.replica`.

    Those packages are in higher layers, because they read runs. So a method imports its function by name when it is
    called, and reading a run does not import plotly.
    """

    __slots__ = ()

    _problem: Any = None  # what is trained; `RunHandle` knows it

    @abstractmethod
    def _recorded(self) -> Any:
        """Return the record so far: a `trace.run.Run`."""

    def summary(self) -> dict[str, Any]:
        """Return the run so far as plain values: see `workbench.analysis.summary`."""
        found: dict[str, Any] = _analysis("summary", self)
        return found

    def overlap(self, steps: slice | None = None) -> Any:
        """Return hidden and exposed communication and idle time, by rank and step: see `workbench.analysis.overlap`."""
        return _analysis("run_overlap", self, steps)

    def critical_path(self, steps: slice | None = None) -> Any:
        """Return the chain of spans, over ranks and messages, that ends each step: see `analysis.critical_path`."""
        return _analysis("run_critical_path", self, steps)

    def parts(self, steps: slice | None = None) -> Any:
        """Return each rank's seconds of waiting, wire, decoding, summing and encoding: see `analysis.parts`."""
        return _analysis("run_parts", self, steps)

    def timeline(self, steps: slice | None = None, **options: Any) -> Any:
        """Draw what each rank did when: see `workbench.plots.timeline`."""
        return import_module("workbench.plots").timeline(self._recorded(), steps, **options)

    def trace_viewer(self, steps: slice | None = None, **options: Any) -> Any:
        """Return the timeline with ranks that fold, keys, messages and Perfetto: see `workbench.plots.TraceViewer`."""
        return import_module("workbench.plots").TraceViewer(self._recorded(), steps, **options)

    def per_step(self, steps: slice | None = None) -> Any:
        """Draw the parts of each step's time, and its critical path: see `workbench.plots.per_step`."""
        return import_module("workbench.plots").per_step(self._recorded(), steps)

    def curves(self, x: XAxis = "seconds", y: YAxis = "loss", **options: Any) -> Any:
        """Draw the convergence curve so far: see `workbench.plots.curves`."""
        return import_module("workbench.plots").curves([self._recorded()], x, y, **options)

    def model(self, problem: Any = None, *, average: bool = False) -> Any:
        """Return the trained model, in evaluation mode, once the run has ended: see `replica.trained.trained_model`.

        Args:
            problem: the problem that was trained; not needed for one of this package, and in the session that trained.
            average: whether to return rank 0's moving average of the weights (`ema_decay`).
        """
        return import_module("workbench.replica.trained").trained_model(
            self._recorded(), self._problem if problem is None else problem, average=average
        )

    def to_pandas(self, what: str = "steps") -> Any:
        """Return a pandas frame of "steps", "evaluations", "metrics" of each rank, "spans" or "messages".

        See `analysis.frames.frame`.
        """
        return import_module("workbench.analysis").frame(self._recorded(), what, "pandas")

    def to_polars(self, what: str = "steps") -> Any:
        """Return a polars frame; see `to_pandas`."""
        return import_module("workbench.analysis").frame(self._recorded(), what, "polars")

    def _row_html(self) -> str:
        """Return the run's row in the table of runs, as HTML: see `workbench.analysis.compare`."""
        table: str = import_module("workbench.analysis").compare([self._recorded()])._repr_html_()
        return table


def _analysis(name: str, views: Views, *steps: slice | None) -> Any:
    return getattr(import_module("workbench.analysis"), name)(views._recorded(), *steps)
