"""SlowMo and BMUF: the papers' formulas in NumPy, with their own variables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.laws.variants import name_of
from workbench import algorithms
from workbench.algorithms import (
    ADPSGD,
    BMUF,
    DPSGD,
    AsyncSGD,
    ChocoSGD,
    DiLoCo,
    FedAvg,
    FedProx,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    PartialAllReduce,
    PipeSGD,
    SlowMo,
    StochasticGradientPush,
)
from workbench.errors import ConfigError
from workbench.program import Algorithm, settings_of
from workbench.runtimes.reference import Costs, ReferenceRuntime
from workbench.topologies import Exponential, Star

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


INNER = [
    DPSGD(),
    DPSGD(overlap=False, topology=Star()),
    StochasticGradientPush(),
    GradientTracking(),
    ChocoSGD(),
    PipeSGD(width=2),
    LayerwiseSGD(bucket_bytes=16),
    LocalSGD(every=2),
    FedAvg(every=2),
    DiLoCo(every=2),
]


@pytest.mark.parametrize("inner", INNER, ids=name_of)
def test_a_block_is_a_whole_run_of_the_inner_algorithm(inner: Algorithm) -> None:
    """One rank at the end of each block has the paper's x of that inner algorithm, run alone from the last x.

    What the inner algorithm keeps for the whole run stays, such as an outer momentum.
    """
    alpha, beta = 0.8, 0.5
    found = ReferenceRuntime(SlowMo(every=EVERY, inner=inner, slow_lr=alpha, slow_momentum=beta), RANKS, pull, lr=LR)
    found.run(BLOCKS * EVERY)
    x, u = torch.ones(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    before = ReferenceRuntime(inner, RANKS, pull, lr=LR)
    for number in range(BLOCKS):
        first = number * EVERY
        alone = ReferenceRuntime(inner, RANKS, pull, lr=LR)
        alone.continue_from(before)
        for rank in alone.ranks:
            rank.parameters.copy_(x)
        before = alone.run(first + EVERY, first_step=first)
        u = beta * u + x - alone.ranks[0].parameters
        x = x - alpha * u
        for rank in found.ranks:
            assert torch.allclose(rank.seen[first + EVERY - 1], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inner", INNER, ids=name_of)
@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_it_continues_from_any_step(inner: Algorithm, stop_after: int) -> None:
    """Also between two blocks, where the inner algorithm has no state, and at the end of a run within a block."""
    algorithm, num_steps = SlowMo(every=EVERY, inner=inner), 2 * EVERY + 1
    whole = ReferenceRuntime(algorithm, RANKS, pull, lr=LR).run(num_steps)
    before = ReferenceRuntime(algorithm, RANKS, pull, lr=LR).run(num_steps, stop_after=stop_after)
    after = ReferenceRuntime(algorithm, RANKS, pull, lr=LR)
    after.continue_from(before)
    after.run(num_steps, first_step=stop_after + 1, resumed=before.states)
    for ours, theirs in zip(after.ranks, whole.ranks, strict=True):
        assert torch.equal(ours.parameters, theirs.parameters)


def test_late_gradients_go_into_a_round_of_the_next_block() -> None:
    """Rank 2 is late for most rounds. Only what it has left at the run's end is not used."""
    algorithm = SlowMo(every=2, inner=PartialAllReduce(quorum="solo"))
    late = Costs(backward=lambda rank, step: 1.7 if rank == 2 else 1.0, message=0.01)
    found = ReferenceRuntime(algorithm, RANKS, pull, lr=0.01, costs=late).run(12)
    for rank, here in enumerate(found.ranks):
        num_used = sum(len(update.of) for update in here.applied)
        assert len(here.backwards) - num_used <= 1, f"rank {rank}"
    assert len(found.ranks[2].backwards) < 12, "it missed rounds"


@pytest.mark.parametrize("inner", [AsyncSGD(), ADPSGD(), SlowMo(), "d-psgd"], ids=str)
def test_an_inner_algorithm_whose_blocks_have_no_common_end_is_refused(inner: Any) -> None:
    with pytest.raises(ConfigError, match=r"inner=.*give an algorithm"):
        SlowMo(inner=inner)


def test_the_inner_algorithm_is_given_by_name_or_as_in_a_record() -> None:
    made = SlowMo(every=4, inner=DPSGD(topology=Exponential()))
    assert algorithms.get("slow-mo", every=4, inner="DPSGD(topology=Exponential())") == made
    assert algorithms.get("slow-mo", every=4, inner="d-psgd") == SlowMo(every=4, inner=DPSGD())
    settings = {
        name: value if isinstance(value, int | float) else str(value) for name, value in settings_of(made).items()
    }
    assert algorithms.recorded({"name": "SlowMo", "settings": settings}) == made


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


@pytest.mark.parametrize("kind", [BMUF, FedProx])
def test_a_collective_that_is_none_is_refused(kind: Callable[..., object]) -> None:
    """0 is not `None`, which stands for the default."""
    with pytest.raises(ConfigError, match="collective=0: give one of"):
        kind(collective=0)
