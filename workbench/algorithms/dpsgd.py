"""D-PSGD: each rank averages its parameters with its neighbours', and takes a step with its own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.algorithms.gossip import Exchange, GossipAlgorithm, average
from workbench.arguments import check_flag
from workbench.ops import Apply, Backward, EndStep, PackParameters, Program, UnpackParameters
from workbench.program import Card, Context
from workbench.topologies import Graph, Ring


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DPSGD(GossipAlgorithm):
    """w_i[t+1] = sum_j W_ij w_j[t] - lr * g_i(w_i[t]),   with the weights W_ij of the topology's mixing matrix

    The exchange runs during the backward pass. With overlap=False it comes after the step:
    w_i[t+1] = sum_j W_ij (w_j[t] - lr * g_j(w_j[t])). On a complete graph that is `SynchronousSGD` up to rounding, for
    plain SGD and full batches. Both keep the mean over ranks as SGD moves it.

    Momentum stays with its rank. Every rank has the same weight, for any number of samples. Between steps replicas
    differ; mixing alone reduces their distance from the mean by the topology's spectral gap in each step. The run ends
    with the mean of all ranks. Staleness 0 (of a rank's own updates).

    Attributes:
        overlap: exchange parameters during the backward pass; otherwise after the step.

    Paper: lian2017decentralized, Alg. 1.
    """

    topology: Graph = Ring()
    overlap: bool = True

    card: ClassVar[Card] = Card(
        paper="lian2017decentralized, Alg. 1",
        staleness="0",
        bytes_per_step="2 n",
        memory="2 parameter vectors, and 1 for each neighbour",
    )

    def __post_init__(self) -> None:
        GossipAlgorithm.__post_init__(self)
        check_flag("overlap", self.overlap)

    def worker(self, ctx: Context) -> Program:
        exchange = Exchange(ctx, self.topology)
        for step in ctx.steps():
            if self.overlap:
                packed = yield PackParameters()
                yield from exchange.send_packed(packed, step)
                gradient = yield Backward(step)
                yield from exchange.receive_packed(packed, step)
                yield UnpackParameters(packed)
                yield Apply(gradient, local=True)
            else:
                yield Apply((yield Backward(step)), local=True)
                packed = yield PackParameters()
                yield from exchange.send_packed(packed, step)
                yield from exchange.receive_packed(packed, step)
                yield UnpackParameters(packed)
            yield EndStep(step)
        yield from average()
