"""The sum of many workers' gradients on one replica, each added as it arrives: the memory of two, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from workbench.backward import Hooks, Micro
from workbench.gradients import USED, WEIGHT, Gradient
from workbench.replica import Replica

Minibatch = Sequence[Micro]


@final
class Summation:
    """Adds up gradients in order of rank, to the last bit as an all-reduce of the messages would.

    The first worker's is computed as on a real rank, with all that a `Replica` looks after, and so are all where that matters
    (several micro-batches, mixed precision, parameters of several types). The others' come straight from autograd.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        layout = replica.layout
        self._plain = replica.precision == "fp32" and all(slot.dtype == layout.dtype for slot in layout.slots)
        self._parameters: list[Any] = replica.parameters
        self._views: dict[int, list[Tensor]] = {}  # of the pool's buffers
        self._shares: list[float] = []  # of the gradients that came straight, since the last `end`
        self._used = [0] * len(self._parameters)  # of how many of them each parameter was part

    def begin(self, step: int, minibatch: Minibatch) -> tuple[Gradient, Tensor | None]:
        """The first worker's gradient and loss."""
        return self._replica.backward(step, minibatch, Hooks())

    def add(self, total: Gradient, minibatch: Minibatch) -> Tensor | None:
        """Add another worker's; answers its mean loss."""
        if not self._plain or len(minibatch) != 1:
            gradient, mean = self._replica.backward(total.step, minibatch, Hooks())
            total.flat.add_(gradient.flat)
            self._replica.discard(gradient)
            return mean
        loss = minibatch[0].loss()
        torch.autograd.backward(loss)
        views = self._views.get(id(total.flat))
        if views is None:
            views = self._views[id(total.flat)] = [slot.view(total.flat) for slot in total.layout.slots]
        mine, sums = [], []
        for position, param in enumerate(self._parameters):
            grad, param.grad = param.grad, None
            if grad is not None:
                mine.append(grad.to_dense() if grad.is_sparse else grad)
                sums.append(views[position])
                self._used[position] += 1
        torch._foreach_mul_(mine, minibatch[0].share)
        torch._foreach_add_(sums, mine)
        self._shares.append(minibatch[0].share)
        return loss.detach()

    def end(self, total: Gradient) -> None:
        """Write into the tails who has contributed."""
        for piece in total.layout.buckets:
            tail = total.tail(piece.index).numpy()
            tail[WEIGHT] = np.cumsum(np.array([tail[WEIGHT], *self._shares], tail.dtype))[-1]  # one after the other, as messages are summed
            tail[USED:] += [self._used[slot.index] for slot in piece.slots]
        self._shares.clear()
        self._used = [0] * len(self._parameters)
