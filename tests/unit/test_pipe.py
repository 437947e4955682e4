"""Pipe-SGD's first steps: a warm-up, and what is applied while the pipeline fills. Every expected number can be read off."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.unit.numbered import common_factor, numbered
from workbench.algorithms import DelayedSGD, FirstSteps, PipeSGD
from workbench.errors import ConfigError
from workbench.runtimes.reference import ReferenceRuntime

DUPLICATE = FirstSteps.DUPLICATE


def of_step(rank: int, step: int, parameters: Tensor) -> Tensor:
    """10^step on average, half of that on rank 0 and three halves on rank 1: each decimal place of w says how often that step's
    gradient was applied. Times 1, 2, 3, ... for the coordinates.
    """
    return (rank + 0.5) * 10**step * numbered(parameters)


def run(algorithm: PipeSGD, num_steps: int = 5, **more: Any) -> ReferenceRuntime:
    return ReferenceRuntime(algorithm, 2, of_step, lr=1.0, start=0.0).run(num_steps, **more)


def places(driver: ReferenceRuntime) -> list[int]:
    return [-round(common_factor(seen)) for seen in [*driver.ranks[0].seen, driver.ranks[0].parameters]]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (PipeSGD(width=1), [1, 11, 111, 1111, 11111, 11111]),
        (PipeSGD(width=3), [0, 0, 1, 11, 111, 11111]),
        (PipeSGD(width=3, warmup_steps=2), [1, 11, 11, 11, 111, 11111]),
        (PipeSGD(width=3, first=DUPLICATE), [1, 2, 3, 13, 113, 11113]),
        (PipeSGD(width=3, first=DUPLICATE, warmup_steps=1), [1, 2, 3, 13, 113, 11113]),
        (PipeSGD(width=2, first=DUPLICATE, warmup_steps=2), [1, 11, 21, 121, 1121, 11121]),
        (PipeSGD(width=1, first=DUPLICATE, warmup_steps=2), [1, 11, 111, 1111, 11111, 11111]),
        (PipeSGD(width=9, first=DUPLICATE), [1, 2, 3, 4, 5, 11115]),
        (DelayedSGD(delay=2, warmup_steps=1), [1, 1, 1, 11, 111, 11111]),
        (PipeSGD(width=2, warmup_steps=9), [1, 11, 111, 1111, 11111, 11111]),
    ],
    ids=str,
)
def test_what_is_applied_when(algorithm: PipeSGD, expected: list[int]) -> None:
    assert places(run(algorithm)) == expected


@pytest.mark.parametrize("stop", range(5))
@pytest.mark.parametrize(
    "algorithm", [PipeSGD(width=3, warmup_steps=1), PipeSGD(width=3, first=DUPLICATE, warmup_steps=2)], ids=str
)
def test_resumed_at_any_step(algorithm: PipeSGD, stop: int) -> None:
    first = run(algorithm, stop_after=stop)
    second = ReferenceRuntime(algorithm, 2, of_step, lr=1.0, start=0.0)
    for here, before in zip(second.ranks, first.ranks, strict=True):
        here.parameters.copy_(before.parameters)
        here.updates = list(before.updates)
    second.run(5, first_step=stop + 1, resumed=first.states)
    assert places(first)[:-1] + places(second) == places(run(algorithm))


def test_duplicates_are_as_stale_as_they_are() -> None:
    """The copy of g_0 is 1 and 2 updates old; from then on every gradient is K - 1."""
    assert [update.staleness for update in run(PipeSGD(width=3, first=DUPLICATE)).ranks[0].applied] == [
        0,
        1,
        2,
        2,
        2,
        2,
        2,
    ]


def test_the_copy_is_kept_no_longer_than_it_is_needed() -> None:
    """In flight, and the copy: 0 + 1, 1 + 1, then 2 + 0."""
    states: list[Any] = [end.state for end in run(PipeSGD(width=3, first=DUPLICATE)).ranks[0].ends]
    assert [len(state.in_flight) for state in states] == [0, 1, 2, 2, 2]
    assert [state.spare is not None for state in states] == [True, True, False, False, False]


def test_no_gradient_is_left_over() -> None:
    for algorithm in (PipeSGD(width=3, first=DUPLICATE), PipeSGD(width=9, first=DUPLICATE), PipeSGD(width=3)):
        assert not run(algorithm).ranks[0].out


@pytest.mark.parametrize("wrong", [{"width": 0}, {"warmup_steps": -1}, {"first": "twice"}, {"warmup_steps": 1.5}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PipeSGD(**wrong)
