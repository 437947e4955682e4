"""Training converges on a convex problem, with stragglers, in a long run.

The loss of rank i in step t is c |w - x_i[t]|^2 / 2, where all x_i[t] are within 0.1 of one minimum, and training begins
at a distance of 10. With a learning rate h, plain SGD multiplies the distance by 1 - h c in each step.

Ranks are unequal: at random, and with one that is always slow. So late values meet an outer momentum, a quorum is
complete without some ranks, and what is wrong by a little in each round adds up. A short run, or equal ranks, do not
show it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.laws.sentences import assert_holds, name_of
from workbench.program import Algorithm
from workbench.rng import generator
from workbench.runtimes.reference import Costs, ReferenceRuntime

Array = NDArray[np.float64]

CYCLE = 509
DISTANCE, SPREAD = 10.0, 0.1
LENGTHS = (400, 1600, 6400)  # steps; the longer ones for algorithms that communicate seldom
NEAR, FAR = 0.05, 4.0  # of the first distance: where a run is to end, and where none may come
MINIMUM = torch.tensor([3.0, -2.0, 1.0, 5.0, -4.0, 2.0], dtype=torch.float64)


@cache
def drawn(rank: int) -> tuple[Array, Array]:
    """Return a rank's seconds (CYCLE,), and what its gradients add to the distance, (CYCLE, 6): for steps modulo CYCLE."""
    random = generator(0, "convergence", rank, 0)
    return random.lognormal(sigma=0.5, size=CYCLE), random.uniform(-SPREAD, SPREAD, (CYCLE, len(MINIMUM)))


def slow_rank(rank: int, _: int) -> float:
    """Rank 1 is always 3 times slower; the others differ by a little."""
    return 3.0 if rank == 1 else 1.0 + 0.01 * rank


def random_ranks(rank: int, step: int) -> float:
    """Each step of each rank is slower or faster by chance."""
    return float(drawn(rank)[0][step % CYCLE])


STRAGGLERS: dict[str, Callable[[int, int], float]] = {"a slow rank": slow_rank, "random stragglers": random_ranks}


def pull(rate: float) -> Callable[[int, int, Tensor], Tensor]:
    """Return the gradient whose step of learning rate 0.1 multiplies the distance by 1 - rate."""

    def gradient(rank: int, step: int, parameters: Tensor) -> Tensor:
        noise = torch.from_numpy(drawn(rank)[1][step % CYCLE])
        return rate / 0.1 * (parameters - MINIMUM - noise)

    return gradient


def rate_of(algorithm: Algorithm) -> float:
    """Return a rate for which SGD with the algorithm's staleness is stable, with a margin.

    Some right algorithms, such as GradientTracking, diverge at 0.4 where SGD does not.
    """
    if algorithm.requires.servers:
        return 0.05
    return min(0.1, 0.2 / ((algorithm.max_staleness or 0) + 1))


def check_convergence(algorithm: Algorithm, num_ranks: int) -> None:
    """Every rank ends near the minimum, and none is ever far away."""
    rate = rate_of(algorithm)
    for name, seconds in STRAGGLERS.items():
        how = f"with {name}, at a rate of {rate:g} a step"
        for steps in LENGTHS:
            if _converges(algorithm, num_ranks, how, seconds, rate, steps):
                break


def _converges(
    algorithm: Algorithm,
    num_ranks: int,
    how: str,
    seconds: Callable[[int, int], float],
    rate: float,
    steps: int,
) -> bool:
    driver = ReferenceRuntime(
        algorithm,
        num_ranks,
        pull(rate),
        lr=0.1,
        start=MINIMUM + DISTANCE,
        costs=Costs(backward=seconds, message=0.05, collective=0.1),
    ).run(steps)
    law = f"{name_of(algorithm)}: training converges on a convex problem with stragglers"
    ends = []
    for number in range(algorithm.roles(num_ranks).num_computing):
        rank = driver.ranks[number]
        for step, seen in enumerate([*rank.seen, rank.parameters]):
            away = float((seen - MINIMUM).abs().max())
            when = f"after step {step}" if step < len(rank.seen) else "at the end"
            where = f"on rank {number} of {num_ranks} {when}, {how}: it is {away:.3g} away from the minimum"
            assert_holds(law, away <= FAR * DISTANCE, f"{where}, and began {DISTANCE:g} away")
        ends.append(float((rank.parameters - MINIMUM).abs().max()))
    furthest = max(range(len(ends)), key=ends.__getitem__)
    if ends[furthest] <= NEAR * DISTANCE:
        return True
    where = f"on rank {furthest} of {num_ranks} after step {steps - 1}, {how}: it is {ends[furthest]:.3g} away"
    assert_holds(law, steps < LENGTHS[-1], f"{where}, and should be at most {NEAR * DISTANCE:g} away")
    return False
