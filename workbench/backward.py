"""The parts of a backward: micro-batches, what a runtime is told meanwhile, gradients as they arrive, loss scaling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.gradients import Gradient, Slot


@final
@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-batch: how to compute its mean loss, and its share of the nominal global batch."""

    loss: Callable[[], Tensor]
    share: float
    num_samples: int


@final
@dataclass(slots=True)
class Hooks:
    """What a runtime wants to be told during a backward; the defaults want nothing."""

    phase: Callable[[str], None] = lambda name: None  # "forward" or "backward" begins, "" ends
    bucket: Callable[[Gradient], None] | None = None  # a bucket is final


@final
class Accumulation:
    """One step's gradients as they arrive: what has been written, what is final."""

    def __init__(self, gradient: Gradient, on_bucket: Callable[[Gradient], None] | None, weight: float, control: int) -> None:
        self.gradient = gradient
        self.on_bucket = on_bucket
        self.weight = weight
        self.control = control
        self.share = 0.0
        self.written: set[int] = set()
        self.next_bucket = 0
        self._last = False
        self._fired: set[int] = set()  # in this micro-batch
        self._missing = [piece.num_params for piece in gradient.layout.buckets]

    def begin(self, share: float, last: bool) -> None:
        self.share = share
        self._last = last
        self._fired.clear()

    def write(self, view: Tensor, grad: Tensor, factor: float, slot: Slot) -> None:
        if slot.index in self._fired:
            raise ConfigError(
                f"the gradient of {slot.name} arrived twice in one backward: reentrant activation checkpointing does that. "
                "Pass use_reentrant=False to torch.utils.checkpoint"
            )
        self._fired.add(slot.index)
        if slot.index in self.written:
            view.add_(grad, alpha=factor)
        else:
            if grad.dtype == view.dtype and factor != 1.0:
                torch.mul(grad, factor, out=view)
            else:
                view.copy_(grad)
                if factor != 1.0:
                    view.mul_(factor)
            self.written.add(slot.index)
        if self._last:
            self._missing[slot.bucket] -= 1

    def is_final(self, bucket: int) -> bool:
        return self._missing[bucket] == 0


@final
class LossScale:
    """Dynamic loss scaling for fp16: halved when a gradient overflows (the step is skipped), doubled after 2,000 good ones."""

    growth_steps = 2000

    def __init__(self, value: float = 2.0**16) -> None:
        self.value = value
        self.good = 0

    def accept(self, flat: Tensor) -> bool:
        """Whether the summed gradient is finite. All ranks hold the same sum, so all decide alike."""
        if not bool(torch.isfinite(flat).all()):
            self.value, self.good = self.value / 2, 0
            return False
        self.good += 1
        if self.good == self.growth_steps:
            self.value, self.good = self.value * 2, 0
        return True
