"""SlowMo and BMUF: the papers' formulas in NumPy, with their own variables."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.algorithms import BMUF, FedProx, SlowMo
from workbench.errors import ConfigError
from workbench.runtimes.reference import ReferenceRuntime

LR, RANKS, BLOCKS, EVERY = 0.3, 3, 4, 3


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    curvatures = torch.linspace(0.5, 1.5, len(parameters), dtype=torch.float64)
    return curvatures * (parameters - (rank + 1) * torch.arange(1.0, len(parameters) + 1) - step)


def block(start: np.ndarray, number: int) -> np.ndarray:
    """The mean of the ranks after EVERY local steps from `start`."""
    w = np.tile(start, (RANKS, 1))
    for step in range(number * EVERY, (number + 1) * EVERY):
        for rank in range(RANKS):
            w[rank] -= LR * pull(rank, step, torch.from_numpy(w[rank])).numpy()
    return w.mean(0)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (0.7, 0.9), (1.0, 0.0)])
def test_slowmo_is_its_algorithm(alpha: float, beta: float) -> None:
    """u <- beta u + (x_0 - x_tau) / gamma; x_0 <- x_0 - alpha gamma u."""
    algorithm = SlowMo(every=EVERY, slow_lr=alpha, slow_momentum=beta)
    found = ReferenceRuntime(algorithm, RANKS, pull, lr=LR, start=1.0).run(BLOCKS * EVERY)
    x, u = np.ones(6), np.zeros(6)
    for number in range(BLOCKS):
        u = beta * u + (x - block(x, number)) / LR
        x = x - alpha * LR * u
        for rank in found.ranks:
            assert np.allclose(rank.seen[(number + 1) * EVERY - 1].numpy(), x, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("zeta", "eta"), [(1.0, 0.75), (0.8, 0.5)])
def test_bmuf_is_its_algorithm(zeta: float, eta: float, nesterov: bool) -> None:
    """G = mean - W_g; Delta <- eta Delta + zeta G; W <- W + Delta; W_g = W, or W + eta Delta (Nesterov)."""
    algorithm = BMUF(every=EVERY, block_lr=zeta, block_momentum=eta, nesterov=nesterov)
    found = ReferenceRuntime(algorithm, RANKS, pull, lr=LR, start=1.0).run(BLOCKS * EVERY)
    model, start, delta = np.ones(6), np.ones(6), np.zeros(6)
    for number in range(BLOCKS):
        delta = eta * delta + zeta * (block(start, number) - start)
        model = model + delta
        start = model + eta * delta if nesterov else model
        for rank in found.ranks:
            assert np.allclose(rank.seen[(number + 1) * EVERY - 1].numpy(), start, rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlowMo(slow_lr=math.inf),
        lambda: BMUF(block_lr=math.inf),
        lambda: FedProx(proximal=math.inf),
    ],
)
def test_a_factor_without_end_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="inf: give a finite number"):
        make()


@pytest.mark.parametrize("kind", [SlowMo, BMUF, FedProx])
def test_a_collective_that_is_none_is_refused(kind: Callable[..., object]) -> None:
    """0 is not `None`, which stands for the default."""
    with pytest.raises(ConfigError, match="collective=0: give one of"):
        kind(collective=0)
