"""Which steps are stable, found by training: modes of a quadratic on both sides of the limit that a delay is said to have."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench import theory
from workbench.costs import Compute
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate

START = 1e-150  # of every mode: a square may grow by 300 powers of ten before it is no number any more


def trained_limit(algorithm: Algorithm, delay: int, momentum: float, *, workers: int, modes: int = 101, steps: int = 400) -> float:
    """The largest eta lambda of the modes below which all shrank; NaN if all shrank or the first did not.

    One training of the sum of lambda w^2 / 2, every mode on its own: their eta lambda lie within 5 % of `theory.stability_limit` of the
    delay. Which shrink is read from their largest amplitudes in the second quarter of the run and in the last.

    Args:
        delay: that the method's gradients are said to be late, in updates.
    """
    grid = theory.stability_limit(delay, momentum) * torch.linspace(0.95, 1.05, modes, dtype=torch.float64)
    seen: list[Tensor] = []
    how: dict[str, Any] = {"steps": steps, "batch_size": 1, "trace_steps": 0, "evaluate_every": 1}
    how["optimizer"] = partial(torch.optim.SGD, lr=1.0, momentum=momentum)
    simulate(algorithm, _quadratic(grid, seen), workers=workers, network="free", compute=Compute(forward_s=1.0, backward_s=2.0), **how)
    amplitudes, quarter = torch.stack(seen).abs(), len(seen) // 4
    early, late = amplitudes[quarter : 2 * quarter].amax(0), amplitudes[-quarter:].amax(0)
    shrank = ((late < early) | (late == 0)).tolist()
    return float(grid[shrank.index(False) - 1]) if shrank[0] and not all(shrank) else math.nan


def _quadratic(curvatures: Tensor, seen: list[Tensor]) -> Problem:
    """From w = START; every evaluation appends w to `seen`."""

    def look(model: Any, _: Any) -> tuple[Tensor, int]:
        seen.append(model[0].detach().clone())
        return torch.tensor(1), 1

    def loss(model: Any, _: Any) -> Tensor:
        found: Tensor = curvatures @ model[0] ** 2 / 2
        return found

    make = partial(_start, curvatures)
    return Problem(model=make, loss=loss, train=(torch.zeros(4096, 1),), test=(torch.zeros(1, 1),), whole_batch=True, correct=look)


def _start(like: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.full_like(like, START))])
