"""Identities: in its limiting setting a wrapper, a delay, a quorum or a codec is the algorithm that it degenerates to.

With momentum, parameter groups, and a run that is stopped in the middle and resumed. Each rank has the same number of
samples in every step, so that means over ranks and means over samples are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import final

import pytest
from torch import Tensor

from tests.laws import tiny
from tests.laws.test_state import groups
from tests.laws.train import train
from tests.laws.variants import find_algorithms, in_step, name_of, variants
from workbench.algorithms import (
    ADPSGD,
    DPSGD,
    SPARTA,
    AdaptiveDelaySGD,
    AdasumSGD,
    AsyncSGD,
    BackupSGD,
    ChocoSGD,
    Constant,
    DeAR,
    DelayCompensatedSGD,
    DeMo,
    DiLoCo,
    EagerDiLoCo,
    FedAvg,
    FirstSteps,
    GradientTracking,
    LayerwiseSGD,
    LocalSGD,
    NoCommunication,
    NoLoCo,
    OnlineBackupSGD,
    PartialAllReduce,
    PipeSGD,
    Quorum,
    SerialSGD,
    SignSGD,
    SlowMo,
    SoftsyncSGD,
    StaleSGD,
    StaleSynchronousSGD,
    StochasticGradientPush,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.algorithms.gossip import GossipAlgorithm
from workbench.codecs import ErrorFeedback, TopK
from workbench.collectives import Once
from workbench.laws.sentences import assert_near
from workbench.program import Algorithm
from workbench.settings import Settings
from workbench.topologies import Complete, RandomPairs, Star

EXACT, ROUNDING, FLOAT32 = 0.0, 1e-12, 2e-6  # codecs send float32
STEPS, STOPS = 13, (5, 7)  # after 6 steps a block ends
BLOCK = 6
PROBLEM = tiny.problem(num_samples=24, test=None)
HOW = Settings(steps=STEPS, batch_size=2, optimizer=groups, evaluate_every=0, timeout_s=30, seed=3)
PLAIN = SynchronousSGD()
LOSSLESS = TopK(fraction=1.0)


@final
@dataclass(frozen=True)
class Identity:
    """An algorithm in a limiting setting, and what it is then."""

    one: Algorithm
    other: Algorithm
    tolerance: float = ROUNDING
    num_ranks: int = 3

    def __str__(self) -> str:
        return f"{name_of(self.one)} is {name_of(self.other)} on {self.num_ranks}"


def once(algorithm: Algorithm) -> Identity:
    """One rank has nobody to wait for or to exchange with."""
    return Identity(algorithm, SerialSGD(), num_ranks=1)


IDENTITIES = [
    # synchronous ones, in other orders and with no delay
    Identity(SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=LOSSLESS))), PLAIN, FLOAT32),
    Identity(LayerwiseSGD(bucket_bytes=200.0, apply="backward"), PLAIN),
    Identity(DeAR(bucket_bytes=200.0), PLAIN),
    Identity(PipeSGD(width=1), PLAIN, EXACT),
    Identity(PipeSGD(width=3, warmup_steps=STEPS), PLAIN, EXACT),
    Identity(PipeSGD(width=1, first=FirstSteps.DUPLICATE), PLAIN, EXACT),
    Identity(PipeSGD(width=3, lanes=2), PipeSGD(width=3), EXACT),
    Identity(AdaptiveDelaySGD(max_delay=0), PLAIN, EXACT),
    Identity(StaleSGD(staleness=Constant(0)), PLAIN, EXACT),
    Identity(PartialAllReduce(quorum=Quorum.ALL), PLAIN),
    Identity(PartialAllReduce(quorum=1.0), PartialAllReduce(quorum=Quorum.ALL), EXACT),
    Identity(PartialAllReduce(quorum=3), PartialAllReduce(quorum=Quorum.ALL), EXACT),
    # one rank
    once(SerialSGD(delay=0)),
    once(AdasumSGD()),
    once(ADPSGD()),
    once(DPSGD()),
    once(GradientTracking()),
    once(StochasticGradientPush()),
    once(NoCommunication()),
    once(AsyncSGD()),
    once(OnlineBackupSGD()),
    once(SoftsyncSGD()),
    once(StaleSynchronousSGD(bound=1)),
    Identity(SerialSGD(delay=2), PipeSGD(width=3), num_ranks=1),
    Identity(EagerDiLoCo(every=2, outer_momentum=0.0), DiLoCo(every=2, outer_momentum=0.0), num_ranks=1),
    # servers
    Identity(BackupSGD(backups=0), PLAIN),
    Identity(BackupSGD(backups=0, shards=3), PLAIN),
    Identity(DelayCompensatedSGD(strength=0), AsyncSGD(), EXACT),
    # local steps
    Identity(LocalSGD(every=1), PLAIN),
    Identity(LocalSGD(every=3, after=STEPS), PLAIN),
    Identity(DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0), LocalSGD(every=3)),
    Identity(DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0, nesterov=False), LocalSGD(every=3)),
    Identity(StreamingDiLoCo(every=3, fragments=1), DiLoCo(every=3), EXACT),
    Identity(
        StreamingDiLoCo(every=3, fragments=1, mix=1.0, outer_lr=1.0, outer_momentum=0.0), LocalSGD(every=STEPS + 1)
    ),
    Identity(FedAvg(every=3, fraction=1.0), LocalSGD(every=3)),
    Identity(SPARTA(fraction=1.0), LocalSGD(every=1)),
    # gossip
    Identity(DPSGD(topology=Complete(), overlap=False), LocalSGD(every=1)),
    Identity(
        ChocoSGD(codec=LOSSLESS, consensus_lr=1.0, topology=Star()), DPSGD(overlap=False, topology=Star()), FLOAT32
    ),
    Identity(
        NoLoCo(every=1, outer_lr=1.0, outer_momentum=0.0, consensus_lr=1.0, topology=RandomPairs()),
        DPSGD(overlap=False, topology=RandomPairs()),
    ),
    Identity(
        NoLoCo(every=3, outer_lr=0.8, outer_momentum=0.6, topology=Complete()),
        SlowMo(every=3, slow_lr=0.8, slow_momentum=0.6),
    ),
    # what is sent
    Identity(DeMo(sign=False, chunk=16, top_k=16), PLAIN, FLOAT32),
    Identity(SignSGD(momentum=0.0), DeMo(sign=True, decay=0.0, chunk=1, top_k=1), num_ranks=1),
    # slow momentum
    Identity(SlowMo(every=3, slow_lr=1.0, slow_momentum=0.0), LocalSGD(every=3)),
    Identity(
        SlowMo(every=3, slow_lr=0.8, slow_momentum=0.6),
        DiLoCo(every=3, outer_lr=0.8, outer_momentum=0.6, nesterov=False),
    ),
]


def neutral(inner: Algorithm) -> SlowMo:
    """Slow momentum that moves to where the inner algorithm is."""
    return SlowMo(every=BLOCK, inner=inner, slow_lr=1.0, slow_momentum=0.0)


def ends_unchanged(inner: Algorithm) -> bool:
    """Whether the end of a block changes nothing: replicas are equal there, and nothing is in flight."""
    if isinstance(inner, SlowMo | GossipAlgorithm | EagerDiLoCo) or inner.depends_on_timing:
        return False
    if inner.max_staleness and not isinstance(inner, StaleSGD):
        return False
    period = getattr(inner, "every", 0 if inner.replicas.equal_parameters else STEPS)
    whole = not getattr(inner, "delay", 0) and not getattr(inner, "mix", 0) and getattr(inner, "fragments", 1) == 1
    return BLOCK % max(period, 1) == 0 and whole and not getattr(inner, "after", 0)


INNER = [item for item in in_step(variants()) if ends_unchanged(item)]


@cache
def trained(algorithm: Algorithm, num_ranks: int, stop: int | None) -> list[Tensor]:
    """Each rank's parameters at the end of a run, unbroken or resumed after a step."""
    run = partial(train, "simulated", num_ranks, algorithm, PROBLEM, replace(HOW, batch_size=6 // num_ranks))
    if stop is None:
        return [steps[-1] for steps in run().parameters]
    return [steps[-1] for steps in run(resume=run(stop_after=stop).checkpoint).parameters]


def check(identity: Identity) -> None:
    """Unbroken and resumed."""
    expected = trained(identity.other, identity.num_ranks, None)
    depends = identity.one.depends_on_timing and identity.num_ranks > 1
    for stop in (None,) if depends else (None, *STOPS):
        found = trained(identity.one, identity.num_ranks, stop)
        for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            when = f"at the end, rank {rank}" if stop is None else f"resumed after step {stop}, rank {rank}"
            assert_near(str(identity), ours, theirs, identity.tolerance, when)


@pytest.mark.parametrize("identity", IDENTITIES, ids=str)
def test_a_limiting_setting_is_what_it_degenerates_to(identity: Identity) -> None:
    check(identity)


@pytest.mark.parametrize("inner", INNER, ids=name_of)
def test_slow_momentum_that_changes_nothing_is_its_inner_algorithm(inner: Algorithm) -> None:
    check(Identity(neutral(inner), inner))


def test_every_algorithm_has_an_identity() -> None:
    named = {type(item) for identity in IDENTITIES for item in (identity.one, identity.other)}
    assert named == set(find_algorithms())
    kept = {type(item) for item in INNER}
    assert kept >= {DeMo, SignSGD, LayerwiseSGD, LocalSGD, DiLoCo, FedAvg, SPARTA, PartialAllReduce}
