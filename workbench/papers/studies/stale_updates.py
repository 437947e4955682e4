"""How many updates a test loss takes if every gradient has the same staleness, at the best learning rate for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from workbench.algorithms import Constant, StaleSGD
from workbench.analysis.summary import time_to
from workbench.analysis.table import Column, Table, three_digits
from workbench.papers.studies.paired_runs import simulated, with_interval
from workbench.papers.studies.training import compute_cost
from workbench.problems.base import Problem
from workbench.trace.run import Run


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleUpdates:
    """Updates to a test loss for each staleness.

    Attributes:
        best: staleness -> updates of each seed, at the rate with the smallest mean.
        rate: staleness -> that rate.
        at_edge: the stalenesses whose best rate is the smallest or the largest that was tried.
        capped: the stalenesses for which no rate reaches the loss with all seeds; they count with all updates.
    """

    best: Mapping[int, Sequence[float]]
    rate: Mapping[int, float]
    at_edge: tuple[int, ...]
    capped: tuple[int, ...]

    def table(self, caption: str) -> Table:
        """Return a row for each staleness."""
        rows = [
            {
                "staleness": staleness,
                "updates": with_interval(values),
                "rate": self.rate[staleness],
                "note": ", ".join(
                    word
                    for word, there in (("rate at an edge", self.at_edge), ("not reached by all", self.capped))
                    if staleness in there
                ),
            }
            for staleness, values in self.best.items()
        ]
        columns = (
            Column("staleness", "staleness"),
            Column("updates", "updates"),
            Column("rate", "best rate", three_digits),
            Column("note", ""),
        )
        return Table(rows, columns, caption=caption)


def updates_by_staleness(
    problem: Problem,
    staleness: Sequence[int],
    seeds: Sequence[int],
    *,
    lr: float,
    updates: int,
    target: float,
    factors: Sequence[float] = (0.5, 1.0, 2.0),
    evaluations: int = 50,
) -> StaleUpdates:
    """Count the updates of one worker to a test loss, at the best of the rates `factors` * lr / (1 + staleness), without momentum.

    Args:
        problem: what to train.
        staleness: of each gradient, constant.
        seeds: of weights and data order.
        lr: rate without staleness.
        updates: of each run; a run that does not reach the loss counts with all.
        target: test loss.
        factors: of the rate, ascending.
        evaluations: number of evaluations in a run.
    """
    every = max(1, updates // evaluations)
    settings: dict[str, Any] = {"workers": 1, "compute": compute_cost(1.0), "steps": updates, "trace_steps": 0}
    best: dict[int, list[float]] = {}
    rate: dict[int, float] = {}
    for stale in staleness:
        rates = {f"{factor:g}": factor * lr / (1 + stale) for factor in factors}
        algorithms = dict.fromkeys(rates, StaleSGD(staleness=Constant(stale)))
        own = {name: [value, 0.0] for name, value in rates.items()}
        runs = simulated(algorithms, problem, seeds, rates=own, evaluate_every=every, **settings)
        needed = {name: [_updates_to(run, target, updates) for run in found] for name, found in runs.items()}
        name = min(needed, key=lambda each: float(np.mean(needed[each])))
        best[stale], rate[stale] = needed[name], rates[name]
    ends = {stale: (factors[0] * lr / (1 + stale), factors[-1] * lr / (1 + stale)) for stale in staleness}
    return StaleUpdates(
        best=best,
        rate=rate,
        at_edge=tuple(stale for stale in staleness if rate[stale] in ends[stale]),
        capped=tuple(stale for stale in staleness if updates in best[stale]),
    )


def _updates_to(run: Run | None, target: float, updates: int) -> float:
    met = None if run is None else time_to(run, "test_loss", target)
    return float(met["step"] + 1) if met else float(updates)
