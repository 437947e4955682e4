"""Delay distributions of workers, of mean 1, and what they do to simulated steps without gradient values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench import problems
from workbench.algorithms import AsyncSGD, Constant, Empirical, Geometric, Uniform
from workbench.algorithms.staleness import Staleness
from workbench.analysis.staleness import staleness_by_bucket
from workbench.costs import Bimodal, Independent, Lognormal, Pareto, ShiftedExponential, Stragglers
from workbench.costs import stragglers as distributions
from workbench.errors import ConfigError
from workbench.naming import unknown
from workbench.papers.studies.simulated_steps import simulated_steps
from workbench.papers.studies.training import compute_cost
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.theory import Arrival, BimodalTime, QuantileTime
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
    found = distributions.get(name)
    if not isinstance(found, Independent):
        raise ConfigError(f"stragglers {name!r}: give random ones, such as lognormal:0.3, pareto:4 or bimodal:0.05,3")
    return found


def of_spread(name: str, spread: float, often: float = 0.05) -> Independent:
    """Return the distribution of this spread (standard deviation over mean).

    Args:
        name: one of `OF_SPREAD`.
        spread: above 0, below 1.
        often: probability of a slow step, of the bimodal distribution.

    >>> round(of_spread("Pareto", 0.75).mean, 2)
    1.6
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


def arrival_of(distribution: Independent) -> Arrival:
    """Return the arrival times of a distribution, scaled to mean 1."""
    if isinstance(distribution, Bimodal):
        usual_s = 1 / distribution.mean
        return BimodalTime(usual_s=usual_s, slow_s=usual_s * distribution.factor, probability=distribution.probability)
    return QuantileTime(quantile_of=distribution.quantile, scale_s=1 / distribution.mean)


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
            distribution = Lognormal(sigma=0.3)
            found = staleness_by_bucket(timed(AsyncSGD(), distribution, workers=mean + 1, steps=40, mean=1.0))[0]
            values, counts = np.unique(found, return_counts=True)
            return Empirical(tuple(values.tolist()), tuple(counts.astype(float).tolist()))
    raise unknown("distribution of staleness", kind, STALENESS)


# -- simulated steps -------------------------------------------------------------------------------------------


def timed(
    algorithm: Algorithm,
    distribution: Stragglers,
    *,
    workers: int,
    steps: int,
    mean: float,
    seed: int = 0,
    network: Any = "free",
    problem: Problem | None = None,
) -> Run:
    """Simulate steps with delays, without gradient values: see `simulated_steps`.

    Args:
        algorithm: the algorithm.
        distribution: of the workers' delays.
        workers: number of workers.
        steps: of each worker.
        mean: mean factor of the distribution; compute takes 1 on average.
        seed: of the delays.
        network: cost of messages.
        problem: whose parameters are sent; a small one by default.
    """
    task = problem or problems.get("digits-softmax")
    compute = compute_cost(1 / mean, distribution)
    return simulated_steps(algorithm, task, workers=workers, network=network, compute=compute, steps=steps, seed=seed)


def steps_s(run: Run, steps: int) -> float:
    """Return the mean time between the updates of a run with one server and this number of steps."""
    return float(run.updates()[-1]["seconds"] / steps)


def update_interval_s(run: Run, skip: float = 0.1) -> float:
    """Return the mean time between updates, without the first and last `skip`: workers start together and stop one by one."""
    ends = [change["seconds"] for change in run.updates()]
    ends = ends[int(skip * len(ends)) : len(ends) - math.ceil(skip * len(ends))]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def steady_staleness(run: Run, skip: float = 0.2) -> NDArray[np.int64]:
    """Return the staleness of one shard's gradients if each update takes one, without the first and last `skip`."""
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
