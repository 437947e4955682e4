"""The rule of chen2016revisiting for the number of backup workers, with delays of mean 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from workbench.algorithms import SerialSGD
from workbench.analysis.summary import time_to
from workbench.analysis.table import Column, Table, three_digits
from workbench.costs import Independent
from workbench.errors import ConfigError
from workbench.papers.studies.stragglers import arrival_of
from workbench.papers.studies.training import train
from workbench.problems.base import Problem
from workbench.theory import Backlog, BackupChoice, best_backups, fit_iterations, machine_seconds


def iterations_of(counted: Mapping[int, float]) -> Callable[[int], float]:
    """Return I(N) from counts: I (1 + S/N) if that fits; otherwise linear between the counts, and 1/N below them.

    >>> rule = iterations_of({50: 137.5e3, 100: 76.2e3})
    >>> round(rule(96))
    78754
    """
    try:
        return fit_iterations(counted.items())
    except ConfigError:
        numbers, counts = [*counted], [*counted.values()]
        return lambda number: float(np.interp(number, numbers, counts)) * max(1.0, numbers[0] / number)


def updates_to_loss(
    problem: Problem, goal: float, seeds: Sequence[int], *, lr: float, batch_size: int, limit: int, **settings: Any
) -> list[int]:
    """Return for each seed the updates of one worker until an evaluation first shows this test loss.

    Args:
        problem: what to train.
        goal: test loss.
        seeds: of weights and data order.
        lr: learning rate.
        batch_size: samples of an update.
        limit: updates of a run.
        settings: fields of `Settings`, and the cost of compute.

    Raises:
        ConfigError: a run does not reach the loss.
    """
    found = []
    for seed in seeds:
        how: dict[str, Any] = {"lr": lr, "batch_size": batch_size, "steps": limit, "seed": seed, **settings}
        met = time_to(train(SerialSGD(), problem, workers=1, **how), "test_loss", goal)
        if met is None:
            raise ConfigError(f"{goal=} is not reached in {limit} updates: give more updates, or a larger loss")
        found.append(int(met["step"]) + 1)
    return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRule:
    """The rule for the number b of backups of N + b machines: the b with the least I(N) E[X_(N:N+b)].

    Attributes:
        machines: N + b.
        iterations: I(N).
        drawn: number of drawn steps over which times with backlog are averaged.
        overhead: constant time of a step, the same for any N, in units of mean compute.

    Paper: chen2016revisiting, section 3.1.
    """

    machines: int
    iterations: Callable[[int], float]
    drawn: int
    overhead: float = 0.0

    def best(self, distribution: Independent, seed: int = 0) -> BackupChoice:
        """Return the best b. A straggler is not cancelled, so it starts its next step late."""
        return best_backups(self.machines, self.iterations, self.backlog(distribution, seed), self.overhead)

    def best_if_cancelled(self, distribution: Independent) -> BackupChoice:
        """Return the best b if all machines start each step together."""
        return best_backups(self.machines, self.iterations, arrival_of(distribution), self.overhead)

    def backlog(self, distribution: Independent, seed: int = 0) -> Backlog:
        """Return arrival times of mean 1 with backlog: a straggler begins its next step late."""
        return Backlog(arrival=arrival_of(distribution), num_steps=self.drawn, seed=seed)

    def step_s(self, distribution: Independent, backups: Iterable[int], *, cancelled: bool = False) -> dict[int, float]:
        """Return b -> mean time of a step without overhead."""
        arrival = arrival_of(distribution) if cancelled else self.backlog(distribution)
        return {b: arrival.expected_order_statistic(self.machines - b, self.machines) for b in backups}

    def machine_seconds(self, distribution: Independent, extra: Iterable[int]) -> dict[int, float]:
        """Return b -> machine-seconds to the goal with N = `machines` and b more, divided by those with b = 0."""
        arrival = self.backlog(distribution)
        alone = machine_seconds(self.machines, 0, self.iterations, arrival)
        return {b: machine_seconds(self.machines, b, self.iterations, arrival) / alone for b in extra}


def relative_times(choice: BackupChoice, backups: Iterable[int]) -> dict[int, float]:
    """Return b -> predicted time to the goal, divided by that with b = 0."""
    return {b: choice.total_s[b] / choice.total_s[0] for b in backups}


def idle_shares(choice: BackupChoice) -> tuple[float, float]:
    """Return two shares of the machines' time: idle with b = 0, and idle or spent on dropped gradients with the best b.

    Times of a step are in units of mean compute, without overhead.
    """
    used = choice.num_gradients[choice.backups] / (choice.total * choice.step_s[choice.backups])
    return 1 - 1 / choice.step_s[0], 1 - used


def backups_table(choices: Mapping[float, tuple[BackupChoice, BackupChoice]], caption: str) -> Table:
    """Return a row for each spread: the best b and its gain, without and with backlog.

    Args:
        choices: spread -> (`BackupRule.best_if_cancelled`, `BackupRule.best`).
        caption: of the table.
    """
    rows = [
        {
            "spread": spread,
            "fresh": fresh.backups,
            "fresh_gain": fresh.gain,
            "backlog": backlog.backups,
            "backlog_gain": backlog.gain,
        }
        for spread, (fresh, backlog) in choices.items()
    ]
    columns = (
        Column("spread", "spread of arrivals", three_digits),
        Column("fresh", "best b"),
        Column("fresh_gain", "times as fast as b = 0", three_digits),
        Column("backlog", "best b with backlog"),
        Column("backlog_gain", "times as fast", three_digits),
    )
    return Table(rows, columns, caption=caption)
