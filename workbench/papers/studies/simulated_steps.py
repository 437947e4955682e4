"""Steps of a problem simulated by its shapes alone: no values are computed, only costs and messages count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.analysis.summary import mean_step_s
from workbench.costs import AnyNetwork, Compute, Stragglers
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run

FILLED = 4  # steps after which a pipeline of width two is full


def gradient_bytes(problem: Problem) -> int:
    """Return the bytes of the problem's gradient in float32."""
    with torch.device("meta"):  # shapes without values
        return sum(4 * weight.numel() for weight in problem.model().parameters())


def simulated_steps(
    algorithm: Algorithm,
    problem: Problem,
    *,
    workers: int,
    network: AnyNetwork | str,
    compute: Compute,
    steps: int,
    **settings: Any,
) -> Run:
    """Simulate steps of the problem's shapes.

    Args:
        algorithm: the algorithm. A dedicated server is one worker more.
        problem: its network gives the shapes; its data are not used.
        workers: number of simulated workers.
        network, compute: costs.
        steps: number of steps.
        settings: others of `simulate`, such as `seed`, `detail` and `trace_steps` (0 by default).
    """
    shapes = replace(problem, train=range(10**9), test=None)
    how: dict[str, Any] = {"timing_only": True, "trace_steps": 0, "batch_size": 1, "evaluate_every": 0, **settings}
    return simulate(algorithm, shapes, workers=workers, network=network, compute=compute, steps=steps, **how)


def simulated_step_s(algorithm: Algorithm, problem: Problem, *, filled: int = FILLED, **how: Any) -> float:
    """Return the mean seconds of a simulated step after the first ones: see `simulated_steps`.

    Args:
        algorithm, problem: as in `simulated_steps`.
        filled: steps after which the pipeline is full.
        how: the other arguments of `simulated_steps`.
    """
    return mean_step_s(simulated_steps(algorithm, problem, **how), filled)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LateOnce(Stragglers):
    """One worker takes this many times as long in one step; otherwise all workers are equal.

    Attributes:
        factor: of the compute seconds.
        rank, step: the late worker, and when.
    """

    factor: float
    rank: int = 1
    step: int = 6

    def factors(self, seed: int, step: int, num_workers: int) -> NDArray[np.float64]:
        found = np.ones(num_workers)
        if step == self.step:
            found[self.rank] = self.factor
        return found
