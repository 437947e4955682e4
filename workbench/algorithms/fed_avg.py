"""FedAvg and FedProx: in each round some ranks take local steps, and their parameters are averaged by samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.arguments import check_whole, is_number
from workbench.collectives import Collective, Native, check_collective
from workbench.collectives.algorithm import CollectiveAlgorithm
from workbench.errors import ConfigError
from workbench.gradients import WEIGHT, Gradient, Layout
from workbench.ops import (
    AllReduce,
    Apply,
    Backward,
    EndStep,
    PackParameters,
    Program,
    State,
    UnpackParameters,
)
from workbench.program import Buckets, Card, Context, Elasticity, Replicas, Requirements, Update
from workbench.rng import generator


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgState(State):
    """The state between two steps of a round."""

    anchor: Tensor
    num_samples: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg(CollectiveAlgorithm):
    """In a round of H steps, a set S of ranks takes local steps from the common parameters a, and the others none:

        w_i[t+1] = w_i[t] - lr * (g_i(w_i[t]) + mu (w_i[t] - a)),   a <- sum_{i in S} n_i w_i / sum_{i in S} n_i

    A rank is a client. S has max(1, round(C p)) of the p ranks, drawn by (seed, round), the same on all ranks. n_i is
    the number of samples that rank i has used in the round. mu is FedProx's: it keeps clients near a. For E local
    epochs, set `every` to E times the steps of an epoch. With fraction=1, proximal=0 and equal shares it is `LocalSGD`.
    Staleness 0 (of a rank's own updates).

    All ranks take part in the sum, those outside S with zeros, so the bytes are those of `LocalSGD`. Ranks outside S
    compute a gradient and discard it: each step uses one minibatch on every rank, and advances every rank's learning-rate
    schedule, so that all ranks of a round have the same learning rate. The data are split at random, as for
    every algorithm here. The run's last step ends its round.

    Attributes:
        every: H, number of local steps in a round.
        fraction: C, share of the ranks that train in a round.
        proximal: mu, pull towards the parameters at the beginning of the round (FedProx); 0: none.

    Paper: mcmahan2017communication, Alg. 1; li2018federated, Alg. 2 (FedProx).
    """

    every: int = 8  # H
    fraction: float = 0.5  # C
    proximal: float = 0.0  # mu
    collective: Collective = Native()

    card: ClassVar[Card] = Card(
        paper="mcmahan2017communication, Alg. 1; li2018federated, Alg. 2",
        staleness="0",
        bytes_per_step="2 (p-1)/p n / H",
        memory="2 parameter vectors",
        roles="p workers; C p of them in a round",
    )

    def __post_init__(self) -> None:
        check_collective(self.collective)
        check_whole("every", self.every, 1, "the number of steps of a round, 1 or more")
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise ConfigError(
                f"fraction={self.fraction!r}: give the share of the ranks in a round, above 0 and at most 1"
            )
        if not (is_number(self.proximal) and 0 <= self.proximal < math.inf):
            raise ConfigError(f"proximal={self.proximal!r}: give a finite number of 0 or more")
        if self.collective.exact != self.collective:
            raise ConfigError(
                f"FedAvg averages parameters, and {self.collective} loses part of the sum: use {self.collective.exact}"
            )

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=1), state=FedAvgState, link=self.collective.needs_link)

    @property
    def update(self) -> Update:
        return Update.OWN

    @property
    def replicas(self) -> Replicas:
        return Replicas.PARAMETERS if self.every == 1 else Replicas.AT_END

    @property
    def elasticity(self) -> Elasticity:
        """The remaining ranks continue from their mean, as after a round."""
        return Elasticity.SHRINKS

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: most steps send nothing."""

    def chosen(self, seed: int, number: int, num_ranks: int) -> frozenset[int]:
        """Return S, the ranks of a round."""
        size = max(1, round(self.fraction * num_ranks))
        drawn = generator(seed, "clients", step=number).choice(num_ranks, size, replace=False)
        return frozenset(drawn.tolist())

    def worker(self, ctx: Context) -> Program:
        resumed: FedAvgState | None = ctx.resumed
        packed: Gradient = yield PackParameters()
        anchor = packed.body().clone() if resumed is None else resumed.anchor.clone()
        num_samples = packed.tail()[WEIGHT] * 0 if resumed is None else resumed.num_samples.clone()
        num_done = ctx.first_step
        for step in ctx.steps():
            takes_part = ctx.rank in self.chosen(ctx.seed, step // self.every, ctx.num_workers)
            gradient = yield Backward(step)
            if takes_part:
                weight = gradient.tail()[WEIGHT].clone()
                num_samples += weight
                if self.proximal:
                    packed = yield PackParameters()
                    gradient.body().add_((packed.body() - anchor) * (self.proximal * weight))
            else:
                gradient.flat.zero_()  # no parameter is used: nothing moves, and the learning rate's schedule advances
            yield Apply(gradient, local=True)
            num_done = step + 1
            if num_done % self.every == 0:
                yield from self._average(anchor, num_samples)
            yield EndStep(step, state=FedAvgState(anchor=anchor, num_samples=num_samples))
        if num_done % self.every:
            yield from self._average(anchor, num_samples)

    def _average(self, anchor: Tensor, num_samples: Tensor) -> Program:
        """End a round: the mean weighted by samples becomes the anchor, unless no rank of the round had any."""
        packed: Gradient = yield PackParameters()
        packed.body().mul_(num_samples)
        packed.tail()[WEIGHT] = num_samples
        total: Gradient = yield AllReduce(packed, self.collective)
        weight = total.tail()[WEIGHT].clone()
        total.body().copy_(torch.where(weight > 0, total.body() / weight, anchor))
        total.tail()[WEIGHT] = 1.0
        yield UnpackParameters(total)
        anchor.copy_(total.body())
        num_samples.zero_()


def FedProx(  # noqa: N802 - the paper's name of a class with another setting
    *, every: int = 8, fraction: float = 0.5, proximal: float = 0.01, collective: Collective | None = None
) -> FedAvg:
    """w_i[t+1] = w_i[t] - lr * (g_i(w_i[t]) + mu (w_i[t] - a)) between two averages: `FedAvg` with a proximal term

    Each client's loss has the term mu / 2 |w_i - a|**2, with the parameters a from which the round began.

    Paper: li2018federated, Alg. 2.

    >>> FedProx(proximal=0.1)
    FedAvg(every=8, fraction=0.5, proximal=0.1, collective=Native())
    """
    return FedAvg(
        every=every, fraction=fraction, proximal=proximal, collective=Native() if collective is None else collective
    )
