"""One training of a study: simulated, or on real ranks if a launcher is given, and the cost of its compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.costs import Compute, Stragglers
from workbench.papers.pool_client import ranks
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run


def train(
    algorithm: Algorithm,
    problem: Problem,
    *,
    workers: int,
    launcher: str = "",
    network: Any = "free",
    compute: Any,
    **settings: Any,
) -> Run:
    """Train on simulated workers or on ranks. Return the run when it has ended.

    Args:
        algorithm: the algorithm.
        problem: what to train.
        workers: number of workers or ranks.
        launcher: where real ranks run, as in `Cluster`; empty: simulate.
        network, compute: costs of the simulation; real ranks ignore them.
        settings: fields of `workbench.settings.Settings`.

    Raises:
        Diverged: a simulated loss is not a finite number.
        WorkbenchError: a rank failed.
    """
    if not launcher:
        return simulate(algorithm, problem, workers=workers, network=network, compute=compute, **settings)
    with ranks(workers, launcher) as cluster:
        handle = cluster.train(algorithm, problem, **settings)
        handle.wait()
        return handle.run


def parameter_recorder(seen: list[Tensor]) -> Callable[[Any, Any], tuple[Tensor, int]]:
    """Return a `Problem.correct` that appends a copy of the model's first parameter to `seen` at each evaluation."""

    def record_parameters(model: Any, _batch: Any) -> tuple[Tensor, int]:
        seen.append(model[0].detach().clone())
        return torch.tensor(1), 1

    return record_parameters


def compute_cost(seconds: float, *stragglers: Stragglers) -> Compute:
    """Return compute of this many seconds a step, a third of it forward, that ranks sleep or that is simulated.

    >>> cost = compute_cost(3.0)
    >>> cost.forward_s, cost.backward_s
    (1.0, 2.0)
    """
    return Compute(forward_s=seconds / 3, backward_s=2 * seconds / 3, stragglers=stragglers)
