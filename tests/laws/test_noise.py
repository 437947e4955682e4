"""Noise of stochastic codecs averages out: the mean of T updates comes as near to the gradient as 1 / sqrt(T) lets it.

Each update of a constant gradient c is c plus noise of mean 0 that no other update has. After T of them the mean
differs from c by noise / sqrt(T): on a logarithmic scale a line of slope -1/2. Noise that is drawn once and used at
every step, or a codec whose mean is not the value, gives a slope of 0.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.laws.variants import name_of
from workbench.algorithms import (
    AdaptiveDelaySGD,
    DeAR,
    DiLoCo,
    LayerwiseSGD,
    PartialAllReduce,
    PipeSGD,
    StreamingDiLoCo,
    SynchronousSGD,
)
from workbench.algorithms.outer_optimizer import OuterAlgorithm
from workbench.codecs import QSGD, SharedInt8
from workbench.collectives import Collective, Once, Ring
from workbench.program import Algorithm
from workbench.runtimes.reference import ReferenceRuntime

RANKS, SIZES = 3, (400, 600, 500)
LENGTHS = (8, 16, 32, 64)
# 1,500 coordinates give each error to about 1 / sqrt(3000) = 1.8 %; a line through four of them over a factor of 8 then
# has its slope to about 0.018 / ln(8) * 2 = 0.02, and coordinates of one run are not independent of each other from
# length to length: twice that. The first sum of each fragment of StreamingDiLoCo is of fewer steps than the others:
# less noise at the shortest length.
SLOPE, TOLERANCE, TOLERANCE_OF_FRAGMENTS = -0.5, 0.05, 0.1

STOCHASTIC: tuple[Collective, ...] = (
    Ring(codec=QSGD(levels=3)),
    Once(codec=QSGD(levels=3)),
    Once(codec=SharedInt8(rounding="stochastic"), inner=Ring()),
)


def algorithms(collective: Collective) -> list[Algorithm]:
    """Every algorithm that sends sums of gradients or of differences."""
    found: list[Algorithm] = [
        SynchronousSGD(collective=collective),
        LayerwiseSGD(bucket_bytes=300.0, collective=collective),
        LayerwiseSGD(bucket_bytes=300.0, lanes=2, collective=collective),
        PipeSGD(width=2, collective=collective),
        PipeSGD(width=3, lanes=2, collective=collective),
        AdaptiveDelaySGD(max_delay=2, collective=collective),
        PartialAllReduce(quorum="all", collective=collective),
        DiLoCo(every=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False, collective=collective),
        StreamingDiLoCo(every=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False, collective=collective),
    ]
    if collective.splits:
        found.append(DeAR(bucket_bytes=300.0, collective=collective))
    return found


PLACES = torch.arange(1, sum(SIZES) + 1, dtype=torch.float64)
GRADIENTS = [torch.sin(PLACES) + 0.3 * (rank + 1) * torch.cos(3 * PLACES) for rank in range(RANKS)]


def constant(rank: int, step: int, parameters: Tensor) -> Tensor:
    """The same at every step; ranks and coordinates differ."""
    return GRADIENTS[rank]


def errors(algorithm: Algorithm) -> list[float]:
    """Of the mean of the first T updates, for each T of `LENGTHS`: its root mean square over the coordinates."""
    steps = max(LENGTHS)
    driver = ReferenceRuntime(algorithm, RANKS, constant, lr=1.0, sizes=SIZES, start=0.0).run(steps)
    start = torch.zeros(sum(SIZES), dtype=torch.float64)
    exact = torch.stack([constant(rank, 0, start) for rank in range(RANKS)]).mean(0)
    here = driver.ranks[0]
    if isinstance(algorithm, OuterAlgorithm):  # the mean over ranks: what they did alone since the last sum is exact
        moved = {length: torch.stack([rank.seen[length - 1] for rank in driver.ranks]).mean(0) for length in LENGTHS}
    elif len(here.applied) == steps:
        moved = {length: here.applied[length - 1].parameters for length in LENGTHS}
    else:  # an update a bucket
        each = len(here.applied) // steps
        moved = {length: here.applied[each * length - 1].parameters for length in LENGTHS}
    return [
        float(((start - parameters) / length - exact).square().mean().sqrt()) for length, parameters in moved.items()
    ]


def cases() -> list[Algorithm]:
    return [algorithm for collective in STOCHASTIC for algorithm in algorithms(collective)]


@pytest.mark.parametrize("algorithm", cases(), ids=name_of)
def test_the_error_of_the_mean_shrinks_with_the_square_root_of_the_updates(algorithm: Algorithm) -> None:
    found = errors(algorithm)
    slope = float(np.polyfit(np.log(LENGTHS), np.log(found), 1)[0])
    tolerance = TOLERANCE_OF_FRAGMENTS if isinstance(algorithm, StreamingDiLoCo) else TOLERANCE
    assert math.isclose(slope, SLOPE, abs_tol=tolerance), (
        f"noise: the error of the mean of {LENGTHS} updates of {algorithm} is {[round(error, 5) for error in found]} on rank 0, "
        f"which falls with the power {slope:.2f} of their number and not with -0.5: noise repeats, or its mean is not 0"
    )
