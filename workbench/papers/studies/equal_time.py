"""Trainings of a generative model in the same virtual time: one worker, backup workers, and asynchronous workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from workbench.algorithms import AsyncSGD, BackupSGD, SerialSGD
from workbench.costs import Lognormal
from workbench.errors import Diverged
from workbench.papers.studies.training import compute_cost, train
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.theory import LognormalTime

Name = Literal["one worker", "Sync-Opt", "Async-Opt"]
LOWER = 0.03  # factor on the learning rate after its decay
SPARE = 1.1  # factor on the number of steps, because workers do not end at the same time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """The least test loss so far of one run, at its evaluations.

    Attributes:
        times: ascending from 0 to the horizon, in mean times of a gradient.
        losses: the least loss until then; at first that of an untrained model.

    >>> run = BestSoFar(times=(0.0, 1.0, 2.0), losses=(3.0, 2.0, 2.0))
    >>> run.at(1.5), run.final, run.first(2.5), run.first(1.0)
    (2.0, 2.0, 1.0, inf)
    """

    times: tuple[float, ...]
    losses: tuple[float, ...]

    def at(self, time: float) -> float:
        """Return the least loss until a time."""
        return self.losses[int(np.searchsorted(self.times, time, side="right")) - 1]

    @property
    def final(self) -> float:
        """The least loss until the horizon."""
        return self.losses[-1]

    def first(self, goal: float) -> float:
        """Return the first time with at most this loss; infinite if there is none."""
        return min((time for time, loss in zip(self.times, self.losses, strict=True) if loss <= goal), default=math.inf)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EqualTime:
    """Trainings that end at the same virtual time. Each gradient takes a lognormal time; communication is free.

    Attributes:
        problem: a generative model with the attribute `levels`, the number of values of a pixel.
        horizon: training time, in mean times of a gradient.
        spread: sigma of the lognormal time.
        backups: b of Sync-Opt.
        evaluations: of each run.
        decay_after: updates after which the rate falls to 3 %; 0: never.
    """

    problem: Problem
    horizon: float
    spread: float
    backups: int
    evaluations: int
    decay_after: int = 0

    @property
    def untrained(self) -> float:
        """Test loss of a model that gives all levels the same probability: log(levels)."""
        model: Any = self.problem.model()
        return math.log(model.levels)

    def train(self, name: Name, workers: int, seeds: Sequence[int], *, lr: float, batch_size: int) -> list[BestSoFar]:
        """Train once for each seed. A run that diverges counts as an untrained model.

        Args:
            name: "one worker"; "Sync-Opt", with backups; or "Async-Opt".
            workers: number of workers, with backups.
            seeds: of data order, weights and times.
            lr: learning rate, the same for any number of workers.
            batch_size: images per gradient.
        """
        return [self._one(name, workers, seed, lr, batch_size) for seed in seeds]

    def _one(self, name: Name, workers: int, seed: int, lr: float, batch_size: int) -> BestSoFar:
        algorithms: dict[Name, Algorithm] = {
            "one worker": SerialSGD(),
            "Sync-Opt": BackupSGD(backups=self.backups),
            "Async-Opt": AsyncSGD(),
        }
        distribution, steps = Lognormal(sigma=self.spread), self._steps(name, workers)
        how: dict[str, Any] = {"steps": steps, "evaluate_every": max(1, steps // self.evaluations), "seed": seed}
        how |= {"batch_size": batch_size, "lr": lr, "schedule": partial(_falling, self.decay_after)}
        try:
            compute = compute_cost(1.0, distribution)
            run = train(
                algorithms[name], self.problem, workers=workers, compute=compute, trace_steps=0, threads=1, **how
            )
        except Diverged:
            return BestSoFar(times=(0.0, self.horizon), losses=(self.untrained, self.untrained))
        seconds, losses = run.curve("seconds", "test_loss")
        times = np.array([0.0, *seconds]) / distribution.mean
        best = np.minimum.accumulate(np.nan_to_num([self.untrained, *losses], nan=math.inf))
        within = times <= self.horizon
        return BestSoFar(
            times=(*times[within].tolist(), self.horizon), losses=(*best[within].tolist(), float(best[within][-1]))
        )

    def _steps(self, name: Name, workers: int) -> int:
        """Steps of each worker for the horizon, and a few more."""
        arrival = LognormalTime.of_mean(1.0, self.spread)
        used = workers - self.backups
        waits = arrival.expected_order_statistic(used, workers) if name == "Sync-Opt" else 1.0
        return math.ceil(SPARE * self.horizon / waits)


def _falling(decay_after: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda update: LOWER if decay_after and update >= decay_after else 1.0)
