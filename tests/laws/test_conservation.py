"""Nothing is lost and nothing applied twice: applied gradients and residuals add up to what was owed.

For every algorithm that sums, with every collective with memory, on one lane and on several, for any batches.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.covering import CODINGS, covering, takes, versions
from tests.laws.owed import Situation, run
from tests.laws.variants import find_algorithms
from workbench import collectives
from workbench.algorithms import (
    AdaptiveDelaySGD,
    ApplyOrder,
    Constant,
    DiLoCo,
    EagerDiLoCo,
    LayerwiseSGD,
    PartialAllReduce,
    PipeSGD,
    StaleSGD,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.codecs import Codec, ErrorFeedback, Linear8, SharedInt8, Sign, TopK
from workbench.collectives import Collective, Once, PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.program import Algorithm

STEPS = 13
SPREADS = ("encoded", "raw", "gather")
CODECS: tuple[Codec, ...] = (TopK(fraction=0.1), Sign(), Linear8())
COLLECTIVES: list[Collective] = [
    *(Once(codec=ErrorFeedback(codec=codec), spread=spread) for codec, spread in product(CODECS, SPREADS)),  # type: ignore[arg-type]
    Once(codec=ErrorFeedback(codec=SharedInt8()), inner=Ring()),
    PowerSGD(rank=1, inner=Ring()),
    PowerSGD(rank=1, alternate=True, inner=Ring()),
    PowerSGD(rank=2, start_step=3, inner=Ring()),
]
SITUATIONS = {
    "even": Situation(64),
    "short last batch": Situation(40),
    "last batch of 1/32": Situation(33),
    "ranks without samples": Situation(34),
    "a rank left out": Situation(64, spoilt=(5, 17)),
    "a rank left out, short last batch": Situation(37, spoilt=(5,)),
    "a parameter seldom used": Situation(40, flagged=13),
}


REMEMBERING = list(
    dict.fromkeys(
        version
        for name, codec in product(collectives.names(), CODINGS)
        for version in versions(name, codec).values()
        if version.keeps_residual
    )
)
"""Every collective of the package that remembers, with each codec and at other settings."""


def algorithms(collective: Collective) -> list[Algorithm]:
    """Every algorithm that sums and takes it, on one lane and on several."""
    mean: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    # With a delay, StreamingDiLoCo discards by its rule what was learned under the sum: it owes nothing of that
    found = [
        SynchronousSGD(collective=collective),
        LayerwiseSGD(bucket_bytes=100.0, lanes=2, collective=collective),
        LayerwiseSGD(bucket_bytes=100.0, apply=ApplyOrder.ANY, collective=collective),
        PipeSGD(width=3, collective=collective),
        PipeSGD(width=3, lanes=2, collective=collective),
        PipeSGD(width=4, lanes=3, collective=collective),
        AdaptiveDelaySGD(max_delay=3, adapt_every=3, collective=collective),
        StaleSGD(staleness=Constant(2), collective=collective),
        DiLoCo(every=2, collective=collective, **mean),
        StreamingDiLoCo(every=3, fragments=2, collective=collective, **mean),
        EagerDiLoCo(every=2, collective=collective, **mean),
        EagerDiLoCo(every=3, fragments=2, collective=collective, **mean),
    ]
    return found if collective.calls_library else [*found, PartialAllReduce(quorum="all", collective=collective)]


def pairs() -> list[tuple[Algorithm, str]]:
    """Each algorithm with each situation, codec and way to spread; with each collective, where sums of one bucket overtake each other."""
    rows = list(product(range(len(algorithms(COLLECTIVES[0]))), COLLECTIVES, SITUATIONS))

    def parts(row: tuple[int, Collective, str]) -> list[Hashable]:
        which, collective, name = row
        algorithm = algorithms(collective)[which]
        kind = (type(collective), repr(getattr(collective, "codec", collective)))
        overtakes = algorithm.requires.num_lanes > 1 and algorithm.max_staleness
        return [
            (which, name),
            (which, kind),
            (which, getattr(collective, "spread", "")),
            *([(which, collective)] if overtakes else []),
        ]

    return [(algorithms(collective)[which], name) for which, collective, name in covering(rows, parts)]


def imbalance(algorithm: Algorithm, situation: Situation, steps: int, seed: int = 0) -> float:
    """Largest difference over any rank and value, relative to the largest that was owed."""
    ended, owed = run(algorithm, situation, steps, seed), situation.owed(algorithm, steps, seed)
    wrong = max(float(np.abs(applied + ended.left - owed).max()) for applied in ended.applied)
    return wrong / max(float(np.abs(owed).max()), 1.0)


def check(algorithm: Algorithm, situation: Situation, seed: int = 0) -> None:
    """Raise unless it holds at the end of the run; says where it first does not."""
    if imbalance(algorithm, situation, STEPS, seed) < 1e-10:
        return
    first = next(steps for steps in range(1, STEPS + 1) if imbalance(algorithm, situation, steps, seed) >= 1e-10)
    ended, owed = run(algorithm, situation, first, seed), situation.owed(algorithm, first, seed)
    ranks = [rank for rank, applied in enumerate(ended.applied) if np.abs(applied + ended.left - owed).max() > 1e-10]
    share = float(np.abs(ended.applied[ranks[0]] + ended.left).sum() / np.abs(owed).sum())
    raise AssertionError(
        f"conservation: on ranks {ranks}, from step {first - 1} on, what {algorithm} applied and what ranks have left over are "
        f"{share:.4f} of what {situation} owes"
    )


@pytest.mark.parametrize(("algorithm", "name"), pairs(), ids=str)
def test_what_was_applied_and_what_is_left_over_are_what_was_owed(algorithm: Algorithm, name: str) -> None:
    check(algorithm, SITUATIONS[name])


@settings(max_examples=25)
@given(
    algorithm=st.sampled_from(REMEMBERING).flatmap(lambda collective: st.sampled_from(algorithms(collective))),
    situation=st.builds(
        Situation,
        num_samples=st.integers(9, 70),
        num_ranks=st.integers(1, 5),
        batch_size=st.integers(1, 9),
        flagged=st.sampled_from([0, 1, 7, 30]),
        spoilt=st.lists(st.integers(0, 8), max_size=2, unique=True).map(tuple),
    ),
    seed=st.integers(0, 999),
)
def test_it_is_so_whatever_the_batches(algorithm: Algorithm, situation: Situation, seed: int) -> None:
    check(algorithm, situation, seed)


def test_no_algorithm_that_takes_such_a_collective_is_left_out() -> None:
    taking = set()
    for kind in find_algorithms():
        with suppress(ConfigError):
            if takes(kind(), "collective") and replace(kind(), collective=REMEMBERING[0]):  # type: ignore[call-arg]
                taking.add(kind)
    assert taking <= {type(algorithm) for algorithm in algorithms(REMEMBERING[0])}
