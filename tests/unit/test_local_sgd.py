"""Local SGD: who steps alone when, and when the parameters are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.numbered import common_factor, numbered
from workbench.algorithms import LocalSGD, NoCommunication, SerialSGD, SynchronousSGD
from workbench.collectives import Ring
from workbench.errors import ConfigError
from workbench.runtimes.reference import ReferenceRuntime


def constant(rank: int, step: int, parameters: Tensor) -> Tensor:
    """1, 2, 3 on ranks 0, 1, 2, twice that in the second coordinate, three times in the third: 2, 4, 6, ... on average."""
    return (rank + 1) * numbered(parameters)


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    return parameters - rank


def seen(driver: ReferenceRuntime) -> list[list[float]]:
    """For each step and rank, the first parameter; coordinate k holds k + 1 times that."""
    return [
        [common_factor(value) for value in values] for values in zip(*(rank.seen for rank in driver.ranks), strict=True)
    ]


def test_local_steps_then_their_average() -> None:
    driver = ReferenceRuntime(LocalSGD(every=3), 3, constant, lr=1.0, start=0.0).run(4)
    assert seen(driver) == [[-1, -2, -3], [-2, -4, -6], [-6, -6, -6], [-7, -8, -9]]
    assert [common_factor(rank.parameters) for rank in driver.ranks] == [-8, -8, -8], "the end averages"
    assert [update.local for update in driver.ranks[0].applied] == [True] * 4


def test_post_local_counts_from_the_last_synchronous_step() -> None:
    driver = ReferenceRuntime(LocalSGD(every=2, after=3, collective=Ring()), 3, constant, lr=1.0, start=0.0).run(6)
    expected = [[-2, -2, -2], [-4, -4, -4], [-6, -6, -6], [-7, -8, -9], [-10, -10, -10], [-11, -12, -13]]
    assert torch.allclose(torch.tensor(seen(driver)), torch.tensor(expected, dtype=torch.float32))
    assert [update.local for update in driver.ranks[0].applied] == [False] * 3 + [True] * 3


def test_momentum_stays_local() -> None:
    """mu = 1/2: velocities 1, 1.5 and 2, 3: averaged at step 1, -2.5 and -5 become -3.75; then 1.75 and 3.5 more."""
    driver = ReferenceRuntime(LocalSGD(every=2), 2, constant, lr=1.0, start=0.0, momentum=0.5).run(3)
    assert seen(driver) == [[-1, -2], [-3.75, -3.75], [-5.5, -7.25]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_averaging_every_step_is_synchronous(num_ranks: int) -> None:
    ours = ReferenceRuntime(LocalSGD(every=1), num_ranks, pull, lr=0.3).run(9)
    theirs = ReferenceRuntime(SynchronousSGD(), num_ranks, pull, lr=0.3).run(9)
    for one, other in zip(ours.ranks[0].seen, theirs.ranks[0].seen, strict=True):
        assert torch.allclose(one, other, rtol=1e-14)


@pytest.mark.parametrize("stop", range(5))
def test_resumed_at_any_step(stop: int) -> None:
    unbroken = ReferenceRuntime(LocalSGD(every=2, after=1), 3, pull, lr=0.3).run(5)
    first = ReferenceRuntime(LocalSGD(every=2, after=1), 3, pull, lr=0.3).run(5, stop_after=stop)
    second = ReferenceRuntime(LocalSGD(every=2, after=1), 3, pull, lr=0.3)
    for here, before in zip(second.ranks, first.ranks, strict=True):
        here.parameters.copy_(before.parameters)
    second.run(5, first_step=stop + 1, resumed=first.states)
    assert torch.equal(second.ranks[2].parameters, unbroken.ranks[2].parameters)


def test_without_communication_every_rank_goes_its_own_way() -> None:
    driver = ReferenceRuntime(NoCommunication(), 3, constant, lr=1.0, start=0.0).run(4)
    assert [common_factor(rank.parameters) for rank in driver.ranks] == [-4, -8, -12]
    assert NoCommunication().bytes_per_step(0, 3, driver.ranks[0].layout) == 0


@pytest.mark.parametrize(("delay", "expected"), [(0, [-1, -3, -6, -10, -10]), (2, [0, 0, -1, -3, -10])])
def test_serial_gradients_wait_in_a_queue(delay: int, expected: list[int]) -> None:
    driver = ReferenceRuntime(
        SerialSGD(delay=delay), 1, lambda rank, step, w: (step + 1) * numbered(w), lr=1.0, start=0.0
    ).run(4)
    assert [common_factor(one) for one in [*driver.ranks[0].seen, driver.ranks[0].parameters]] == expected
    assert [len(end.state.waiting) for end in driver.ranks[0].ends] == [min(step + 1, delay) for step in range(4)]


def test_serial_is_for_one() -> None:
    with pytest.raises(ConfigError, match=r"PipeSGD\(width=3\)"):
        SerialSGD(delay=2).check(2)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"after": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LocalSGD(**wrong)
