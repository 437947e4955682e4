"""Stochastic gradient push: gossip on directed graphs, in which a rank need not hear from those that hear from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from workbench.algorithms.gossip import Exchange, GossipAlgorithm
from workbench.gradients import CONTROL, WEIGHT, Gradient
from workbench.ops import AllReduce, Apply, Backward, EndStep, PackParameters, Program, State, UnpackParameters
from workbench.program import Card, Context, Requirements
from workbench.topologies import Graph, OnePeerExponential


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PushState(State):
    """The state between two steps: this rank's push-sum weight, ()."""

    weight: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StochasticGradientPush(GossipAlgorithm):
    """x_i[t+1] = sum_j P_ij (x_j[t] - lr * g_j(z_j[t])),   u_i[t+1] = sum_j P_ij u_j[t],   z_i = x_i / u_i

    SGP, by push-sum. The columns of P sum to 1, so the sum of x_i is kept. The rows need not, and the push-sum weight
    u_i corrects for them; it begins at 1, and all of them sum to p. A rank's replica is z_i. So any directed graph will
    do in which every rank can be reached. On a graph in which every rank receives from as many ranks as it sends to, all
    u_i stay 1, and it is `DPSGD(overlap=False)`.

    The weight is the one in the tail of packed parameters, so it travels with them. Momentum stays with its rank. The
    run ends with sum_i x_i / p. Evaluations before that take the mean of z_i. Staleness 0.

    Paper: assran2019stochastic, Alg. 1.
    """

    topology: Graph = OnePeerExponential()

    card: ClassVar[Card] = Card(
        paper="assran2019stochastic, Alg. 1",
        staleness="0",
        bytes_per_step="n",
        memory="2 parameter vectors, and 1 for each rank that sends to it",
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(state=PushState)

    def check(self, num_ranks: int) -> None:
        """Raise `ConfigError` unless the graph exists and reaches all ranks."""
        self.topology.num_hops(num_ranks)
        self.topology.mixing(num_ranks)

    def worker(self, ctx: Context) -> Program:
        exchange = Exchange(ctx, self.topology)
        weight: Tensor | None = None if ctx.resumed is None else ctx.resumed.weight
        for step in ctx.steps():
            gradient = yield Backward(step)
            yield Apply(gradient, local=True, lr_scale=_inverse(weight))  # x - lr g is u (z - lr g / u)
            packed = _weighted((yield PackParameters()), weight)
            yield from exchange.send_packed(packed, step)
            yield from exchange.receive_packed(packed, step)
            weight = packed.tail()[WEIGHT].clone()
            yield UnpackParameters(packed)  # divides by the weight
            yield EndStep(step, state=PushState(weight=weight))
        packed = _weighted((yield PackParameters()), weight)
        yield UnpackParameters((yield AllReduce(packed)))


def _inverse(weight: Tensor | None) -> float:
    return 1.0 if weight is None or weight.is_meta else 1.0 / float(weight)


def _weighted(packed: Gradient, weight: Tensor | None) -> Gradient:
    """x_i of z_i, with the weight u_i in its tail."""
    if weight is not None:
        control = packed.tail()[CONTROL].clone()
        packed.flat.mul_(weight)
        packed.tail()[CONTROL] = control
    return packed
