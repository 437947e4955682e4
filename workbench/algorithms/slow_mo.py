"""SlowMo: a slow momentum over local SGD, which is DiLoCo without Nesterov's momentum."""

from __future__ import annotations

import math

from workbench.algorithms.diloco import DiLoCo
from workbench.arguments import is_number
from workbench.collectives import Collective, Native
from workbench.errors import ConfigError


def SlowMo(  # noqa: N802 - the paper's name of a class with other settings
    *, every: int = 12, slow_lr: float = 1.0, slow_momentum: float = 0.7, collective: Collective | None = None
) -> DiLoCo:
    """Every H steps, with the mean w of the ranks' parameters and their last common parameters a:

        u <- beta u + (a - w) / lr,   a <- a - alpha lr u,   w_i <- a

    With a constant learning rate this is `DiLoCo(outer_lr=alpha, outer_momentum=beta, nesterov=False)`, whose momentum
    m is lr u. If a schedule changes the learning rate, m stays as it is, where the paper's lr u changes with it.
    The local optimizer is any of torch's. Its own momentum stays with its rank.

    Args:
        every: H, the paper's tau, number of local steps between two slow steps.
        slow_lr: alpha, step size of the slow update; 1, without momentum, moves to the mean of the replicas.
        slow_momentum: beta, share of the last slow update that is added to the next one.

    Paper: wang2019slowmo, Alg. 1.

    >>> SlowMo(slow_momentum=0.5)
    DiLoCo(every=12, outer_lr=1.0, outer_momentum=0.5, nesterov=False, collective=Native())
    """
    if not (is_number(slow_lr) and 0 < slow_lr < math.inf):
        raise ConfigError(f"slow_lr={slow_lr!r}: give a finite number above 0")
    if not (is_number(slow_momentum) and 0 <= slow_momentum < 1):
        raise ConfigError(f"slow_momentum={slow_momentum!r}: give a number from 0 to below 1")
    return DiLoCo(
        every=every,
        outer_lr=slow_lr,
        outer_momentum=slow_momentum,
        nesterov=False,
        collective=Native() if collective is None else collective,
    )
