"""Gradient tracking: each rank steps with a running estimate of the mean gradient of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from workbench.algorithms.gossip import Exchange, GossipAlgorithm, average
from workbench.gradients import USED, WEIGHT, Gradient, Layout
from workbench.ops import Apply, Backward, EndStep, PackParameters, Program, State, UnpackParameters
from workbench.program import Card, Context, Requirements
from workbench.topologies import Graph, Ring


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingState(State):
    """The state between two steps: this rank's tracker, and its last gradient. Both (n,)."""

    tracker: Tensor
    gradient: Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTracking(GossipAlgorithm):
    """w_i[t+1] = sum_j W_ij w_j[t] - lr * y_i[t],   y_i[t] = sum_j W_ij y_j[t-1] + g_i(w_i[t]) - g_i(w_i[t-1])

    It begins with y_i[0] = g_i(w_i[0]). The mean of the trackers y_i is the mean of the ranks' last gradients, at any
    step. With full gradients every rank so finds the minimum of the mean, also if the ranks' data differ; `DPSGD` with a
    constant rate stays at a distance. With minibatches, the difference is of two minibatches.

    A message has the parameters and the tracker, which the rank knows before its backward pass: the exchange runs
    during it. A gradient is the mean over a rank's minibatch; if the minibatch is empty, the last one counts again. So it
    does if a gradient is not finite: in fp16 the optimizer then skips its step, and otherwise the rank's parameters become
    NaN. The optimizer steps with y_i, for every parameter. The run ends with the mean of all ranks. Staleness 0.

    Paper: nedic2017achieving, Alg. 1 (DIGing), with minibatches.
    """

    topology: Graph = Ring()

    card: ClassVar[Card] = Card(
        paper="nedic2017achieving, Alg. 1",
        staleness="0",
        bytes_per_step="4 n",
        memory="5 parameter vectors, and 2 for each neighbour",
    )

    @property
    def requires(self) -> Requirements:
        return Requirements(state=TrackingState)

    def message_bytes(self, layout: Layout) -> int:
        """Return the bytes of one message: the parameters with their tail, and the tracker."""
        return layout.message_bytes + layout.parameter_numel * layout.itemsize

    def worker(self, ctx: Context) -> Program:
        exchange = Exchange(ctx, self.topology)
        state: TrackingState | None = ctx.resumed
        for step in ctx.steps():
            packed = yield PackParameters()
            if state is None:
                nothing = torch.zeros_like(packed.body())
                state = TrackingState(tracker=nothing, gradient=nothing)
            yield from exchange.send_packed(packed, step, state.tracker)
            gradient = yield Backward(step)
            messages = yield from exchange.receive_packed(packed, step)
            tracker = state.tracker.clone()
            length = packed.flat.numel()
            others = {source: message[length:] for source, message in messages.items()}
            yield from exchange.mix(others, tracker, step)
            yield UnpackParameters(packed)
            mean = _mean(gradient, state.gradient)
            tracker.add_(mean).sub_(state.gradient)
            state = TrackingState(tracker=tracker, gradient=mean)
            yield Apply(_replaced(gradient, tracker), local=True)
            yield EndStep(step, state=state)
        yield from average()


def _mean(gradient: Gradient, before: Tensor) -> Tensor:
    """The mean gradient of the minibatch, (n,); the one before if the minibatch is empty or a value is not finite."""
    weight, body = gradient.tail()[WEIGHT], gradient.body()
    return torch.where((weight > 0) & body.isfinite().all(), body / weight, before)


def _replaced(gradient: Gradient, values: Tensor) -> Gradient:
    """The gradient with other values, of all parameters and of weight 1; NaN if a value of the gradient is not finite."""
    body = gradient.body()
    body.copy_(torch.where(body.isfinite().all(), values, torch.nan))
    gradient.tail()[WEIGHT] = 1.0
    gradient.tail()[USED:] = 1.0
    return gradient
