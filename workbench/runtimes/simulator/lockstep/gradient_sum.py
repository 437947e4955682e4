"""The sum of many workers' gradients on one replica.

Each is added as it arrives, so the memory is that of two gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from workbench.gradients import USED, WEIGHT, Gradient
from workbench.replica.backward import Hooks, MicroBatch
from workbench.replica.gradient_guard import GradientGuard
from workbench.replica.replica import Replica

Minibatch = Sequence[MicroBatch]


@final
class GradientSum:
    """Adds gradients in order of rank, bit-identical to an all-reduce of messages.

    The first worker's gradient is computed by a `Replica`, as on a real rank. Autograd adds the other workers'
    gradients to views of one buffer. With several micro-batches, mixed precision or parameters of several types, all
    gradients are computed by the `Replica`.
    """

    def __init__(self, replica: Replica, guard: GradientGuard | None = None) -> None:
        self._replica, self._guard = replica, guard
        layout = replica.layout
        self._plain = replica.precision == "fp32" and all(slot.dtype == layout.dtype for slot in layout.slots)
        self._parameters: list[Any] = replica.parameters
        self._flat = torch.zeros(layout.numel if self._plain else 0, dtype=layout.dtype)
        # `.data`: each view counts its own versions
        self._views = [slot.view(self._flat).data for slot in layout.slots] if self._plain else []
        self._versions = [view._version for view in self._views]
        self._shares: list[float] = []  # of the gradients that autograd added here, since the last `end`
        self._used = [0] * len(self._parameters)  # number of those gradients with each parameter

    def begin(self, step: int, minibatch: Minibatch) -> tuple[Gradient, float | None]:
        """Compute the first worker's gradient, and return its mean loss."""
        gradient, mean = self._replica.backward(step, minibatch, Hooks())
        for param, view in zip(self._parameters, self._views, strict=False):
            param.grad = view
        return gradient, None if mean is None else float(mean)

    def add(self, total: Gradient, make: Callable[[], Minibatch]) -> float | None:
        """Add another worker's gradient, and return its mean loss.

        `make` returns the worker's minibatch, and may be called twice.
        """
        minibatch, guard = make(), self._guard
        if not self._plain or len(minibatch) != 1:
            return self._add_as_real_rank(total, minibatch)
        loss, share = minibatch[0].loss(), minibatch[0].share
        torch.autograd.backward(loss)
        self._flat.mul_(share)
        good = guard is None or guard.is_plain(self._flat, float(loss.detach()), share)
        if good:
            total.flat.add_(self._flat)
            self._shares.append(share)
        self._flat.zero_()
        for position, view in enumerate(self._views):
            if view._version != self._versions[position]:
                self._versions[position] = view._version
                self._used[position] += good
        return float(loss.detach()) if good else self._add_as_real_rank(total, make())

    def _add_as_real_rank(self, total: Gradient, minibatch: Minibatch) -> float | None:
        """Add a gradient that is computed as on a real rank."""
        gradient, mean = self._replica.backward(total.step, minibatch, Hooks())
        total.flat.add_(gradient.flat)
        self._replica.discard(gradient)
        return None if mean is None else float(mean)

    def end(self, total: Gradient) -> None:
        """Write the contributors into the tails."""
        for param in self._parameters:
            param.grad = None
        for piece in total.layout.buckets:
            tail = total.tail(piece.index).numpy()
            # One after the other, as messages are summed.
            tail[WEIGHT] = np.cumsum(np.array([tail[WEIGHT], *self._shares], tail.dtype))[-1]
            tail[USED:] += [self._used[slot.index] for slot in piece.slots]
        self._shares.clear()
        self._used = [0] * len(self._parameters)
