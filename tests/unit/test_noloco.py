"""NoLoCo: against NumPy with the paper's variables; its limits; replicas come together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.algorithms import DPSGD, NoLoCo, SerialSGD, SlowMo
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.reference import ReferenceRuntime
from workbench.topologies import Complete, RandomPairs

LR, EVERY, STEPS, NUMEL = 0.1, 3, 25, 6
PLAIN = NoLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, consensus_lr=1.0)


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Each rank's own minimum, in each coordinate and step."""
    coordinates = torch.arange(1.0, len(parameters) + 1, dtype=torch.float64)
    return torch.linspace(0.5, 1.5, len(parameters)) * (
        parameters - (rank + 1) * coordinates - torch.sin(coordinates + step)
    )


def ran(algorithm: Algorithm, num_ranks: int = 4, of: object = pull, steps: int = STEPS) -> ReferenceRuntime:
    return ReferenceRuntime(algorithm, num_ranks, of, lr=LR, start=1.0).run(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
@pytest.mark.parametrize(("alpha", "beta", "gamma"), [(0.5, 0.7, 0.7), (0.3, 1.0, 0.4), (0.0, 0.5, 1.0)])
def test_it_is_the_formula_in_numpy(num_ranks: int, alpha: float, beta: float, gamma: float) -> None:
    """delta <- alpha delta + beta mean(Delta) - gamma (phi - mean(phi)); phi <- phi + delta; means over a pair."""
    topology = RandomPairs(seed=3)
    algorithm = NoLoCo(topology=topology, every=EVERY, outer_momentum=alpha, outer_lr=beta, consensus_lr=gamma)
    found = ran(algorithm, num_ranks)
    theta, phi, delta = (np.full((num_ranks, NUMEL), value) for value in (1.0, 1.0, 0.0))
    for step in range(STEPS):
        for rank in range(num_ranks):
            theta[rank] -= LR * pull(rank, step, torch.from_numpy(theta[rank])).numpy()
        if (step + 1) % EVERY == 0:
            pairs = [[rank, *topology.neighbours(rank, num_ranks, step // EVERY)] for rank in range(num_ranks)]
            outer = theta - phi
            drawn = np.stack([phi[pair].mean(0) for pair in pairs])
            delta = alpha * delta + beta * np.stack([outer[pair].mean(0) for pair in pairs]) - gamma * (phi - drawn)
            phi = phi + delta
            theta = phi.copy()
        for rank in range(num_ranks):
            assert np.allclose(found.ranks[rank].seen[step].numpy(), theta[rank], rtol=1e-12, atol=1e-12)
    for rank in range(num_ranks):
        assert np.allclose(found.ranks[rank].parameters.numpy(), theta.mean(0), rtol=1e-12), "it ends with the mean"


@pytest.mark.parametrize(
    ("algorithm", "same"),
    [
        (PLAIN, DPSGD(topology=RandomPairs(), overlap=False)),
        (
            NoLoCo(topology=Complete(), every=EVERY, outer_momentum=0.4, outer_lr=0.8, consensus_lr=0.9),
            SlowMo(every=EVERY, slow_momentum=0.4, slow_lr=0.8),
        ),
    ],
    ids=["plain averages of pairs", "a complete graph"],
)
def test_it_is_another_algorithm_in_its_limits(algorithm: Algorithm, same: Algorithm) -> None:
    ours, theirs = ran(algorithm), ran(same)
    for one, other in zip(ours.ranks, theirs.ranks, strict=True):
        for mine, its in zip(one.seen, other.seen, strict=True):
            assert torch.allclose(mine, its, rtol=1e-12, atol=1e-12)


def test_on_one_rank_it_is_serial_in_its_limit() -> None:
    found, serial = ran(PLAIN, 1).ranks[0], ran(SerialSGD(), 1).ranks[0]
    assert torch.allclose(found.parameters, serial.parameters, rtol=1e-13)


@pytest.mark.parametrize("num_ranks", [5, 8])
def test_replicas_that_differ_come_together(num_ranks: int) -> None:
    """Ranks step apart at first, and then nothing but the exchanges moves them. Their mean stays where its momentum takes it."""
    found = ran(NoLoCo(every=1), num_ranks, lambda rank, step, w: (rank + 1) * (step == 0) * torch.ones_like(w), 60)
    after = np.stack([torch.stack(rank.seen).numpy() for rank in found.ranks])  # rank, step, coordinate
    spread = after.std(0)[:, 0]
    assert spread[0] > 0.02 and spread[-1] < 1e-4 * spread[0]
    gradient = (num_ranks + 1) / 2
    assert after.mean(0)[-1] == pytest.approx(1 - LR * gradient * 0.7 / (1 - 0.5)), "outer_lr / (1 - outer_momentum)"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"every": 0}, "1 or more"),
        ({"outer_lr": 0.0}, "outer_lr=0.0: give a finite number above 0"),
        ({"consensus_lr": True}, "consensus_lr=True: give a finite number above 0"),
        ({"outer_momentum": 1.0}, "from 0 to below 1"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        NoLoCo(**settings)  # type: ignore[arg-type]
