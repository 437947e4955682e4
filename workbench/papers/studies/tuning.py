"""A grid of learning rates and momenta: losses of each seed, the best settings, and settings chosen on the other seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.errors import Diverged
from workbench.papers.studies.training import train
from workbench.problems.base import Problem
from workbench.program import Algorithm

GUESSING = math.log(10)  # loss of guessing one of ten classes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Last test losses of one algorithm on one number of workers.

    Attributes:
        rates: learning rates of an update with one gradient.
        momenta: momenta.
        losses: (rates, momenta, seeds).

    >>> grid = Grid(rates=[0.1, 0.2], momenta=[0.0], losses=np.array([[[1.0, 3.0, 2.0]], [[2.0, 1.0, 1.0]]]))
    >>> grid.own(0), grid.own(1)
    ((0.1, 0.0), (0.2, 0.0))
    >>> grid.judged()
    [2.0, 3.0, 1.0]
    """

    rates: Sequence[float]
    momenta: Sequence[float]
    losses: NDArray[np.float64]

    @classmethod
    def train(
        cls,
        algorithm: Algorithm,
        problem: Problem,
        seeds: Sequence[int],
        *,
        rates: Sequence[float],
        momenta: Sequence[float],
        gradients: int,
        **settings: Any,
    ) -> Grid:
        """Train with all settings. A run that diverges, or is worse than guessing one of ten classes, counts as guessing.

        Args:
            algorithm: the algorithm.
            problem: what to train.
            seeds: of weights, data order and delays.
            rates, momenta: the grid.
            gradients: number of gradients in an update. It multiplies the rate.
            settings: see `papers.studies.training.train`.
        """

        def loss(rate: float, momentum: float, seed: int) -> float:
            optimizer = partial(torch.optim.SGD, lr=rate * gradients, momentum=momentum)
            how: dict[str, Any] = {"optimizer": optimizer, "evaluate_every": 0, "trace_steps": 0, "seed": seed}
            try:
                run = train(algorithm, problem, **how, **settings)
            except Diverged:
                return GUESSING
            return min(GUESSING, float(run.evaluations()[-1]["test_loss"]))

        found = [[[loss(rate, momentum, seed) for seed in seeds] for momentum in momenta] for rate in rates]
        return cls(rates=rates, momenta=momenta, losses=np.array(found))

    @property
    def _settings(self) -> list[tuple[float, float]]:
        return [*product(self.rates, self.momenta)]

    @property
    def _flat(self) -> NDArray[np.float64]:
        """(settings, seeds)"""
        return self.losses.reshape(len(self._settings), -1)

    def by_momentum(self) -> dict[float, list[float]]:
        """Return momentum -> loss of each seed, at the rate with the least mean for that momentum."""
        best = self.losses.mean(axis=2).argmin(axis=0)
        return {momentum: self.losses[best[at], at].tolist() for at, momentum in enumerate(self.momenta)}

    def own(self, seed: int) -> tuple[float, float]:
        """Return the rate and the momentum with the least loss of one seed, by its place."""
        return self._settings[int(self._flat[:, seed].argmin())]

    def own_momenta(self) -> list[float]:
        """Return the best momentum of each seed."""
        return [self.own(seed)[1] for seed in range(self.losses.shape[2])]

    def own_rates(self) -> list[float]:
        """Return the best learning rate of each seed."""
        return [self.own(seed)[0] for seed in range(self.losses.shape[2])]

    def judged(self, tuned: Grid | None = None) -> list[float]:
        """Return the loss of each seed with the settings of least mean loss on all other seeds.

        A seed is never judged by settings that were chosen on it, so a larger grid gives no advantage.

        Args:
            tuned: the grid by which settings are chosen, with the same settings and seeds; its own by default.
        """
        by = (tuned or self)._flat
        chosen = [int(np.delete(by, seed, axis=1).mean(axis=1).argmin()) for seed in range(by.shape[1])]
        return [float(self._flat[place, seed]) for seed, place in enumerate(chosen)]
