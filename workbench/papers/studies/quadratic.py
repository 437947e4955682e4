"""Find stable step sizes by training: modes of a quadratic on both sides of the predicted limit for a delay."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench import theory
from workbench.costs import Compute
from workbench.papers.studies.training import parameter_recorder
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate

START = 1e-150  # initial value of every mode: it may grow by 300 powers of ten before its square overflows


def trained_limit(
    algorithm: Algorithm, delay: int, momentum: float, *, workers: int, modes: int = 101, steps: int = 400
) -> float:
    """Return the largest eta lambda up to which all modes shrink; NaN if all modes shrink, or the first does not.

    One training minimizes the sum of lambda w^2 / 2, in which the modes are independent. Their values of eta
    lambda lie within 5 % of `theory.stability_limit(delay)`. A mode shrinks if its largest amplitude in the last
    quarter of the run is smaller than in the second quarter.

    Args:
        algorithm: the algorithm.
        delay: assumed delay of the algorithm's gradients, in updates.
        momentum: of SGD.
        workers: number of simulated workers.
        modes: number of modes.
        steps: number of steps.
    """
    grid = theory.stability_limit(delay, momentum) * torch.linspace(0.95, 1.05, modes, dtype=torch.float64)
    seen: list[Tensor] = []
    simulate(
        algorithm,
        _quadratic(grid, seen),
        workers=workers,
        network="free",
        compute=Compute(forward_s=1.0, backward_s=2.0),
        optimizer=partial(torch.optim.SGD, lr=1.0, momentum=momentum),
        steps=steps,
        batch_size=1,
        trace_steps=0,
        evaluate_every=1,
    )
    amplitudes, quarter = torch.stack(seen).abs(), len(seen) // 4
    early, late = amplitudes[quarter : 2 * quarter].amax(0), amplitudes[-quarter:].amax(0)
    shrank = ((late < early) | (late == 0)).tolist()
    return float(grid[shrank.index(False) - 1]) if shrank[0] and not all(shrank) else math.nan


def _quadratic(curvatures: Tensor, seen: list[Tensor]) -> Problem:
    """The problem with initial w = START. Every evaluation appends w to `seen`."""

    def loss(model: Any, _: Any) -> Tensor:
        found: Tensor = curvatures @ model[0] ** 2 / 2
        return found

    return Problem(
        model=partial(_start, curvatures),
        loss=loss,
        train=(torch.zeros(4096, 1),),
        test=(torch.zeros(1, 1),),
        whole_batch=True,
        correct=parameter_recorder(seen),
    )


def _start(like: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.full_like(like, START))])
