"""The time and the error of one sum over simulated workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.algorithms import SynchronousSGD
from workbench.collectives import Collective
from workbench.costs import AnyNetwork, Compute
from workbench.problems import Problem
from workbench.runtimes.simulator.simulate import simulate
from workbench.trace.run import Run


def sum_run(
    collective: Collective, numel: int, workers: int, network: AnyNetwork | str, *, traced: bool = False
) -> Run:
    """Simulate two steps that consist only of a sum of float32 values, message by message.

    Args:
        collective: the all-reduce.
        numel: number of values.
        workers: number of workers.
        network: network of the workers.
        traced: whether the run keeps its spans.
    """
    problem = Problem(
        model=lambda: _vector(torch.zeros(numel)),
        loss=lambda *_: torch.tensor(0.0),
        train=range(10**6),
        whole_batch=True,
    )
    how: dict[str, Any] = {
        "timing_only": True,
        "detail": "messages",
        "batch_size": 1,
        "evaluate_every": 0,
        "trace_steps": 2 if traced else 0,
    }
    compute = Compute(forward_s=0.0, backward_s=0.0)
    return simulate(
        SynchronousSGD(collective=collective),
        problem,
        workers=workers,
        network=network,
        compute=compute,
        steps=2,
        **how,
    )


def sum_s(collective: Collective, numel: int, workers: int, network: AnyNetwork | str) -> float:
    """Return the seconds of one such sum."""
    return float(sum_run(collective, numel, workers, network).steps()[-1]["seconds"]) / 2


def sum_error(collective: Collective, values: Tensor) -> float:
    """Return the relative error of a sum: the norm of its error over the norm of the exact sum, in double precision.

    Each worker's row is its gradient in one step of a training.

    Args:
        collective: the all-reduce.
        values: (workers, numel).
    """
    seen: list[Tensor] = []

    def record_parameters(model: Any, _: Any) -> tuple[Tensor, int]:
        seen.append(model[0].detach().clone())
        return torch.tensor(1), 1

    def loss(model: Any, batch: Any) -> Tensor:
        found: Tensor = (batch[0] @ model[0]).mean()
        return found

    zeros = torch.zeros_like(values[:1])
    problem = Problem(
        model=lambda: _vector(zeros[0].clone()),
        loss=loss,
        train=(values,),
        test=(zeros,),
        whole_batch=True,
        correct=record_parameters,
    )
    how: dict[str, Any] = {"batch_size": 1, "steps": 1, "evaluate_every": 1, "trace_steps": 0}
    how["optimizer"] = lambda weights: torch.optim.SGD(weights, lr=1.0)
    compute = Compute(forward_s=1.0, backward_s=1.0)
    simulate(
        SynchronousSGD(collective=collective), problem, workers=len(values), network="free", compute=compute, **how
    )
    exact = -values.double().mean(0)
    return float((seen[-1] - exact).norm() / exact.norm())


def _vector(values: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(values)])
