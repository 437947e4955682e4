"""Losses and accuracies of trainings against seconds: curves of several seeds on one grid, and times to a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.summary import time_to_accuracy, time_to_loss
from workbench.analysis.table import Column, Table
from workbench.papers.studies.paired_runs import paired, with_interval
from workbench.trace.run import Run

WINDOW = 5  # steps over which a training loss is averaged
POINTS = 40  # of a grid of seconds
Floats = NDArray[np.float64]


def mean_losses(runs: Sequence[Run], window: int = WINDOW, number: int = POINTS) -> dict[float, list[float]]:
    """Return seconds -> training loss of each seed, mean of the last `window` steps, interpolated on one grid."""
    return _gridded([_mean_loss(run, window) for run in runs], number)


def mean_errors(runs: Sequence[Run | None], number: int = POINTS) -> dict[float, list[float]]:
    """Return seconds -> test error in per cent of each run that did not diverge, interpolated on one grid."""
    found = on_one_grid(runs, "accuracy", number)
    return {at: [100 * (1 - value) for value in values] for at, values in found.items()}


def on_one_grid(
    runs: Sequence[Run | None], y: Literal["accuracy", "test_loss"], number: int = POINTS
) -> dict[float, list[float]]:
    """Return seconds -> accuracy or test loss of each run that did not diverge, interpolated on one grid."""
    curves = [run.curve("seconds", y) for run in runs if run is not None]
    return _gridded(curves, number) if curves else {}


def _gridded(curves: Sequence[tuple[Floats, Floats]], number: int) -> dict[float, list[float]]:
    """Seconds -> value of each curve, over the time that all curves cover."""
    grid = np.linspace(max(ends[0] for ends, _ in curves), min(ends[-1] for ends, _ in curves), number)
    return {float(at): [float(np.interp(at, *curve)) for curve in curves] for at in grid}


def _mean_loss(run: Run, window: int) -> tuple[Floats, Floats]:
    """Ends of steps in seconds, and the mean training loss of the `window` steps until then."""
    ends, losses = run.curve("seconds", "loss")
    return ends[window - 1 :], np.convolve(losses, np.ones(window) / window, mode="valid")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimesToTarget:
    """Seconds to a target of each algorithm, one for each seed.

    Attributes:
        seconds: name -> seconds; `cap_s` for a run that does not reach the target.
        cap_s: the longest run.
    """

    seconds: Mapping[Any, Sequence[float]]
    cap_s: float

    def ratios(self, over: Any, under: Any) -> list[float]:
        """Return the time of one algorithm over that of another, seed by seed."""
        return paired(self.seconds[over], self.seconds[under])

    def num_reached(self, name: Any) -> int:
        """Return how many runs of an algorithm reach the target."""
        return sum(value < self.cap_s for value in self.seconds[name])

    def censored(self, *names: Any) -> list[bool]:
        """Return for each seed whether a run of these algorithms does not reach the target; of all if none is named."""
        chosen = [self.seconds[name] for name in names or self.seconds]
        return [any(value >= self.cap_s for value in of_seed) for of_seed in zip(*chosen, strict=True)]

    def table(self, caption: str) -> Table:
        """Return a row for each algorithm: its seconds, and how many runs reach the target."""
        rows = [
            {"name": name, "seconds": with_interval(values), "reached": f"{self.num_reached(name)} of {len(values)}"}
            for name, values in self.seconds.items()
        ]
        columns = (Column("name", "algorithm"), Column("seconds", "seconds"), Column("reached", "reached by"))
        return Table(rows, columns, caption=f"{caption}. A target that is not reached counts as {self.cap_s:.3g} s.")


def times_to_accuracy(runs: Mapping[Any, Sequence[Run | None]], target: float) -> TimesToTarget:
    """Return seconds to a test accuracy (0 to 1)."""
    return _times(runs, lambda run: time_to_accuracy(run, target))


def times_to_test_loss(runs: Mapping[Any, Sequence[Run | None]], target: float) -> TimesToTarget:
    """Return seconds to a test loss."""
    return _times(runs, lambda run: time_to_loss(run, target))


def times_to_loss(runs: Mapping[str, Sequence[Run | None]], target: float) -> TimesToTarget:
    """Return seconds to a training loss: see `seconds_to_loss`."""
    return _times(runs, lambda run: seconds_to_loss(run, target))


def _times(runs: Mapping[Any, Sequence[Run | None]], reached_s: Callable[[Run], float | None]) -> TimesToTarget:
    ends = [run.steps()[-1]["seconds"] for found in runs.values() for run in found if run is not None]
    cap_s = float(max(ends))

    def one(run: Run | None) -> float:
        found = None if run is None else reached_s(run)
        return cap_s if found is None else min(cap_s, found)

    return TimesToTarget(seconds={name: [one(run) for run in found] for name, found in runs.items()}, cap_s=cap_s)


def seconds_to_loss(run: Run, target: float, window: int = WINDOW) -> float:
    """Return when the mean training loss of the last `window` steps first was at most `target`; infinite if never."""
    ends, means = _mean_loss(run, window)
    met = np.flatnonzero(means <= target)
    return float(ends[met[0]]) if len(met) else math.inf
