"""Algorithms that average parameters keep the mean over ranks.

These laws are for an algorithm that applies gradients that no other rank sees (`Apply(local=True)`); running it shows
that. With gradients of one curvature, g_i(w) = c (w - x_i[t]), an update and an average are linear. So the mean over
ranks is that of one rank with the mean of the gradients, w[t+1] = w[t] - lr c (w[t] - mean_i x_i[t]), for any pairs and
times of averaging. If parameters are only averaged, that is plain SGD. An outer optimizer (DiLoCo's) or a delay moves
the mean in another way, but as it moves equal ranks.

All minima x_i[t] differ in every coordinate, on every rank and in every step.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.laws.sentences import assert_equal_ranks, assert_holds, assert_near, name_of
from workbench.program import Algorithm, Replicas
from workbench.runtimes.reference import ReferenceRuntime

LR, CURVATURE, STEPS = 0.2, 0.5, 13
SIZES = (2, 3, 1)
START = torch.tensor([1.0, -2.0, 3.0, 5.0, -7.0, 11.0], dtype=torch.float64)
ROUNDING = 1e-12


@cache
def minimum(rank: int, step: int) -> Tensor:
    """x_i[t], a number for every coordinate, rank and step."""
    return torch.randn(len(START), generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)


def pulled(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Return g_i(w) = c (w - x_i[t])."""
    return CURVATURE * (parameters - minimum(rank, step))


@lru_cache(maxsize=4)  # two laws look at the same run
def run(
    algorithm: Algorithm, num_ranks: int, *, equal: bool = False, shuffle: int | None = None, steps: int = STEPS
) -> ReferenceRuntime:
    """On ranks with gradients of their own; or, `equal`, each with the mean of all."""

    def mean(_: int, step: int, parameters: Tensor) -> Tensor:
        return CURVATURE * (parameters - torch.stack([minimum(one, step) for one in range(num_ranks)]).mean(0))

    return ReferenceRuntime(
        algorithm, num_ranks, mean if equal else pulled, sizes=SIZES, lr=LR, start=START, shuffle=shuffle
    ).run(steps)


def states(driver: ReferenceRuntime) -> list[list[Tensor]]:
    """[after which step][rank], and at last those at the end."""
    after = [list(values) for values in zip(*(rank.seen for rank in driver.ranks), strict=True)]
    return [*after, [rank.parameters for rank in driver.ranks]]


def when(step: int) -> str:
    """Return the words for a position in `states`."""
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


def check_rest(algorithm: Algorithm, num_ranks: int) -> None:
    """Where all gradients are 0 and all ranks are equal, nothing moves: an average of equal numbers is that number."""
    driver = ReferenceRuntime(
        algorithm, num_ranks, lambda rank, step, w: torch.zeros_like(w), sizes=SIZES, lr=LR, start=START
    ).run(STEPS)
    law = f"{name_of(algorithm)}: the average of equal parameters is those parameters"
    for step, ranks in enumerate(states(driver)):
        for rank, found in enumerate(ranks):
            assert_near(law, found, START, ROUNDING, f"{when(step)}, on rank {rank} of {num_ranks}")


def check_mean(algorithm: Algorithm, num_ranks: int, shuffle: int | None = None, *, as_sgd: bool = False) -> None:
    """The mean over ranks is that of ranks which all have the mean gradient, and `as_sgd` that of SGD."""
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
        if as_sgd:
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


def once(rank: int, step: int, _: Tensor) -> Tensor:
    """Every rank goes its own way in the first step, and nowhere then."""
    return minimum(rank, 0) * (step == 0)
