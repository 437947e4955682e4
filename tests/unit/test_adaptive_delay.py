"""The delay follows what is measured, on all ranks at the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.algorithms import AdaptiveDelaySGD, PipeSGD
from workbench.errors import ConfigError
from workbench.runtimes.reference import Costs, ReferenceRuntime


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Of rank's own quadratic: each to a target of its own."""
    return parameters - rank


def delays(driver: ReferenceRuntime) -> list[list[int]]:
    return [[end.state.delay for end in rank.ends] for rank in driver.ranks]


def run(
    algorithm: AdaptiveDelaySGD,
    collective_s: float,
    num_steps: int = 20,
    backward: Any = lambda rank, step: 1.0,
    **more: Any,
) -> ReferenceRuntime:
    costs = Costs(backward=backward, apply=0.25, collective=collective_s)
    return ReferenceRuntime(algorithm, 3, pull, lr=0.1, costs=costs, **more).run(num_steps)


@pytest.mark.parametrize(
    ("collective_s", "expected"),
    [(0.05, 0), (0.5, 1), (1.25, 1), (1.3, 2), (3.0, 3), (99.0, 5)],  # a step computes for 1.25 s
)
def test_the_smallest_delay_that_hides_an_all_reduce(collective_s: float, expected: int) -> None:
    driver = run(AdaptiveDelaySGD(max_delay=5, adapt_every=4, negligible=0.05), collective_s)
    assert delays(driver) == [[1] * 7 + [expected] * 13] * 3, "reported at step 3, used at step 7"
    assert not driver.ranks[0].out


def test_it_rises_and_falls_while_running() -> None:
    """A rank's compute gets longer from step 10 on: 2.5 s of all-reduce need two steps of 1.25, then one of 4.25."""
    driver = run(AdaptiveDelaySGD(adapt_every=2), 2.5, 24, lambda rank, step: 1.0 if step < 10 else 4.0)
    assert delays(driver)[0][9:] == [2] * 4 + [1] * 11, "measured in steps 10 and 11 alone, used from step 13 on"
    assert delays(driver)[0] == delays(driver)[1] == delays(driver)[2]
    numbers = [update.gradient_step for update in driver.ranks[0].applied]
    assert numbers == list(range(24)), "every gradient once, in order"
    staleness = [update.staleness for update in driver.ranks[0].applied]
    assert max(staleness) == 2 and staleness[-1] == 1


def test_ranks_that_measure_differently_agree() -> None:
    driver = run(AdaptiveDelaySGD(adapt_every=3), 2.6, 20, lambda rank, step: 1.0 + rank)
    assert delays(driver)[0] == delays(driver)[1] == delays(driver)[2]
    assert torch.equal(driver.ranks[0].parameters, driver.ranks[2].parameters)


def test_with_a_constant_delay_it_is_pipe() -> None:
    adaptive = run(AdaptiveDelaySGD(adapt_every=3), 0.7)
    pipe = ReferenceRuntime(PipeSGD(width=2), 3, pull, lr=0.1).run(20)
    for ours, theirs in zip(adaptive.ranks, pipe.ranks, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours.seen, theirs.seen, strict=True))
        assert torch.equal(ours.parameters, theirs.parameters)


def test_resumed_at_any_step() -> None:
    """Compute times differ from step to step, so that a sum forgotten would show in the delay."""
    algorithm = AdaptiveDelaySGD(adapt_every=4)
    costs = Costs(backward=lambda rank, step: 6.0 if step % 4 == 0 else 0.5, apply=0.25, collective=4.0)
    unbroken = ReferenceRuntime(algorithm, 3, pull, lr=0.1, costs=costs).run(16)
    assert delays(unbroken)[0] == [1] * 7 + [2] * 9
    for stop in range(16):
        first = ReferenceRuntime(algorithm, 3, pull, lr=0.1, costs=costs).run(16, stop_after=stop)
        second = ReferenceRuntime(algorithm, 3, pull, lr=0.1, costs=costs)
        for here, before in zip(second.ranks, first.ranks, strict=True):
            here.parameters.copy_(before.parameters)
            here.updates = list(before.updates)
        second.run(16, first_step=stop + 1, resumed=first.states)
        assert delays(first)[1] + delays(second)[1] == delays(unbroken)[1], stop
        assert torch.equal(second.ranks[1].parameters, unbroken.ranks[1].parameters), stop


@pytest.mark.parametrize("wrong", [{"max_delay": -1}, {"adapt_every": 0}, {"negligible": 1.0}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        AdaptiveDelaySGD(**wrong)
