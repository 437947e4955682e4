"""Partial all-reduce: the same sums on all ranks in the same order, every gradient at most once, late ones in a later round."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.laws.train import Wrapper
from tests.unit.numbered import common_factor, numbered
from workbench.algorithms import PartialAllReduce, SynchronousSGD
from workbench.algorithms.partial import DONE, GO, READY, PartialState, _merged
from workbench.collectives import Collective, Linear, Ring
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient
from workbench.ops import Apply, Backward, EndStep, Program, Value
from workbench.program import Context, perform
from workbench.runtimes.reference import Costs, ReferenceRuntime
from workbench.runtimes.simulator.comm_schedule import RECEIVE, SEND, record_schedule

STEPS = 6


def coded(rank: int, step: int, parameters: Tensor) -> Tensor:
    """A binary digit for each minibatch, so that what was summed can be read off a sum; times 1, 2, 3, ... for the coordinates."""
    return 2.0 ** (STEPS * rank + step) * numbered(parameters)


def pull(rank: int, step: int, parameters: Tensor) -> Tensor:
    return parameters - rank


def run(quorum: Any, num_ranks: int = 3, gradient: Any = coded, steps: int = STEPS, **more: Any) -> ReferenceRuntime:
    return ReferenceRuntime(
        PartialAllReduce(quorum=quorum, collective=Linear()), num_ranks, gradient, lr=1.0, start=0.0, **more
    ).run(steps)


def contributions(driver: ReferenceRuntime) -> list[set[tuple[int, int]]]:
    """For each round, which (rank, step) were summed: read off the updates of rank 0, each their mean."""
    found, before = [], 0.0
    for update in driver.ranks[0].applied:
        now = common_factor(update.parameters)
        mean, before = before - now, now
        word = round(mean * round(update.weight * len(driver.ranks)))
        found.append({divmod(bit, STEPS) for bit in range(STEPS * len(driver.ranks)) if word >> bit & 1})
        assert len(found[-1]) == round(update.weight * len(driver.ranks)), "summed twice, or of a wrong weight"
    return found


@settings(max_examples=40)
@given(
    num_ranks=st.integers(1, 4),
    quorum=st.sampled_from(["solo", "majority", 0.7, "all"]),
    shuffle=st.integers(0, 10_000),
)
def test_every_order_of_events(num_ranks: int, quorum: str | float, shuffle: int) -> None:
    driver = run(quorum, num_ranks, shuffle=shuffle)
    for rank in driver.ranks:
        assert [end.step for end in rank.ends] == list(range(STEPS)), "every rank ends every step"
        assert all(torch.equal(one, other) for one, other in zip(rank.seen, driver.ranks[0].seen, strict=True))
        assert not rank.out, "a gradient buffer was neither applied nor given back"
    computed = {(number, step) for number, rank in enumerate(driver.ranks) for step, _ in rank.backwards}
    rounds = contributions(driver)
    used = Counter(item for one in rounds for item in one)
    assert set(used.values()) <= {1}, "used twice"
    assert set(used) <= computed
    for number, one in enumerate(rounds):
        fresh = {item for item in one if item[1] == number}
        assert len(fresh) >= driver.algorithm.num_ready(num_ranks), "fewer than the quorum"
        assert all(step <= number for _, step in one)
    for number, rank in enumerate(driver.ranks):
        left = {item for item in computed - set(used) if item[0] == number}
        skipped = set(range(STEPS)) - {step for step, _ in rank.backwards}
        assert {end.step for end in rank.ends if end.dropped} == skipped | {step for _, step in left}
        assert len(left) <= 1, "only the last gradient can be left over"
        told = [(update.gradient_step, pair) for update in rank.applied for pair in update.of]
        assert {version for _, (_, version) in told} == {step for owner, step in used if owner == number}, (
            "its own versions are told"
        )


@pytest.mark.parametrize("quorum", ["all", 1.0, 3])
@pytest.mark.parametrize("shuffle", [None, 1, 2])
def test_a_quorum_of_all_is_synchronous(quorum: Any, shuffle: int | None) -> None:
    ours = run(quorum, gradient=pull, shuffle=shuffle)
    theirs = ReferenceRuntime(SynchronousSGD(collective=Linear()), 3, pull, lr=1.0, start=0.0).run(STEPS)
    for one, other in zip(ours.ranks, theirs.ranks, strict=True):
        assert all(torch.equal(mine, yours) for mine, yours in zip(one.seen, other.seen, strict=True))
        assert {update.staleness for update in one.applied} == {0}


def test_a_slow_rank_is_waited_for_by_nobody() -> None:
    """Ranks 0 and 1 take 1 s a step, rank 2 takes 3.5 s: rounds 0, 1, 2 are over at 3 s, without it; it takes part in round 3."""
    driver = run(2, costs=Costs(backward=lambda rank, step: 3.5 if rank == 2 else 1.0))
    assert [step for step, _ in driver.ranks[2].backwards] == [0, 3]
    rounds = contributions(driver)
    assert [sorted(one) for one in rounds[:4]] == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1)],
        [(0, 2), (1, 2)],
        [(0, 3), (1, 3), (2, 0)],
    ]
    assert [end.step for end in driver.ranks[2].ends if end.dropped] == [1, 2, 3, 4, 5], (
        "it skipped four, and one was left over"
    )
    assert [update.staleness for update in driver.ranks[2].applied] == [0, 0, 0, 3, 0, 0], (
        "of its own gradient, in the round that used it"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepsOfSums(Collective):
    """A linear sum that notes the step of each rank's values: a codec's noise and the start of a compression depend on it."""

    seen: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list), compare=False)

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        assert isinstance(value, Gradient)
        self.seen[ctx.rank].append(value.step)
        return Linear().all_reduce(ctx, value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return Linear().bytes_sent(rank, num_workers, numel, itemsize, tail)


@pytest.mark.parametrize("quorum", ["solo", "majority", "all"])
def test_all_ranks_sum_a_round_under_its_own_number(quorum: str) -> None:
    """Also on a late rank, whose gradient is of an earlier step: a collective may choose by the step what it sends."""
    collective = StepsOfSums()
    costs = Costs(backward=lambda rank, step: 3.5 if rank == 2 else 1.0)
    ReferenceRuntime(PartialAllReduce(quorum=quorum, collective=collective), 3, coded, lr=1.0, costs=costs).run(STEPS)
    assert collective.seen == {rank: list(range(STEPS)) for rank in range(3)}


@pytest.mark.parametrize("stop", range(STEPS))
@pytest.mark.parametrize("shuffle", [3, 4])
def test_stopped_and_resumed_no_gradient_is_lost_or_used_twice(stop: int, shuffle: int) -> None:
    first = ReferenceRuntime(
        PartialAllReduce(quorum="solo", collective=Linear()), 3, coded, lr=1.0, start=0.0, shuffle=shuffle
    ).run(STEPS, stop_after=stop)
    assert {len(rank.seen) for rank in first.ranks} == {stop + 1}, "all ranks stopped at one step"
    second = ReferenceRuntime(
        PartialAllReduce(quorum="solo", collective=Linear()), 3, coded, lr=1.0, start=0.0, shuffle=shuffle
    )
    for here, before in zip(second.ranks, first.ranks, strict=True):
        here.updates = list(before.updates)
    second.run(STEPS, first_step=stop + 1, resumed=first.states)
    used = Counter(item for driver in (first, second) for one in contributions(driver) for item in one)
    assert set(used.values()) <= {1}
    carried = sum(len(state.waiting) for state in first.states)
    assert sum(used.values()) >= sum(len(rank.backwards) for driver in (first, second) for rank in driver.ranks) - 3
    assert carried <= 3


@pytest.mark.parametrize(
    ("quorum", "num_ranks", "expected"),
    [("solo", 5, 1), ("majority", 5, 3), ("majority", 4, 3), ("all", 5, 5), (0.5, 5, 3), (1.0, 5, 5), (1, 5, 1)],
)
def test_how_many_begin_a_round(quorum: Any, num_ranks: int, expected: int) -> None:
    assert PartialAllReduce(quorum=quorum).num_ready(num_ranks) == expected


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Wrapper):
    """Partial all-reduce that is asked at the end of each step which of its gradients are unused."""

    def worker(self, ctx: Context) -> Program:
        program, answer = self.inner.worker(ctx), None
        num_computed, num_used = 0, 0
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return
            if isinstance(request, Apply):
                num_used += len(request.of)
            if isinstance(request, EndStep):
                unused: PartialState = ctx.resumed.unused(request.step)
                weight = sum(float(gradient.tail()[WEIGHT]) for gradient in unused.waiting)
                assert round(weight * ctx.num_workers) == num_computed - num_used
            answer = yield request
            num_computed += isinstance(request, Backward)


@pytest.mark.parametrize("shuffle", range(20))
@pytest.mark.parametrize("quorum", ["solo", "majority", "all"])
def test_a_gradient_is_in_a_sum_or_unused(quorum: str, shuffle: int) -> None:
    """At every end of a step, also where rounds have begun that this rank has yet to apply."""
    asked = Asked(inner=PartialAllReduce(quorum=quorum, collective=Linear()))
    ReferenceRuntime(asked, 3, coded, lr=1.0, start=0.0, shuffle=shuffle).run(STEPS)


def test_a_word_of_control_said_twice_is_one_word() -> None:
    """A late gradient and a new one of rank 0 both carry it: their sum must not be another value."""
    layout = run("solo", 1, steps=1).ranks[0].layout
    mine = [Gradient(torch.ones(layout.numel), layout, step, step) for step in range(3)]
    merged = _merged(Context(0, 2, layout=layout), mine, 2)
    assert merged.tail().tolist() == [3.0, 1.0, 3.0, 3.0, 3.0], "weight, control, used"
    assert _merged(Context(0, 2, layout=layout), [], 2).tail().tolist() == [0.0] * 5


@pytest.mark.parametrize("quorum", [0, 0.0, 1.5, "most", True])
def test_wrong_quorums_are_refused(quorum: Any) -> None:
    with pytest.raises(ConfigError, match="quorum"):
        PartialAllReduce(quorum=quorum)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="quorum=4 of 3 ranks"):
        PartialAllReduce(quorum=4).check(3)


@pytest.mark.parametrize("num_ranks", [497, 1000])
def test_no_hop_of_a_sum_has_a_tag_of_the_rounds_own_messages(num_ranks: int) -> None:
    """Rounds and their sums share the tags of the program: a ring of 497 ranks has hops 0 to 991, and READY was 990."""
    for rank in (0, num_ranks - 1):
        tape = record_schedule(
            perform(Ring().all_reduce(Context(rank, num_ranks), torch.empty(num_ranks, device="meta")))
        )
        assert tape is not None
        used = {tag for op, _, _, tag, _ in tape if op in (SEND, RECEIVE)}
        assert len(used) > 400 and not used & {READY, GO, DONE}
