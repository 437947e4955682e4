"""SPARTA: each rank takes its own steps, and in each step a small random part of the parameters is averaged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.outer_optimizer import average
from workbench.arguments import is_number
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import CONTROL, Gradient, Layout
from workbench.ops import AllReduce, Apply, Backward, EndStep, PackParameters, Program, UnpackParameters
from workbench.program import Card, Context, Elasticity, Replicas, Update
from workbench.rng import generator


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SPARTA(CollectiveAlgorithm):
    """w_i <- w_i - lr * g_i(w_i),   then w_i[c] <- mean_j w_j[c] for the coordinates c in a small random set

    A step averages k = f n of the n parameters. They are the next k of a random order, which all ranks draw from the
    same seed, so positions are not sent. A cycle of ceil(n / k) steps averages each parameter; then a new order is
    drawn. (The last step of a cycle takes the last k of the order.) With fraction=1 it is `LocalSGD(every=1)`.

    Momentum stays with its rank. Every rank has the same weight, for any number of samples. The run ends with the mean
    of all ranks. Staleness 0 (of a rank's own updates). Parameters are averaged without loss.

    Attributes:
        fraction: f, share of the parameters that a step averages.

    Paper: beton2025sparta (sparse parameter averaging).
    """

    fraction: float = 0.05  # f
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="beton2025sparta",
        staleness="0",
        bytes_per_step="2 (p-1)/p n / 20",
        memory="the parameters, while averaging; their order",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ConfigError(
                f"fraction={self.fraction!r}: give the share of the parameters that a step averages, above 0 and at most 1"
            )
        if self.collective.exact != self.collective:
            raise ConfigError(
                f"SPARTA averages parameters, and {self.collective} loses part of the sum: use {self.collective.exact}"
            )

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def replicas(self) -> Replicas:
        return Replicas.PARAMETERS if self.fraction == 1 else Replicas.AT_END

    @property
    def elasticity(self) -> Elasticity:
        """The remaining ranks continue from their mean."""
        return Elasticity.SHRINKS

    def num_averaged(self, numel: int) -> int:
        """Return k of `numel` parameters."""
        return max(1, round(self.fraction * numel))

    def chosen(self, seed: int, step: int, numel: int) -> Tensor:
        """Return the positions that a step averages, (k,) int64."""
        num = self.num_averaged(numel)
        cycle, turn = divmod(step, -(-numel // num))
        begin = min(turn * num, numel - num)
        return _order(seed, cycle, numel)[begin : begin + num]

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float:
        """Return the bytes of a sum of k parameters and the control value."""
        numel = self.num_averaged(layout.parameter_numel) + 1
        return float(self.collective.bytes_sent(rank, num_ranks, numel, layout.itemsize))

    def worker(self, ctx: Context) -> Program:
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            packed: Gradient = yield PackParameters()
            values, control = packed.body(), packed.tail()[CONTROL : CONTROL + 1]
            chosen = self.chosen(ctx.seed, step, values.numel()).to(values.device)
            total = yield AllReduce(torch.cat([values[chosen], control]), self.collective)
            values[chosen] = total[:-1] / ctx.num_workers
            control.copy_(total[-1:])
            yield UnpackParameters(packed)
            yield EndStep(step)
        if self.fraction < 1:
            yield from average(self.collective, -1)


@lru_cache(maxsize=1)
def _order(seed: int, cycle: int, numel: int) -> Tensor:
    return torch.from_numpy(generator(seed, "sparta", step=cycle).permutation(numel))
