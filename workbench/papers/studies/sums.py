"""The time and the error of one sum over simulated workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.algorithms import SynchronousSGD
from workbench.collectives import Collective
from workbench.costs import AnyNetwork, Compute
from workbench.papers.studies.training import parameter_recorder
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


def times_by_size(
    collectives: Mapping[str, Collective], megabytes: Sequence[float], workers: int, network: AnyNetwork | str
) -> dict[str, dict[float, float]]:
    """Return name -> megabytes of float32 values -> seconds of a sum, for each collective."""
    return {
        name: {mb: sum_s(collective, int(mb * 1e6) // 4, workers, network) for mb in megabytes}
        for name, collective in collectives.items()
    }


def sum_error(collective: Collective, values: Tensor) -> float:
    """Return the relative error of a sum: the norm of its error over the norm of the exact sum, in double precision.

    Each worker's row is its gradient in one step of a training.

    Args:
        collective: the all-reduce.
        values: (workers, numel).
    """
    seen: list[Tensor] = []

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
        correct=parameter_recorder(seen),
    )
    how: dict[str, Any] = {"batch_size": 1, "steps": 1, "evaluate_every": 1, "trace_steps": 0}
    how["optimizer"] = lambda weights: torch.optim.SGD(weights, lr=1.0)
    compute = Compute(forward_s=1.0, backward_s=1.0)
    simulate(
        SynchronousSGD(collective=collective), problem, workers=len(values), network="free", compute=compute, **how
    )
    exact = -values.double().mean(0)
    return float((seen[-1] - exact).norm() / exact.norm())


def errors_by_workers(
    collectives: Mapping[str, Collective], workers: Sequence[int], seeds: Sequence[int], *, block: int
) -> dict[str, dict[int, list[float]]]:
    """Return name -> number of workers -> `sum_error` for each seed, of independent normal values.

    Args:
        collectives: name -> the all-reduce.
        workers: numbers of workers.
        seeds: of the values.
        block: values per block of a ring, so p workers sum p blocks.
    """
    errors: dict[str, dict[int, list[float]]] = {name: {p: [] for p in workers} for name in collectives}
    for p in workers:
        for seed in seeds:
            values = torch.randn(p, p * block, generator=torch.Generator().manual_seed(seed))
            for name, collective in collectives.items():
                errors[name][p].append(sum_error(collective, values))
    return errors


def growth_exponents(errors: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the power of p + 1 with which errors grow, fitted for each seed.

    >>> growth_exponents({3: [2.0, 1.0], 15: [4.0, 1.0], 63: [8.0, 1.0]})
    [0.5, 0.0]

    Args:
        errors: number of workers p -> error of each seed.
    """
    slopes = np.polyfit(np.log(np.array(list(errors)) + 1), np.log(list(errors.values())), 1)[0]
    return [round(float(slope), 12) + 0.0 for slope in slopes]


def delay_of_last_s(run: Run) -> float:
    """Return by how much the last worker ends backward after the mean of all, mean over steps of a traced run."""
    last_ends_s: dict[int, dict[int, float]] = {}
    for span in run.spans.table[run.spans.is_kind(["backward"])]:
        ends_s = last_ends_s.setdefault(int(span["step"]), {})
        ends_s[int(span["rank"])] = max(ends_s.get(int(span["rank"]), 0.0), float(span["end_s"]))
    return float(np.mean([max(ends_s.values()) - np.mean([*ends_s.values()]) for ends_s in last_ends_s.values()]))


def _vector(values: Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(values)])
