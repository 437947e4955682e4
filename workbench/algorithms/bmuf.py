"""BMUF: block momentum over local SGD, which is DiLoCo with other names."""

from __future__ import annotations

import math

from workbench.algorithms.diloco import DiLoCo
from workbench.arguments import is_number
from workbench.collectives import Collective, Native
from workbench.errors import ConfigError


def BMUF(  # noqa: N802 - the paper's name of a class with other settings
    *,
    every: int = 12,
    block_lr: float = 1.0,
    block_momentum: float = 0.75,
    nesterov: bool = False,
    collective: Collective | None = None,
) -> DiLoCo:
    """After each block of H steps, with the mean w of the ranks' parameters, and a from which the ranks started:

        Delta <- eta Delta + zeta (w - a),   W <- W + Delta,   a <- W   or   a <- W + eta Delta,   w_i <- a

    The first choice of a is classical block momentum, the second is Nesterov's (`nesterov=True`). This is
    `DiLoCo(outer_lr=zeta, outer_momentum=eta)`, whose momentum m is -Delta / zeta and whose anchor is a. The paper's
    rule is eta = 1 - 1/p with zeta = 1, so the default is for four ranks.

    Args:
        every: H, number of local steps in a block.
        block_lr: zeta, step size of a block's update; 1, without momentum, moves to the mean of the replicas.
        block_momentum: eta, share of the last block's update that is added to the next one.

    Paper: chen2016scalable, section 2 (blockwise model-update filtering).

    >>> BMUF(nesterov=True)
    DiLoCo(every=12, outer_lr=1.0, outer_momentum=0.75, nesterov=True, collective=Native())
    """
    if not (is_number(block_lr) and 0 < block_lr < math.inf):
        raise ConfigError(f"block_lr={block_lr!r}: give a finite number above 0")
    if not (is_number(block_momentum) and 0 <= block_momentum < 1):
        raise ConfigError(f"block_momentum={block_momentum!r}: give a number from 0 to below 1")
    return DiLoCo(
        every=every,
        outer_lr=block_lr,
        outer_momentum=block_momentum,
        nesterov=nesterov,
        collective=Native() if collective is None else collective,
    )
