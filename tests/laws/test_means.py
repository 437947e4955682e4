"""Algorithms that average parameters keep the mean over ranks: all in the package, and those that will be added.

These laws are for an algorithm that applies gradients that no other rank sees (`Apply(local=True)`); running it shows
that. With gradients of one curvature, g_i(w) = c (w - x_i[t]), an update and an average are linear. So the mean over
ranks is that of one rank with the mean of the gradients, w[t+1] = w[t] - lr c (w[t] - mean_i x_i[t]), for any pairs and
times of averaging. If parameters are only averaged, that is plain SGD. An outer optimizer (DiLoCo's) or a delay moves
the mean in another way, but as it moves equal ranks.

All minima x_i[t] differ in every coordinate, on every rank and in every step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.laws.covering import takes
from tests.laws.gossip import WRONG, Gossip, RightGossip
from tests.laws.sentences import assert_equal_ranks, assert_holds, assert_near
from tests.laws.variants import find_algorithms, name_of, variants
from workbench.algorithms import (
    DPSGD,
    SPARTA,
    ChocoSGD,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    GradientTracking,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    SlowMo,
    StochasticGradientPush,
    StreamingDiLoCo,
)
from workbench.algorithms.outer_optimizer import OuterAlgorithm
from workbench.collectives import Collective, HalvingDoubling, Hierarchical, Linear, Native, Ring, Tree
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import Program, Value
from workbench.program import Algorithm, Context, Replicas
from workbench.runtimes.reference import ReferenceRuntime

LR, CURVATURE, STEPS = 0.2, 0.5, 13
SIZES = (2, 3, 1)
START = torch.tensor([1.0, -2.0, 3.0, 5.0, -7.0, 11.0], dtype=torch.float64)
ROUNDING = 1e-12
COLLECTIVES = (Native(), Linear(), Ring(), Ring(chunks=2), Tree(), HalvingDoubling(), Hierarchical(group=2))


@cache
def minimum(rank: int, step: int) -> Tensor:
    """x_i[t], a number for every coordinate, rank and step."""
    return torch.randn(len(START), generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)


def pulled(rank: int, step: int, parameters: Tensor) -> Tensor:
    return CURVATURE * (parameters - minimum(rank, step))


@lru_cache(maxsize=4)  # two laws look at the same run
def run(
    algorithm: Algorithm, num_ranks: int, *, equal: bool = False, shuffle: int | None = None, steps: int = STEPS
) -> ReferenceRuntime:
    """On ranks with gradients of their own; or, `equal`, each with the mean of all."""

    def mean(rank: int, step: int, parameters: Tensor) -> Tensor:
        return CURVATURE * (parameters - torch.stack([minimum(one, step) for one in range(num_ranks)]).mean(0))

    return ReferenceRuntime(
        algorithm, num_ranks, mean if equal else pulled, sizes=SIZES, lr=LR, start=START, shuffle=shuffle
    ).run(steps)


def states(driver: ReferenceRuntime) -> list[list[Tensor]]:
    """[after which step][rank], and at last those at the end."""
    after = [list(values) for values in zip(*(rank.seen for rank in driver.ranks), strict=True)]
    return [*after, [rank.parameters for rank in driver.ranks]]


def when(step: int) -> str:
    return f"after step {step}" if step < STEPS else "at the end"


@cache
def averages_parameters(algorithm: Algorithm) -> bool:
    """Whether it takes steps with gradients that no other rank sees, in step with them; asynchronous ones have other laws."""
    if algorithm.asynchronous and algorithm.replicas != Replicas.NEVER:
        return False
    try:
        algorithm.check(3)
    except ConfigError:
        return False
    return any(update.local for update in run(algorithm, 3, steps=4).ranks[0].applied)  # each worker of pytest asks


def held_to_it() -> list[Algorithm]:
    """Each such algorithm in each of its settings, and in the first of them with every collective that it can be given."""
    found = [item for item in [*variants(), RightGossip()] if averages_parameters(item)]
    first = {type(item): item for item in reversed(found) if hasattr(item, "collective")}.values()
    given = [replace(item, collective=other) for item in first for other in COLLECTIVES]  # type: ignore[call-arg]
    more = [
        StreamingDiLoCo(every=3, fragments=3, outer_lr=1.0, outer_momentum=0.0),
        StreamingDiLoCo(every=4, fragments=1, delay=2, outer_momentum=0.5),
    ]
    return list({repr(item): item for item in [*found, *given, *more]}.values())


def moves_as_sgd(algorithm: Algorithm) -> bool:
    """Whether nothing but averages moves the mean."""
    if isinstance(algorithm, FedAvg):
        return algorithm.proximal == 0
    if isinstance(algorithm, SlowMo):
        return algorithm.slow_lr == 1.0 and algorithm.slow_momentum == 0.0 and moves_as_sgd(algorithm.inner)
    if not isinstance(algorithm, OuterAlgorithm | NoLoCo):
        return True
    late = isinstance(algorithm, EagerDiLoCo) or (isinstance(algorithm, StreamingDiLoCo) and algorithm.delay > 0)
    return algorithm.outer_lr == 1.0 and algorithm.outer_momentum == 0.0 and not late


# ---------------------------------------------------------------- the laws


def check_rest(algorithm: Algorithm, num_ranks: int) -> None:
    """Where all gradients are 0 and all ranks are equal, nothing moves: an average of equal numbers is that number."""
    driver = ReferenceRuntime(
        algorithm, num_ranks, lambda rank, step, w: torch.zeros_like(w), sizes=SIZES, lr=LR, start=START
    ).run(STEPS)
    law = f"{name_of(algorithm)}: the average of equal parameters is those parameters"
    for step, ranks in enumerate(states(driver)):
        for rank, found in enumerate(ranks):
            assert_near(law, found, START, ROUNDING, f"{when(step)}, on rank {rank} of {num_ranks}")


def check_mean(algorithm: Algorithm, num_ranks: int, shuffle: int | None = None) -> None:
    """The mean over ranks is that of ranks which all have the mean gradient, and for plain averages that of SGD.

    Where only some ranks take part in a round, the mean is theirs: `tests/unit/test_fed_avg.py`.
    """
    if isinstance(algorithm, FedAvg) and algorithm.fraction < 1:
        return
    law = f"{name_of(algorithm)}: averaging keeps the mean over ranks"
    found, equal = states(run(algorithm, num_ranks, shuffle=shuffle)), states(run(algorithm, num_ranks, equal=True))
    position = START
    alone: list[Tensor] = []  # SGD in one process
    for step in range(STEPS):
        position = position - LR * torch.stack([pulled(rank, step, position) for rank in range(num_ranks)]).mean(0)
        alone.append(position)
    alone.append(position)
    for step, ranks in enumerate(found):
        mean, where = torch.stack(ranks).mean(0), f"{when(step)}, of the mean over {num_ranks} ranks"
        assert_near(law, mean, torch.stack(equal[step]).mean(0), ROUNDING, where)
        if moves_as_sgd(algorithm):
            assert_near(law, mean, alone[step], ROUNDING, where)


def check_meeting(algorithm: Algorithm, num_ranks: int) -> None:
    """Ranks are equal when the algorithm says so; one that says never, and sends, still reduces every coordinate's distance."""
    found = states(run(algorithm, num_ranks))
    if algorithm.replicas.equal_parameters:
        for step, ranks in enumerate(found):
            assert_equal_ranks(f"{name_of(algorithm)}: replicas are equal after every step", ranks, when(step))
    elif algorithm.replicas == Replicas.AT_END:
        assert_equal_ranks(f"{name_of(algorithm)}: replicas are equal at the end", found[-1], "at the end", ROUNDING)
    elif algorithm.bytes_per_step(0, num_ranks, run(algorithm, num_ranks).ranks[0].layout) != 0:
        apart = ReferenceRuntime(algorithm, num_ranks, once, sizes=SIZES, lr=LR, start=START).run(60)
        first, last = (torch.stack(ranks) for ranks in (states(apart)[0], states(apart)[-1]))
        spread = [(values.max(0).values - values.min(0).values) for values in (first, last)]
        for coordinate, (before, after) in enumerate(zip(*spread, strict=True)):
            law = f"{name_of(algorithm)}: averaging brings the ranks together"
            assert_holds(
                law,
                bool(after <= 1e-3 * before),
                f"in coordinate {coordinate}: {before:.3g} apart after step 0, {after:.3g} at the end",
            )


