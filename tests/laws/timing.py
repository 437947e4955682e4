"""Timing-only simulations of layers that are never computed. Closed forms are compared with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
from torch import nn

from workbench.costs import Compute, Network
from workbench.gradients import Layout, build_layout, trainable
from workbench.problems.base import Problem
from workbench.program import Algorithm, Card
from workbench.runtimes.simulator.simulate import Detail, run_simulation
from workbench.settings import Settings
from workbench.trace.run import Run

NETWORK = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-7)
FREE_NETWORK = Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
NOTHING = Compute(forward_s=0.0, backward_s=0.0)
SHARES = Compute(forward_s=0.3, backward_s=0.5, update_s=0.2)  # of one second
# With their tails of 3, buckets that four ranks share equally
LAYERS = (
    4 * 100 - 3,
    4 * 30 - 3,
    4 * 200 - 3,
    4 * 50 - 3,
)
EITHER_DETAIL = pytest.mark.parametrize("detail", ["messages", "formula"])
exactly: Callable[[Any], Any] = partial(pytest.approx, rel=1e-9)


class Layered(nn.Module):
    """Parameters of these sizes, one a layer; it is never run."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])


@final
@dataclass(frozen=True, slots=True)
class Simulated:
    """A run, timing only."""

    run: Run
    layout: Layout

    def steps_s(self, rank: int = 0) -> np.ndarray:
        """(steps,) seconds of each."""
        return np.diff([0.0, *(row["seconds"] for row in self.run.metrics[rank])])

    def step_s(self, last: int = 6) -> float:
        """In the long run, of rank 0: the mean of the last `last` steps."""
        return float(self.steps_s()[-last:].mean())


def simulate(
    algorithm: Algorithm,
    workers: int,
    *,
    network: Network = NETWORK,
    compute: Compute = NOTHING,
    sizes: tuple[int, ...] = (4 * 500 - 3,),
    steps: int = 12,
    detail: Detail = "messages",
) -> Simulated:
    """No step of these is of a short batch."""
    nothing = torch.zeros(100_000, 1)
    problem = Problem(
        model=partial(Layered, sizes),
        loss=torch.nn.functional.mse_loss,
        train=(nothing, nothing),
        name="layers",
        batch_size=1,
    )
    how = Settings(steps=steps)
    run = run_simulation(
        algorithm, problem, how, workers, network=network, compute=compute, timing_only=True, detail=detail
    )
    buckets = algorithm.requires.buckets
    return Simulated(run, build_layout(trainable(Layered(sizes)), buckets.max_bytes, buckets.count))


def scaled(seconds: float, **changes: Any) -> Compute:
    """`SHARES` of that many seconds in all."""
    parts = {name: getattr(SHARES, name) * seconds for name in ("forward_s", "backward_s", "update_s")}
    return replace(SHARES, **parts, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare(Algorithm):
    """An algorithm of a test."""

    card: ClassVar[Card] = Card(paper="", staleness="", bytes_per_step="", memory="")
