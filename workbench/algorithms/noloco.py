"""NoLoCo: local steps, and an outer optimizer on each rank that exchanges with one other rank, drawn at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.gossip import Exchange, GossipAlgorithm, average
from workbench.arguments import check_whole, is_number
from workbench.collectives.memory import OWN
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import Apply, Backward, EndStep, PackParameters, Program, State, UnpackParameters
from workbench.program import Card, Context, Requirements
from workbench.topologies import Graph, RandomPairs


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoLoCoState(State):
    """The state between two outer steps: a_i, (n,)."""

    anchor: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NoLoCo(GossipAlgorithm):
    """Every rank i steps alone. Every H steps, with its own anchor a_i and momentum m_i, and the topology's weights W:

        m_i <- mu m_i + outer_lr sum_j W_ij (w_j - a_j) - consensus_lr (a_i - sum_j W_ij a_j),
        a_i <- a_i + m_i,   w_i <- a_i

    By default the ranks are drawn into pairs, so W_ij = 1/2 for rank i and its partner. The last term of the momentum
    is what the paper adds to DiLoCo's: it draws the anchors together. On a complete graph all anchors are equal, and it
    is `SlowMo`. With outer_lr=1, outer_momentum=0 and consensus_lr=1 it is `DPSGD(overlap=False)` with H steps between
    exchanges.

    A message is outer_lr (w_j - a_j) + consensus_lr a_j: one vector, where the paper sends two. The anchors begin at
    the parameters that all ranks share. The run ends with the mean of all ranks. Staleness 0 (of a rank's own updates).

    Attributes:
        every: H, number of local steps between two exchanges.
        outer_lr: the paper's beta, weight of the mean change of the exchanging ranks.
        outer_momentum: mu, the paper's alpha, share of the last outer step that is added to the next one.
        consensus_lr: the paper's gamma, pull of the exchanging ranks' anchors towards each other; 0: none.

    Paper: kolehmainen2025noloco, section 3.
    """

    topology: Graph = RandomPairs()
    every: int = 30  # H
    outer_lr: float = 0.7
    outer_momentum: float = 0.5  # mu
    consensus_lr: float = 0.7

    card: ClassVar[Card] = Card(
        paper="kolehmainen2025noloco, section 3",
        staleness="0",
        bytes_per_step="n / H",
        memory="2 parameter vectors, and 3 during an exchange",
    )

    def __post_init__(self) -> None:
        GossipAlgorithm.__post_init__(self)
        check_whole("every", self.every, 1, "the number of steps between exchanges, 1 or more")
        for name in ("outer_lr", "consensus_lr"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"{name}={value!r}: give a finite number above 0")
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise ConfigError(f"outer_momentum={self.outer_momentum!r}: give a number from 0 to below 1")

    @property
    def period(self) -> int:
        return self.every

    @property
    def requires(self) -> Requirements:
        return Requirements(state=NoLoCoState)

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> None:
        """Return None: most steps send nothing."""

    def worker(self, ctx: Context) -> Program:
        exchange = Exchange(ctx, self.topology)
        resumed: NoLoCoState | None = ctx.resumed
        if resumed is not None:  # another run may read the same state
            anchor = resumed.anchor.clone()
        else:
            anchor = (yield PackParameters()).body().clone()
        momentum = ctx.memory.setdefault(f"{OWN}outer.momentum", torch.zeros_like(anchor))
        for step in ctx.steps():
            yield Apply((yield Backward(step)), local=True)
            if (step + 1) % self.every == 0:
                turn = step // self.every
                packed: Gradient = yield PackParameters()
                values = packed.body()
                values.sub_(anchor).mul_(self.outer_lr).add_(anchor, alpha=self.consensus_lr)
                yield from exchange.send_packed(packed, turn)
                yield from exchange.receive_packed(packed, turn)
                momentum.mul_(self.outer_momentum).add_(values).sub_(anchor, alpha=self.consensus_lr)
                anchor.add_(momentum)
                values.copy_(anchor)
                yield UnpackParameters(packed)
            yield EndStep(step, state=NoLoCoState(anchor=anchor))
        yield from average()