def once(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Every rank goes its own way in the first step, and nowhere then."""
    return minimum(rank, 0) * (step == 0)


LAWS = (check_rest, check_mean, check_meeting)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", held_to_it(), ids=name_of)
def test_an_average_of_parameters_keeps_their_mean(algorithm: Algorithm, num_ranks: int) -> None:
    for law in LAWS:
        law(algorithm, num_ranks)


@settings(max_examples=20)
@given(
    algorithm=st.deferred(lambda: st.sampled_from(held_to_it())),
    num_ranks=st.integers(1, 6),
    every=st.integers(1, 6),
    collective=st.sampled_from(COLLECTIVES),
    shuffle=st.integers(0, 999),
)
def test_it_keeps_it_whatever_the_order_of_events(
    algorithm: Algorithm, num_ranks: int, every: int, collective: Collective, shuffle: int
) -> None:
    """With another period and collective if it has those; ranks reach the averages in a random order."""
    changes = {name: value for name, value in (("every", every), ("collective", collective)) if takes(algorithm, name)}
    try:
        changed = replace(algorithm, **changes)  # type: ignore[arg-type]
        changed.check(num_ranks)
    except ConfigError:
        reject()
    check_mean(changed, num_ranks, shuffle)
    check_meeting(changed, num_ranks)


# ---------------------------------------------------------------- the laws can fail


def test_every_algorithm_with_local_steps_is_held_to_them() -> None:
    kinds = {type(item) for item in held_to_it()}
    gossip = {DPSGD, GradientTracking, StochasticGradientPush, ChocoSGD, NoLoCo, RightGossip}
    assert kinds >= {LocalSGD, DiLoCo, StreamingDiLoCo, EagerDiLoCo, FedAvg, SPARTA, NoCommunication, *gossip}, (
        "found by their local steps, as one that is new will be"
    )
    assert kinds - {RightGossip} <= set(find_algorithms())


def broken(algorithm: Algorithm, num_ranks: int = 3) -> str:
    """What the first law that does not hold says; "" where all hold."""
    for law in LAWS:
        try:
            law(algorithm, num_ranks)
        except AssertionError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_gossip_breaks_one_in_a_sentence(kind: type[Gossip]) -> None:
    told = broken(kind())
    assert kind.__name__ in told, "it passes every law"
    assert "coordinate" in told and "step" in told, told


def test_a_right_gossip_breaks_none() -> None:
    assert broken(RightGossip()) == ""


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(every=3), DiLoCo(every=2), StreamingDiLoCo(every=3, fragments=2)], ids=name_of
)
@pytest.mark.parametrize("how", ["a divisor of 3.1", "a swapped block", "a rank left out"])
def test_a_wrong_sum_breaks_one_in_a_sentence(how: str, algorithm: Algorithm) -> None:
    assert broken(replace(algorithm, collective=Ring())) == ""  # type: ignore[call-arg]
    told = broken(replace(algorithm, collective=_WRONG_SUMS[how]()))  # type: ignore[call-arg]
    assert type(algorithm).__name__ in told and "coordinate" in told, "it passes every law"


class _WrongSum(Collective):
    """A ring whose result is then spoilt, equally on all ranks: replicas stay equal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return type(self).__name__.lstrip("_")

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        assert isinstance(value, Gradient)
        self.before(ctx, value.flat)
        yield from Ring().all_reduce(ctx, value)  # type: ignore[misc]
        for piece, flat in value.slices():
            self.after(flat[: piece.tail - piece.start])
        return value

    def before(self, ctx: Context, flat: Tensor) -> None:
        """What is summed."""

    def after(self, body: Tensor) -> None:
        """The summed values of one bucket."""

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return Ring().bytes_sent(rank, num_workers, numel, itemsize, tail)


class _WrongDivisor(_WrongSum):
    __slots__ = ()

    def after(self, body: Tensor) -> None:
        body.mul_(3 / 3.1)


class _SwappedBlock(_WrongSum):
    __slots__ = ()

    def after(self, body: Tensor) -> None:
        half = len(body) // 2
        body.copy_(torch.cat([body[half:], body[:half]]))


class _RankLeftOut(_WrongSum):
    __slots__ = ()

    def before(self, ctx: Context, flat: Tensor) -> None:
        if ctx.rank == 2:
            flat.zero_()  # the weight too, so that the average of the others is one


_WRONG_SUMS = {"a divisor of 3.1": _WrongDivisor, "a swapped block": _SwappedBlock, "a rank left out": _RankLeftOut}
