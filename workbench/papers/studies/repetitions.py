"""Runs that differ in their seed only: accuracies, steps and seconds to a target, staleness. A run that diverged is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from workbench.analysis import Table, tabulate
from workbench.analysis.summary import time_to
from workbench.analysis.table import three_digits
from workbench.errors import Diverged
from workbench.papers.studies.paired_runs import GUESSING, final_accuracy
from workbench.papers.studies.training import train
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.trace.run import Run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Repetitions:
    """Runs of one setting, one for each seed, on a problem of ten classes.

    Attributes:
        runs: the runs; None for one that diverged. It counts as guessing, and as not reaching any target.
        steps: steps of each run. A run that does not reach a target counts with this number.
    """

    runs: Sequence[Run | None]
    steps: int

    @classmethod
    def train(
        cls, algorithm: Algorithm, problem: Problem, seeds: Sequence[int], *, steps: int, **settings: Any
    ) -> Repetitions:
        """Train once for each seed: see `papers.studies.training.train`."""

        def one(seed: int) -> Run | None:
            try:
                return train(algorithm, problem, steps=steps, seed=seed, trace_steps=0, **settings)
            except Diverged:
                return None

        return cls(runs=[one(seed) for seed in seeds], steps=steps)

    @property
    def finished(self) -> list[Run]:
        """The runs that did not diverge."""
        return [run for run in self.runs if run is not None]

    @property
    def num_diverged(self) -> int:
        """The number of runs that diverged."""
        return len(self.runs) - len(self.finished)

    def last(self) -> list[float]:
        """Return the last test accuracy of each run, in per cent."""
        return [final_accuracy(run) for run in self.runs]

    def last_errors(self) -> list[float]:
        """Return the last test error of each run, in per cent."""
        return [100 - accuracy for accuracy in self.last()]

    def best(self) -> list[float]:
        """Return the best test accuracy of each run, in per cent."""
        return [GUESSING if row is None else 100 * float(row["accuracy"]) for row in map(_best, self.runs)]

    def best_steps(self) -> list[int]:
        """Return the steps to the first evaluation with the best accuracy of each run."""
        return [self.steps if row is None else int(row["step"]) + 1 for row in map(_best, self.runs)]

    def steps_to(self, target: float) -> list[int]:
        """Return the steps until an evaluation first reaches a test accuracy (0 to 1); all steps if none does."""
        return [self.steps if row is None else int(row["step"]) + 1 for row in self._met(target)]

    def updates_to(self, target: float, limit: int) -> list[int]:
        """Return the updates of a server until an evaluation first reaches the accuracy; `limit` if none does."""
        return [
            limit
            if run is None or row is None
            else sum(change["seconds"] <= row["seconds"] for change in run.updates() if change["bucket"] == 0)
            for run, row in zip(self.runs, self._met(target), strict=True)
        ]

    def missed(self, target: float) -> list[bool]:
        """Return for each run whether no evaluation reaches the accuracy."""
        return [row is None for row in self._met(target)]

    def _met(self, target: float) -> list[dict[str, Any] | None]:
        return [None if run is None else time_to(run, "accuracy", target) for run in self.runs]

    def errors_by_step(self) -> dict[int, list[float]]:
        """Return step -> test error in per cent of each run that did not diverge."""
        curves = [run.curve("steps", "accuracy") for run in self.finished]
        if not curves:
            return {}
        return {int(step): [100 - 100 * float(ys[at]) for _, ys in curves] for at, step in enumerate(curves[0][0])}

    def staleness(self) -> list[int]:
        """Return the staleness of all gradients that servers used, of all runs."""
        return [int(value) for run in self.finished for change in run.updates() for value in change["staleness"]]


def _best(run: Run | None) -> dict[str, Any] | None:
    return None if run is None else max(run.evaluations(), key=lambda row: float(row["accuracy"]))


def targets_table(groups: Mapping[Any, Repetitions], targets: Sequence[float], caption: str, entry: str) -> Table:
    """Return a row for each setting: last and best accuracy, steps to each target, how many reach the last, how many diverge.

    Args:
        groups: setting -> its runs.
        targets: test accuracies (0 to 1).
        caption: of the table.
        entry: title of the first column.
    """
    rows = [
        {
            "entry": str(name),
            "last": float(np.mean(found.last())),
            "best": float(np.mean(found.best())),
            "at": float(np.mean(found.best_steps())),
            **{f"to{place}": float(np.mean(found.steps_to(target))) for place, target in enumerate(targets)},
            "reached": f"{found.missed(targets[-1]).count(False)} of {len(found.runs)}",
            "diverged": found.num_diverged,
        }
        for name, found in groups.items()
    ]
    return tabulate(
        rows,
        caption,
        entry=entry,
        last=("last accuracy (%)", three_digits),
        best=("best accuracy (%)", three_digits),
        at=("at step", three_digits),
        **{f"to{place}": (f"steps to {target:.1%}", three_digits) for place, target in enumerate(targets)},
        reached=f"{targets[-1]:.1%} reached by",
        diverged="diverged",
    )
