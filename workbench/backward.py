"""The parts of a backward: micro-batches, what a runtime is told meanwhile, gradients as they arrive, loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, Slot


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
    need: Callable[[int], None] | None = None  # forward is about to use a bucket's parameters
    tick: Callable[[], object] | None = None  # a parameter's gradient has arrived: a moment to look after other things


@final
class Accumulation:
    """One step's gradients as they arrive: what has been written, what is final."""

    def __init__(self, gradient: Gradient, views: list[Tensor], hooks: Hooks, weight: float, control: int) -> None:
        self.gradient, self.views = gradient, views
        self.on_bucket, self.tick = hooks.bucket, hooks.tick
        self.weight = weight
        self.control = control
        self.share = 0.0
        self.written: set[int] = set()
        self.late: set[int] = set()  # buckets that arrived behind the forward pass, because no module asked for them
        self.next_bucket = 0
        self._last = False
        self._fired: set[int] = set()  # in this micro-batch
        self._missing = [piece.num_params for piece in gradient.layout.buckets]

    def begin(self, share: float, last: bool) -> None:
        self.share = share
        self._last = last
        self._fired.clear()

    def write(self, index: int, grad: Tensor, factor: float, slot: Slot) -> bool:
        """Take a parameter's gradient; whether that makes its bucket final."""
        if index in self._fired:
            raise ConfigError(
                f"the gradient of {slot.name} arrived twice in one backward: reentrant activation checkpointing does that. "
                "Pass use_reentrant=False to torch.utils.checkpoint"
            )
        if self.late and slot.bucket in self.late:
            raise ConfigError(
                f"{slot.name} is used by another module than the one that holds it: its update came behind the forward pass. "
                "Call its own module, or use a method that updates before the forward pass (LayerwiseSGD)"
            )
        self._fired.add(index)
        view = self.views[index]
        if index in self.written:
            view.add_(grad, alpha=factor)
        else:
            if grad.dtype == view.dtype and factor != 1.0:
                torch.mul(grad, factor, out=view)
            else:
                view.copy_(grad)
                if factor != 1.0:
                    view.mul_(factor)
            self.written.add(index)
        if self._last:
            self._missing[slot.bucket] -= 1
            return not self._missing[slot.bucket]
        return False

    def is_final(self, bucket: int) -> bool:
        return self._missing[bucket] == 0


@final
class Needs:
    """Tells, during a forward pass, which bucket's parameters it is about to use; each bucket once.

    Args:
        need: called with the bucket's number.
    """

    def __init__(self, need: Callable[[int], None], model: nn.Module, parameters: Sequence[Tensor], layout: Layout) -> None:
        self._need = need
        self._missing = {piece.index for piece in layout.buckets}
        bucket_of = {id(param): slot.bucket for param, slot in zip(parameters, layout.slots, strict=True)}
        self._holders = [
            (module, sorted({bucket_of[id(param)] for param in module.parameters(recurse=False) if id(param) in bucket_of}, reverse=True))
            for module in model.modules()
        ]
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for module, buckets in self._holders:
            if buckets:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, buckets)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, buckets: list[int], module: nn.Module, inputs: object) -> None:
        for bucket in buckets:
            if bucket in self._missing:
                self._missing.remove(bucket)
                self._need(bucket)

    def rest(self, *, expected: bool = False) -> set[int]:
        """Ask for the buckets that no module needed; returns which (none if that was expected)."""
        left, self._missing = self._missing, set()
        for bucket in sorted(left, reverse=True):
            self._need(bucket)
        return set() if expected else left


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
