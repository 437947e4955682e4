"""The parts of a backward: micro-batches, what a runtime is told meanwhile, gradients as they arrive, loss scaling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, Slot

SMALL_BYTES = 8192  # of a gradient: adding it to zeros, in place, takes less than a call of Python


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


class GradientGuard(Protocol):
    """Looks at gradients before they leave, and at the sums that are applied: `replica.gradient_guard`."""

    whole: bool  # no bucket may leave before all are final

    def begin(self, step: int) -> None:
        """A forward pass comes."""

    def hear(self, loss: Tensor) -> None:
        """A micro-batch's loss, before its backward."""

    def measure(self, gradient: Gradient, weight: float) -> None:
        """All parameters' gradients are final."""

    def look(self, gradient: Gradient, bucket: int) -> None:
        """A bucket is about to leave."""

    def end(self) -> None:
        """All buckets have left."""

    def accepts(self, gradient: Gradient) -> bool:
        """Whether a sum may be applied."""


@final
class InPlaceGradients:
    """Small parameters whose gradients autograd itself adds into the buffer: no Python is called for each.

    Autograd adds to the `.grad` that it finds. Here that is a part of the buffer with a version of its own, which rises by one at
    every arrival: so it shows what was used, what came twice, and, whenever another gradient arrives, whether a bucket is final.
    A bucket's first parameter, which backward should reach last, is never quiet, nor is one whose gradient has to be converted.
    """

    def __init__(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        self.parameters = parameters
        self.buckets = [
            [slot.index for slot in piece.slots[:-1] if type(parameters[slot.index]) is nn.Parameter and _is_small(slot, layout)]
            for piece in layout.buckets
        ]
        self._layout = layout
        self.runs = [list(_runs(layout, indices)) for indices in self.buckets]  # of the buffer

    @property
    def all(self) -> set[int]:
        """Every quiet parameter."""
        return set().union(*self.buckets)

    def wake(self, indices: set[int]) -> set[int]:
        """From the next backward on these are not quiet; returns which were."""
        woken: set[int] = set()
        for bucket, quiet in enumerate(self.buckets):
            if not indices.isdisjoint(quiet):
                woken.update(indices.intersection(quiet))
                self.buckets[bucket] = [index for index in quiet if index not in indices]
                self.runs[bucket] = list(_runs(self._layout, self.buckets[bucket]))
        return woken


def _is_small(slot: Slot, layout: Layout) -> bool:
    return slot.dtype == layout.dtype and slot.numel * layout.itemsize <= SMALL_BYTES


def _runs(layout: Layout, indices: Sequence[int]) -> Iterator[slice]:
    """Parts of the buffer that these parameters, in its order, fill without a gap."""
    start = stop = 0
    for index in indices:
        slot = layout.slots[index]
        if slot.offset != stop:
            if stop > start:
                yield slice(start, stop)
            start = slot.offset
        stop = slot.offset + slot.numel
    if stop > start:
        yield slice(start, stop)


@final
class Accumulation:
    """One step's gradients as they arrive: what has been written, what is final.

    Args:
        views: each parameter's part of the gradient's buffer, with a version of its own.
        quiet: the small parameters, of which there is no call.
        weight, control: what the tails say.
    """

    def __init__(self, gradient: Gradient, views: list[Tensor], quiet: InPlaceGradients, hooks: Hooks, weight: float, control: int) -> None:
        self.gradient, self.views = gradient, views
        self.on_bucket, self.tick = hooks.bucket, hooks.tick
        self.weight = weight
        self.control = control
        self.factor = 0.0
        self.written: set[int] = set()
        self.late: set[int] = set()  # buckets that arrived behind the forward pass, because no module asked for them
        self.tardy: set[int] = set()  # quiet parameters whose gradients were not there when all others of their buckets were
        self.next_bucket = 0
        self._last = self._armed = False
        self._fired: set[int] = set()  # in this micro-batch
        self._quiet = quiet
        self._versions: list[list[int]] = [[] for _ in quiet.buckets]  # before backward
        self._missing = [piece.num_params - len(indices) for piece, indices in zip(gradient.layout.buckets, quiet.buckets, strict=True)]

    def begin(self, factor: float, last: bool) -> None:
        """A micro-batch's forward pass comes; its gradients will be multiplied by `factor`."""
        self.factor = factor
        self._last, self._armed = last, False
        self._fired.clear()

    def arm(self) -> None:
        """A backward comes: let autograd find the quiet parameters' parts of the buffer."""
        self._armed = True
        views, parameters = self.views, self._quiet.parameters
        for bucket, indices in enumerate(self._quiet.buckets):
            for run in self._quiet.runs[bucket]:
                self.gradient.flat[run].zero_()
            for index in indices:
                if parameters[index].grad is not None:
                    raise _too_early(self.gradient.layout.slots[index])
                parameters[index].grad = views[index]
            self._versions[bucket] = [views[index]._version for index in indices]

    def write(self, index: int, grad: Tensor, slot: Slot) -> bool:
        """Take a parameter's gradient; whether its bucket lacks none that is taken so."""
        if index in self._fired:
            raise _twice(slot)
        if not self._armed:
            raise _too_early(slot)
        if self.late and slot.bucket in self.late:
            raise ConfigError(
                f"{slot.name} was used before its update was applied, since the module that holds it ran no hook in the forward pass. "
                "Where torch.compile made the forward pass, give the Trainer what it made: Trainer(torch.compile(model), ...), or call "
                "model.compile(). Where another module uses the parameter, call its own module. Or use an algorithm that updates before "
                "the forward pass (LayerwiseSGD)"
            )
        self._fired.add(index)
        view, factor = self.views[index], self.factor
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
        """Whether all of a bucket's gradients are there."""
        if self._missing[bucket]:
            return False
        arrivals = self._arrivals(bucket)
        if all(arrivals):
            return True
        self.tardy.update(index for index, times in zip(self._quiet.buckets[bucket], arrivals, strict=True) if not times)
        return False

    def settle(self, bucket: int) -> None:
        """Count the quiet gradients of a bucket as written, and scale them."""
        indices, arrivals = self._quiet.buckets[bucket], self.check_once(bucket)
        self.written.update(indices if all(arrivals) else [index for index, times in zip(indices, arrivals, strict=True) if times])
        if self.factor != 1.0 and any(arrivals):
            for run in self._quiet.runs[bucket]:
                self.gradient.flat[run].mul_(self.factor)

    def check_once(self, bucket: int) -> list[int]:
        """How often each quiet gradient of a bucket has arrived; raises `ConfigError` if one came twice."""
        arrivals = self._arrivals(bucket)
        if max(arrivals, default=0) > 1:
            twice = self._quiet.buckets[bucket][arrivals.index(max(arrivals))]
            raise _twice(self.gradient.layout.slots[twice])
        return arrivals

    def _arrivals(self, bucket: int) -> list[int]:
        views, before = self.views, self._versions[bucket]
        if not self._armed:
            return [0] * len(self._quiet.buckets[bucket])
        return [views[index]._version - version for index, version in zip(self._quiet.buckets[bucket], before, strict=True)]


def _twice(slot: Slot) -> ConfigError:
    return ConfigError(
        f"the gradient of {slot.name} arrived twice in one backward: reentrant activation checkpointing does that. "
        "Pass use_reentrant=False to torch.utils.checkpoint. So does a DistributedDataParallel that the step's function calls: "
        "call the model inside"
    )


def _too_early(slot: Slot) -> ConfigError:
    return ConfigError(
        f"{slot.name} got a gradient before the loss was known: return the sum of all losses, and leave backward() to the step"
    )


@final
class ParameterUse:
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
                self._handles.append(module.register_forward_pre_hook(_uncompiled(partial(self._before, buckets))))
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


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has made this module's forward pass, or that of a part of it: such a module may run no hooks."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule" for module in model.modules()
    )


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch's compiler calls and does not look into. Nobody compiles where it was never imported."""
    if "torch._dynamo" not in sys.modules:
        return hook
    return torch.compiler.disable(hook)  # type: ignore[no-any-return]  # it has no types


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
