"""Delay distributions of mean 1, the paper's rule for backup workers with them, and simulated steps without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench import problems
from workbench.algorithms import AsyncSGD, Constant, Empirical, Geometric, SerialSGD, Uniform
from workbench.algorithms.staleness import Staleness
from workbench.analysis.staleness import staleness_by_bucket
from workbench.analysis.summary import time_to
from workbench.costs import Bimodal, Independent, Lognormal, Pareto, ShiftedExponential, Stragglers
from workbench.costs import stragglers as laws
from workbench.errors import ConfigError
from workbench.naming import unknown
from workbench.papers.training import train
from workbench.papers.trials import slept
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.theory import (
    Arrival,
    Backlog,
    BackupChoice,
    BimodalTime,
    QuantileTime,
    best_backups,
    fit_iterations,
    machine_seconds,
)
from workbench.trace.run import Run

OF_SPREAD = ("lognormal", "shifted exponential", "Pareto", "bimodal")
STALENESS = ("constant", "uniform", "geometric", "empirical")


def independent(name: str) -> Independent:
    """Return a distribution from which each worker draws in each step, by its name.

    >>> independent("lognormal:0.3")
    Lognormal(sigma=0.3)

    Raises:
        ConfigError: workers of that name do not draw independently, or it has no quantile function.
    """
    found = laws.get(name)
    if not isinstance(found, Independent):
        raise ConfigError(f"stragglers {name!r}: give random ones, such as lognormal:0.3, pareto:4 or bimodal:0.05,3")
    return found


def of_spread(name: str, spread: float, often: float = 0.05) -> Independent:
    """Return the distribution of this spread (standard deviation over mean).

    Args:
        name: one of `OF_SPREAD`.
        spread: above 0, below 1.
        often: probability of a slow step, of the bimodal distribution.

    >>> of_spread("Pareto", 0.75)
    Pareto(shape=2.6666666666666665)
    """
    match name:
        case "lognormal":
            return Lognormal(sigma=math.sqrt(math.log1p(spread**2)))
        case "shifted exponential":
            return ShiftedExponential(scale=spread / (1 - spread))
        case "Pareto":
            return Pareto(shape=1 + math.sqrt(1 + spread**-2))
        case "bimodal":
            return Bimodal(probability=often, factor=1 + spread / (math.sqrt(often * (1 - often)) - often * spread))
    raise unknown("distribution", name, OF_SPREAD)


def arrival_of(law: Independent) -> Arrival:
    """Return the arrival times of a distribution, scaled to mean 1."""
    if isinstance(law, Bimodal):
        return BimodalTime(usual_s=1 / law.mean, slow_s=law.factor / law.mean, probability=law.probability)
    return QuantileTime(quantile_of=law.quantile, scale_s=1 / law.mean)


def staleness_of(kind: str, mean: int) -> Staleness:
    """Return a distribution of staleness with this mean.

    Args:
        kind: "constant", "uniform" (from 0 to twice the mean), "geometric", or "empirical": that of mean + 1 simulated
            asynchronous workers with lognormal compute.
        mean: its mean, in updates.

    >>> staleness_of("uniform", 20)
    Uniform(low=0, high=40)
    """
    match kind:
        case "constant":
            return Constant(mean)
        case "uniform":
            return Uniform(0, 2 * mean)
        case "geometric":
            return Geometric(mean)
        case "empirical":
            law = Lognormal(sigma=0.3)
            found = staleness_by_bucket(timed(AsyncSGD(), law, workers=mean + 1, steps=40, mean=1.0))[0]
            values, counts = np.unique(found, return_counts=True)
            return Empirical(tuple(values.tolist()), tuple(counts.astype(float).tolist()))
    raise unknown("distribution of staleness", kind, STALENESS)


# -- the rule --------------------------------------------------------------------------------------------------


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
    """The rule for the number of backups of N + b machines: least I(N) E[X_(N:N+b)].

    Attributes:
        machines: N + b.
        iterations: I(N).
        drawn: steps over which times with carried stragglers are means.
        overhead: of a step, for any N, in units of mean compute.

    Paper: chen2016revisiting, section 3.1.
    """

    machines: int
    iterations: Callable[[int], float]
    drawn: int
    overhead: float = 0.0

    def best(self, law: Independent, seed: int = 0) -> BackupChoice:
        """Return the best b. A straggler is not cancelled, so it starts its next step late."""
        return best_backups(self.machines, self.iterations, self.carried(law, seed), self.overhead)

    def best_if_cancelled(self, law: Independent) -> BackupChoice:
        """Return the best b if all machines start each step together."""
        return best_backups(self.machines, self.iterations, arrival_of(law), self.overhead)

    def carried(self, law: Independent, seed: int = 0) -> Backlog:
        """Return arrival times of mean 1 with stragglers carried into the next step."""
        return Backlog(arrival=arrival_of(law), num_steps=self.drawn, seed=seed)

    def step_s(self, law: Independent, backups: Iterable[int], *, cancelled: bool = False) -> dict[int, float]:
        """Return b -> mean time of a step without overhead."""
        arrival = arrival_of(law) if cancelled else self.carried(law)
        return {b: arrival.expected_order_statistic(self.machines - b, self.machines) for b in backups}

    def machine_seconds(self, law: Independent, extra: Iterable[int]) -> dict[int, float]:
        """Return b -> machine-seconds to the goal of N = `machines` with b more machines, over those without."""
        arrival = self.carried(law)
        alone = machine_seconds(self.machines, 0, self.iterations, arrival)
        return {b: machine_seconds(self.machines, b, self.iterations, arrival) / alone for b in extra}


def relative_times(choice: BackupChoice, backups: Iterable[int]) -> dict[int, float]:
    """Return b -> predicted time to the goal, over that with b = 0."""
    return {b: choice.total_s[b] / choice.total_s[0] for b in backups}


def idle_shares(choice: BackupChoice) -> tuple[float, float]:
    """Return the share of the machines' time that is idle with b = 0, and that which yields no used gradient with the best b.

    Times of a step are in units of mean compute, without overhead.
    """
    used = choice.num_gradients[choice.backups] / (choice.total * choice.step_s[choice.backups])
    return 1 - 1 / choice.step_s[0], 1 - used


# -- simulated steps -------------------------------------------------------------------------------------------


def timed(
    algorithm: Algorithm,
    law: Stragglers,
    *,
    workers: int,
    steps: int,
    mean: float,
    seed: int = 0,
    network: Any = "free",
    problem: Problem | None = None,
) -> Run:
    """Simulate steps without gradient values.

    Args:
        algorithm: the algorithm.
        law: of the workers' delays.
        workers: number of workers.
        steps: of each worker.
        mean: mean factor of the law; compute takes 1 on average.
        seed: of the delays.
        network: cost of messages.
        problem: whose parameters are sent; a small one by default.
    """
    # Samples are counted, never read
    counted = replace(problem or problems.get("digits-softmax"), train=range(10**9), test=None)
    how: dict[str, Any] = {"timing_only": True, "steps": steps, "batch_size": 1, "trace_steps": 0, "seed": seed}
    return train(algorithm, counted, workers=workers, network=network, compute=slept(1 / mean, law), **how)


def steps_s(run: Run, steps: int) -> float:
    """Return the mean time between the updates of a run with one server and this number of steps."""
    return float(run.updates()[-1]["seconds"] / steps)


def update_interval_s(run: Run, skip: float = 0.1) -> float:
    """Return the mean time between updates, without the first and last `skip`: workers start together and stop one by one."""
    ends = [change["seconds"] for change in run.updates()]
    ends = ends[int(skip * len(ends)) : len(ends) - math.ceil(skip * len(ends))]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def steady_staleness(run: Run, skip: float = 0.2) -> NDArray[np.int64]:
    """Return the staleness of the gradients of one shard that takes one for each update, without the first and last `skip`."""
    found = np.array([change["staleness"][0] for change in run.updates()], np.int64)
    return found[int(skip * len(found)) : len(found) - math.ceil(skip * len(found))]


def used_share(runs: Sequence[Run]) -> float:
    """Return the share of the gradients that entered an update; the others were dropped."""
    changes = [change for run in runs for change in run.updates()]
    used = sum(len(change["staleness"]) for change in changes)
    return used / max(1, used + sum(len(change["dropped"]) for change in changes))


def share_of_ranks(runs: Sequence[Run], ranks: Sequence[int]) -> float:
    """Return the share of the used gradients that come from these ranks."""
    sources = [rank for run in runs for change in run.updates() for rank in change["sources"]]
    return float(np.isin(sources, ranks).mean())
