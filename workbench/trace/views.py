"""Numbers and figures of a run, asked of the run itself: the same for a record and for a training that is under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, Literal

XAxis = Literal["steps", "seconds", "samples", "bytes"]
YAxis = Literal["loss", "test_loss", "accuracy"]


class Views(ABC):
    """What `Run` and `RunHandle` offer, each by one function of `workbench.analysis` or `workbench.plots` that takes a `Run`.

    Those packages read runs, so they lie above this one, and nothing here needs them in order to be imported. A method imports
    its function by name when it is called, as pandas does with what draws its plots: a run is read without plotly.
    """

    __slots__ = ()

    @abstractmethod
    def _recorded(self) -> Any:
        """The run's record so far: a `trace.run.Run`."""

    def summary(self) -> dict[str, Any]:
        """The run so far in plain values: see `workbench.analysis.summary`."""
        found: dict[str, Any] = _analysis("summary", self)
        return found

    def overlap(self, steps: slice | None = None) -> Any:
        """Hidden and exposed communication and idle time, by rank and step: see `workbench.analysis.overlap`."""
        return _analysis("run_overlap", self, steps)

    def critical_path(self, steps: slice | None = None) -> Any:
        """The chain of spans, over ranks and through messages, that ends each step: see `workbench.analysis.critical_path`."""
        return _analysis("run_critical_path", self, steps)

    def parts(self, steps: slice | None = None) -> Any:
        """Seconds of waiting, wire, decoding, summing and encoding of a collective's messages, by rank: see `workbench.analysis.parts`."""
        return _analysis("run_parts", self, steps)

    def timeline(self, steps: slice | None = None, **options: Any) -> Any:
        """A figure of what each rank did when: see `workbench.plots.timeline`."""
        return import_module("workbench.plots").timeline(self._recorded(), steps, **options)

    def per_step(self, steps: slice | None = None) -> Any:
        """A figure of what each step's time went on, and of its critical path: see `workbench.plots.per_step`."""
        return import_module("workbench.plots").per_step(self._recorded(), steps)

    def curves(self, x: XAxis = "seconds", y: YAxis = "loss", **options: Any) -> Any:
        """A figure of a convergence curve, as far as it goes: see `workbench.plots.curves`."""
        return import_module("workbench.plots").curves([self._recorded()], x, y, **options)


def _analysis(name: str, views: Views, *steps: slice | None) -> Any:
    return getattr(import_module("workbench.analysis"), name)(views._recorded(), *steps)
