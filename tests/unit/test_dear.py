"""DeAR: half an all-reduce under backward, half under the next forward, and the synchronous update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import pytest
import torch

from tests.unit.numbered import pull
from workbench.algorithms import DeAR, SynchronousSGD
from workbench.collectives import Collective, Linear
from workbench.errors import ConfigError
from workbench.ops import AllGather, AllReduce, Program, ReduceScatter, Request, Value
from workbench.program import Context, perform
from workbench.runtimes.reference import ReferenceRuntime


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Halves(Collective):
    """The library's own halves, as sub-programs (`as_program`) or as requests."""

    as_program: bool = True

    @property
    def splits(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Request | Program:
        return AllReduce(value)

    def reduce_scatter(self, ctx: Context, value: Value) -> Request | Program:
        return perform(ReduceScatter(value)) if self.as_program else ReduceScatter(value)

    def all_gather(self, ctx: Context, value: Value) -> Request | Program:
        return perform(AllGather(value)) if self.as_program else AllGather(value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return 0.0

    def seconds(self, num_bytes: float, num_workers: int, link: Any) -> float:
        return 0.0


def dear(bucket_bytes: float | None = 0, *, as_program: bool = True) -> DeAR:
    return DeAR(bucket_bytes=bucket_bytes, collective=Halves(as_program=as_program))


@pytest.mark.parametrize("shuffle", [None, 0, 1, 2])
@pytest.mark.parametrize("bucket_bytes", [0, 32.0, None])
def test_every_gradient_is_taken_where_the_synchronous_one_is(bucket_bytes: float | None, shuffle: int | None) -> None:
    """So parameters at the end of a step lack one update, and are equal at the run's end."""
    for as_program in (True, False):
        ours = ReferenceRuntime(
            dear(bucket_bytes, as_program=as_program), 3, pull, lr=0.3, momentum=0.5, shuffle=shuffle
        ).run(7)
        theirs = ReferenceRuntime(SynchronousSGD(), 3, pull, lr=0.3, momentum=0.5).run(7)
        for found, expected in zip(ours.ranks, theirs.ranks, strict=True):
            for (step, one), (other_step, other) in zip(found.backwards, expected.backwards, strict=True):
                assert step == other_step and torch.allclose(one, other, rtol=1e-14)
            assert torch.allclose(found.parameters, expected.parameters, rtol=1e-14)
            assert torch.equal(found.seen[3], found.backwards[3][1]), "its own update is due"
            assert {update.staleness for update in found.applied} == {0}
            assert not found.out


def test_buckets_are_updated_in_forward_order() -> None:
    driver = ReferenceRuntime(dear(), 2, pull).run(3)
    assert [update.bucket for update in driver.ranks[0].applied] == [2, 1, 0] * 3


@pytest.mark.parametrize("stop", range(5))
def test_resumed_at_any_step(stop: int) -> None:
    """The state holds the whole gradient, of which a rank has summed its own block, and tickets that say no more than done."""
    unbroken = ReferenceRuntime(dear(), 3, pull, lr=0.3).run(5)
    first = ReferenceRuntime(dear(), 3, pull, lr=0.3).run(5, stop_after=stop)
    assert all(ticket.done and ticket.value is None for state in first.states for ticket in state.scattered)
    second = ReferenceRuntime(dear(), 3, pull, lr=0.3)
    for here, before in zip(second.ranks, first.ranks, strict=True):
        here.parameters.copy_(before.parameters)
        here.updates = list(before.updates)
    second.run(5, first_step=stop + 1, resumed=first.states)
    assert torch.equal(second.ranks[1].parameters, unbroken.ranks[1].parameters)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"use Ring\(\)"):
        DeAR(collective=Linear())
    with pytest.raises(ConfigError, match="bucket_bytes"):
        dear(-1.0)
