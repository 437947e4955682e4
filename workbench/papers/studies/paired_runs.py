"""Trainings of several algorithms, paired by seed: on ranks in rotating order, or simulated, and their differences.

The compute of a rank may be slept (`Settings(compute=)`), so its seconds are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import ConfigError, Diverged
from workbench.papers.studies.all_cores import each
from workbench.papers.studies.training import compute_cost, train
from workbench.papers.verdicts import estimate
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.schedules import linear_to_zero
from workbench.trace.run import Run

if TYPE_CHECKING:
    from workbench.clusters import Cluster

SKIPPED = 2  # first steps, in which a pipeline fills
GUESSING = 10.0  # per cent: the accuracy of guessing one of ten classes


def rotated(
    cluster: Cluster,
    algorithms: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int],
    *,
    rates: Mapping[str, Sequence[float]] | None = None,
    **settings: Any,
) -> dict[str, list[Run]]:
    """Train by each algorithm once per seed. The order rotates from seed to seed.

    A short training runs first, because the first one on new ranks opens connections and loads libraries.

    Args:
        cluster: the ranks.
        algorithms: name -> algorithm.
        problem: what to train.
        seeds: of weights, data order and stragglers.
        rates: name -> learning rate, and momentum if given; the problem's optimizer for other names.
        settings: fields of `Settings`.

    Returns:
        name -> a run for each seed.
    """
    names = list(algorithms)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    warm_up = {**settings, **sgd((rates or {}).get(names[0], ())), "steps": SKIPPED}
    cluster.train(algorithms[names[0]], problem, **warm_up).wait()
    for turn, seed in enumerate(seeds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            own = {**settings, **sgd((rates or {}).get(name, ())), "seed": seed}
            runs[name].append(cluster.train(algorithms[name], problem, **own).wait().run)
    return runs


def simulated(
    algorithms: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int],
    *,
    rates: Mapping[str, Sequence[float]],
    **settings: Any,
) -> dict[str, list[Run | None]]:
    """Train by each algorithm once per seed on simulated workers; None for a run that diverged. See `rotated`."""

    def one(which: tuple[str, int]) -> Run | None:
        name, seed = which
        try:
            return train(algorithms[name], problem, seed=seed, **settings, **sgd(rates.get(name, ())))
        except Diverged:
            return None

    runs = iter(each(one, [*product(algorithms, seeds)]))
    return {name: [next(runs) for _ in seeds] for name in algorithms}


def sgd(rate: Sequence[float]) -> dict[str, Any]:
    """Return settings: the learning rate, or a rate and a momentum of SGD; none for the problem's own optimizer.

    >>> sgd([0.1]), sgd([])
    ({'lr': 0.1}, {})
    """
    match rate:
        case []:
            return {}
        case [lr]:
            return {"lr": lr}
        case [lr, momentum]:
            return {"optimizer": partial(torch.optim.SGD, lr=lr, momentum=momentum)}
    raise ConfigError(f"{rate}: give a learning rate, or a learning rate and a momentum")


def step_s(run: Run) -> float:
    """Return mean seconds of a step, without the first ones. A step ends when its slowest rank ends it."""
    ends = [row["seconds"] for row in run.steps()]
    if len(ends) < SKIPPED + 2:
        raise ConfigError(f"{len(ends)} steps: give {SKIPPED + 2} or more to measure the time of one")
    return float((ends[-1] - ends[SKIPPED]) / (len(ends) - 1 - SKIPPED))


def final_accuracy(run: Run | None) -> float:
    """Return the last test accuracy in per cent; that of guessing for a run that diverged."""
    return GUESSING if run is None else 100 * float(run.evaluations()[-1]["accuracy"])


def final_accuracies(
    algorithms: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int],
    *,
    rates: Mapping[str, Sequence[float]],
    workers: int,
    epochs: int,
) -> dict[str, list[float]]:
    """Return each algorithm's last test accuracy in per cent, for each seed, of simulated runs with real gradients.

    The learning rate falls linearly to 0 over the last half of the steps. See `simulated`.
    """
    steps = epochs * -(-problem.num_samples() // (problem.batch_size * workers))
    falling = linear_to_zero(steps, steps // 2)
    settings: dict[str, Any] = {"steps": steps, "schedule": falling, "evaluate_every": 0, "trace_steps": 0}
    runs = simulated(algorithms, problem, seeds, rates=rates, workers=workers, compute=compute_cost(1.0), **settings)
    return {name: [final_accuracy(run) for run in found] for name, found in runs.items()}


def paired(
    over: Iterable[float], under: Iterable[float], apart: Callable[[float, float], float] = lambda a, b: a / b
) -> list[float]:
    """Return a number for each seed from two algorithms' numbers: their ratio, or the result of `apart`."""
    return [apart(one, other) for one, other in zip(over, under, strict=True)]


def with_interval(values: Sequence[float]) -> str:
    """Return the mean and its 95 % interval as text.

    >>> with_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    '3.0 [1.0, 5.0]'
    """
    return f"{estimate(values)}"
