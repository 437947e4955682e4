"""SPARTA: against NumPy; each cycle averages each parameter; its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.algorithms import SPARTA, LocalSGD, SerialSGD
from workbench.codecs import Truncate16
from workbench.collectives import Once, Ring
from workbench.errors import ConfigError
from workbench.program import Algorithm
from workbench.runtimes.reference import ReferenceRuntime

LR, RANKS, SIZES = 0.3, 3, (2, 3, 1)
PACKED = np.array([5, 2, 3, 4, 0, 1])  # the order of packed parameters: the last one is first


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Each rank's own minimum, in each coordinate and step."""
    coordinates = torch.arange(1.0, len(parameters) + 1, dtype=torch.float64)
    return torch.linspace(0.5, 1.5, len(parameters)) * (parameters - (rank + 1) * coordinates - step)


def ran(algorithm: Algorithm, num_ranks: int = RANKS, steps: int = 11) -> ReferenceRuntime:
    return ReferenceRuntime(algorithm, num_ranks, pull, lr=LR, sizes=SIZES, seed=5).run(steps)


@pytest.mark.parametrize("algorithm", [SPARTA(fraction=0.3), SPARTA(fraction=0.7, collective=Ring()), SPARTA()])
def test_it_is_the_formula_in_numpy(algorithm: SPARTA) -> None:
    """Of each step and rank; the run ends with the mean."""
    found, w = ran(algorithm), np.ones((RANKS, 6))
    for step in range(11):
        for rank in range(RANKS):
            w[rank] -= LR * pull(rank, step, torch.from_numpy(w[rank])).numpy()
        averaged = PACKED[algorithm.chosen(5, step, 6).numpy()]
        w[:, averaged] = w[:, averaged].mean(0)
        others = np.setdiff1d(PACKED, averaged)
        assert np.ptp(w[:, others], axis=0).min() > 0.1, "replicas differ elsewhere"
        for rank in range(RANKS):
            assert np.allclose(found.ranks[rank].seen[step].numpy(), w[rank], rtol=1e-13)
    for rank in range(RANKS):
        assert np.allclose(found.ranks[rank].parameters.numpy(), w.mean(0), rtol=1e-13)


@pytest.mark.parametrize(
    ("numel", "fraction", "num"), [(20, 0.1, 2), (23, 0.1, 2), (7, 0.4, 3), (5, 0.01, 1), (6, 1.0, 6)]
)
def test_a_cycle_averages_each_parameter(numel: int, fraction: float, num: int) -> None:
    algorithm = SPARTA(fraction=fraction)
    length = -(-numel // num)
    cycles = [
        [algorithm.chosen(3, step, numel).tolist() for step in range(first, first + length)] for first in (0, length)
    ]
    for cycle in cycles:
        assert all(len(set(chosen)) == len(chosen) == num for chosen in cycle)
        assert {position for chosen in cycle for position in chosen} == set(range(numel))
    if num < numel:
        assert cycles[0] != cycles[1], "a new order"
        assert cycles[0] != [algorithm.chosen(4, step, numel).tolist() for step in range(length)], "by the seed"
    assert cycles[0] == [algorithm.chosen(3, step, numel).tolist() for step in range(length)], "by seed and step alone"


def test_ranks_that_differ_are_equal_after_a_cycle() -> None:
    """Nothing but the averages moves them from the second step on."""
    apart = ReferenceRuntime(
        SPARTA(fraction=0.3), RANKS, lambda rank, step, w: (rank + 1) * w * (step == 0), sizes=SIZES, lr=LR
    ).run(7)  # a cycle is 3 steps
    assert not torch.allclose(apart.ranks[0].seen[0], apart.ranks[1].seen[0])
    assert torch.allclose(apart.ranks[0].seen[2], apart.ranks[1].seen[2], rtol=1e-14)


def test_all_parameters_are_local_sgd_that_averages_in_every_step() -> None:
    ours, theirs = ran(SPARTA(fraction=1.0)), ran(LocalSGD(every=1))
    for one, other in zip(ours.ranks[1].seen, theirs.ranks[1].seen, strict=True):
        assert torch.allclose(one, other, rtol=1e-14)


def test_on_one_rank_it_is_serial() -> None:
    assert torch.equal(ran(SPARTA(fraction=0.3), 1).ranks[0].parameters, ran(SerialSGD(), 1).ranks[0].parameters)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fraction": 0.0}, "above 0 and at most 1"),
        ({"fraction": True}, "above 0 and at most 1"),
        ({"collective": Ring(codec=Truncate16())}, r"use Ring\(\)"),
        ({"collective": Once(codec=Truncate16())}, r"use Native\(\)"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        SPARTA(**settings)  # type: ignore[arg-type]
