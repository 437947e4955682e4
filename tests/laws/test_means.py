"""Algorithms that average parameters keep the mean over ranks: all in the package, and those that will be added.

`workbench/laws/means.py` holds the laws, with the reason why they hold.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.laws.covering import takes
from tests.laws.gossip import WRONG, Gossip, RightGossip
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
from workbench.laws import means
from workbench.laws.means import averages_parameters, check_meeting, check_rest
from workbench.ops import Program, Value
from workbench.program import Algorithm, Context

COLLECTIVES = (Native(), Linear(), Ring(), Ring(chunks=2), Tree(), HalvingDoubling(), Hierarchical(group=2))


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


def check_mean(algorithm: Algorithm, num_ranks: int, shuffle: int | None = None) -> None:
    """The mean over ranks is that of ranks which all have the mean gradient, and for plain averages that of SGD.

    Where only some ranks take part in a round, the mean is theirs: `tests/unit/test_fed_avg.py`.
    """
    if not (isinstance(algorithm, FedAvg) and algorithm.fraction < 1):
        means.check_mean(algorithm, num_ranks, shuffle, as_sgd=moves_as_sgd(algorithm))


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
