"""The parts of a backward pass: micro-batches, hooks of the runtime, arriving gradients, loss scaling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, Slot

SMALL_BYTES = 8192  # a gradient up to this size is added to zeros in less time than a Python call


@final
@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch: how to compute its mean loss, and its share of the nominal global batch."""

    loss: Callable[[], Tensor]
    share: float
    num_samples: int


@final
@dataclass(slots=True)
class Hooks:
    """What a runtime does during a backward pass. The defaults do nothing."""

    phase: Callable[[str], None] = lambda name: None  # "forward" or "backward" begins, "" ends
    bucket: Callable[[Gradient], None] | None = None  # a bucket is final
    need: Callable[[int], None] | None = None  # the forward pass is about to read a bucket's parameters
    tick: Callable[[], object] | None = None  # a parameter's gradient has arrived: time to poll


class GradientGuard(Protocol):
    """Checks gradients before they are sent, and sums before they are applied: see `replica.gradient_guard`."""

    whole: bool  # no bucket may be sent before all are final

    def begin_step(self, step: int) -> None:
        """Prepare for a forward pass."""

    def check_loss(self, loss: Tensor) -> None:
        """Check a micro-batch's loss, before its backward."""

    def check_norm(self, gradient: Gradient, weight: float) -> None:
        """Check the norm; all gradients are final."""

    def check_bucket(self, gradient: Gradient, bucket: int) -> None:
        """Check a bucket before it is sent."""

    def reports_overflow(self) -> bool:
        """Return whether a rank's own gradient that is not finite is a bad one, so that the loss scale stays."""

    def restore_buffers(self) -> None:
        """End the backward pass; all buckets have been sent."""

    def accepts_sum(self, gradient: Gradient) -> bool:
        """Return whether a sum may be applied."""


@final
class InPlaceGradients:
    """Small parameters whose gradients autograd adds into the buffer itself, without a Python hook for each.

    Autograd adds to an existing `.grad`. Here `.grad` is a part of the buffer with its own version counter, which
    rises by one at every arrival. The counter shows which parameters were used, which arrived twice, and, whenever
    another gradient arrives, whether a bucket is final. Excluded are the first parameter of a bucket, which backward
    should reach last, and parameters whose gradients must be converted. If a user's hook may change a `.grad`, all
    are excluded: see `Accumulation.keeps`.
    """

    def __init__(self, parameters: Sequence[Tensor], layout: Layout) -> None:
        self.parameters = parameters
        self.buckets = [
            [
                slot.index
                for slot in piece.slots[:-1]
                if type(parameters[slot.index]) is nn.Parameter and _is_small(slot, layout)
            ]
            for piece in layout.buckets
        ]
        self._layout = layout
        self.runs = [list(_runs(layout, indices)) for indices in self.buckets]  # slices of the buffer

    @property
    def all(self) -> set[int]:
        """All parameters of this kind."""
        return set().union(*self.buckets)

    def exclude(self, indices: set[int]) -> set[int]:
        """Exclude these parameters from the next backward on; return those that were included."""
        removed: set[int] = set()
        for bucket, in_place in enumerate(self.buckets):
            if not indices.isdisjoint(in_place):
                removed.update(indices.intersection(in_place))
                self.buckets[bucket] = [index for index in in_place if index not in indices]
                self.runs[bucket] = list(_runs(self._layout, self.buckets[bucket]))
        return removed


def _is_small(slot: Slot, layout: Layout) -> bool:
    return slot.dtype == layout.dtype and slot.numel * layout.itemsize <= SMALL_BYTES


def _runs(layout: Layout, indices: Sequence[int]) -> Iterator[slice]:
    """Yield the slices of the buffer that these parameters, in its order, fill without gaps."""
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
    """The gradients of one step as they arrive: which are written, which are final.

    Args:
        views: each parameter's part of the gradient's buffer, with its own version counter.
        in_place: the small parameters without hooks.
        factor: factor on all gradients of this step.
        weight, control: values for the tails.

    Attributes:
        keeps: parameters keep their `.grad` until the backward pass ends, and micro-batches accumulate in it, as under
            DDP. It is so if a user registered a hook with `register_post_accumulate_grad_hook`: it may read and
            replace any parameter's `.grad`.
    """

    def __init__(
        self,
        gradient: Gradient,
        views: list[Tensor],
        in_place: InPlaceGradients,
        hooks: Hooks,
        factor: float,
        weight: float,
        control: int,
    ) -> None:
        self.gradient = gradient
        self.views = views
        self.on_bucket = hooks.bucket
        self.tick = hooks.tick
        self.weight = weight
        self.control = control
        self.factor = factor
        self.keeps = False
        self.written: set[int] = set()
        self.late: set[int] = set()  # buckets that arrived after the forward pass, because no call read them
        self.missed: set[int] = set()  # in-place parameters whose gradients came after all others of their buckets
        self.next_bucket = 0
        self._last = self._armed = False
        self._fired: set[int] = set()  # gradients of this micro-batch
        self._in_place = in_place
        self._kept: list[Tensor | None] = []  # `.grad` of all parameters after the last micro-batch
        self._versions: list[list[int]] = [[] for _ in in_place.buckets]  # version counters before backward
        self._before: list[int] = []  # version counters of the parameters before backward
        self._missing: list[int] = []

    def begin(self, last: bool) -> None:
        """Begin a micro-batch's forward pass."""
        self._last = last
        self._armed = False
        self._fired.clear()
        if self.keeps:
            self._kept = [param.grad for param in self._in_place.parameters]
            for param in self._in_place.parameters:
                param.grad = None

    def begin_backward(self) -> None:
        """Begin a backward pass: set `.grad` of the in-place parameters to their parts of the buffer."""
        self._armed = True
        views, parameters = self.views, self._in_place.parameters
        self._before = [param._version for param in parameters]
        self._missing = [
            piece.num_params - len(indices)
            for piece, indices in zip(self.gradient.layout.buckets, self._in_place.buckets, strict=True)
        ]
        for param, grad in zip(parameters, self._kept, strict=False):
            param.grad = grad
        for bucket, indices in enumerate(self._in_place.buckets):
            for run in self._in_place.runs[bucket]:
                self.gradient.flat[run].zero_()
            for index in indices:
                if parameters[index].grad is not None:
                    raise _too_early(self.gradient.layout.slots[index])
                parameters[index].grad = views[index]
            self._versions[bucket] = [views[index]._version for index in indices]

    def end_backward(self) -> None:
        """End a backward pass.

        Raises:
            ConfigError: a parameter changed in it, or a gradient came in another way than by this class.
        """
        in_place = self._in_place.all
        for slot, param, before in zip(
            self.gradient.layout.slots, self._in_place.parameters, self._before, strict=True
        ):
            if param._version != before:
                raise _stepped(slot)
            expected = self.views[slot.index] if slot.index in in_place else None
            if not self.keeps and param.grad is not expected:
                raise _replaced(slot)

    def write_gradient(self, index: int, grad: Tensor | None, slot: Slot) -> bool:
        """Take a parameter's gradient; return whether it was the last one of its bucket that has a hook."""
        if index in self._fired:
            raise _used_twice(slot)
        if not self._armed:
            raise _too_early(slot)
        if self.late and slot.bucket in self.late:
            raise ConfigError(
                f"{slot.name} was read before its update was applied, by code whose reads torch does not show: "
                "a scripted or compiled function outside the model, a C++ extension, or another thread. "
                "If torch.compile made the forward pass, compile the model itself. Or use an algorithm that updates "
                "before the forward pass (LayerwiseSGD)"
            )
        self._fired.add(index)
        if self._last or not self.keeps:
            self._write(index, grad)
        if self._last:
            self._missing[slot.bucket] -= 1
            return not self._missing[slot.bucket]
        return False

    def write_kept(self) -> None:
        """Write the gradients of parameters that only earlier micro-batches used."""
        if self.keeps:
            for index, param in enumerate(self._in_place.parameters):
                if index not in self.written and param.grad is not None:
                    self._write(index, param.grad)

    def _write(self, index: int, grad: Tensor | None) -> None:
        view, factor = self.views[index], self.factor
        if grad is None:  # a hook cleared it
            view.zero_()
        elif grad.is_sparse:
            grad = grad.to_dense()
        if grad is not None and index in self.written:
            view.add_(grad, alpha=factor)
        elif grad is not None and grad.dtype == view.dtype and factor != 1.0:
            torch.mul(grad, factor, out=view)
        elif grad is not None:
            view.copy_(grad)
            if factor != 1.0:
                view.mul_(factor)
        self.written.add(index)

    def is_final(self, bucket: int) -> bool:
        """Return whether all of a bucket's gradients have arrived."""
        if self._missing[bucket]:
            return False
        arrivals = self._arrivals(bucket)
        if all(arrivals):
            return True
        self.missed.update(
            index for index, times in zip(self._in_place.buckets[bucket], arrivals, strict=True) if not times
        )
        return False

    def count_in_place(self, bucket: int) -> None:
        """Mark the in-place gradients of a bucket as written, and scale them."""
        indices, arrivals = self._in_place.buckets[bucket], self.check_once(bucket)
        self.written.update(
            indices if all(arrivals) else [index for index, times in zip(indices, arrivals, strict=True) if times]
        )
        if self.factor != 1.0 and any(arrivals):
            for run in self._in_place.runs[bucket]:
                self.gradient.flat[run].mul_(self.factor)

    def check_once(self, bucket: int) -> list[int]:
        """Return how often each in-place gradient of a bucket has arrived; raise `ConfigError` if one came twice."""
        arrivals = self._arrivals(bucket)
        if max(arrivals, default=0) > 1:
            twice = self._in_place.buckets[bucket][arrivals.index(max(arrivals))]
            raise _used_twice(self.gradient.layout.slots[twice])
        return arrivals

    def _arrivals(self, bucket: int) -> list[int]:
        views, before = self.views, self._versions[bucket]
        if not self._armed:
            return [0] * len(self._in_place.buckets[bucket])
        return [
            views[index]._version - version
            for index, version in zip(self._in_place.buckets[bucket], before, strict=True)
        ]


def _used_twice(slot: Slot) -> ConfigError:
    return ConfigError(
        f"the gradient of {slot.name} arrived twice in one backward: reentrant activation checkpointing does that. "
        "Pass use_reentrant=False to torch.utils.checkpoint. So does a DistributedDataParallel that the step's "
        "function calls: "
        "call the model inside"
    )


def _stepped(slot: Slot) -> ConfigError:
    return ConfigError(
        f"{slot.name} changed during the backward pass: does a gradient hook step an optimizer? It would step with this "
        "rank's gradient alone, and replicas would differ. Remove the hook, and give the Trainer one optimizer of all "
        "parameters. LayerwiseSGD(apply='backward') updates bucket by bucket"
    )


def _replaced(slot: Slot) -> ConfigError:
    return ConfigError(
        f"{slot.name}.grad was set during the backward pass by other code than its own hooks, and would be ignored: "
        "change it in a hook of register_post_accumulate_grad_hook, made before the backward pass"
    )


def _too_early(slot: Slot) -> ConfigError:
    return ConfigError(
        f"{slot.name} got a gradient before the loss was known: return the sum of all losses, and leave backward() to "
        "the step"
    )


class ParameterUse(TorchFunctionMode):
    """Calls `need` before the forward pass reads a bucket's parameters, once for each bucket.

    Torch passes each call of its functions and tensor methods to this mode. A call reads a parameter if one of its
    arguments is in the parameter's memory: the parameter itself, a view of it, its `.data`. So it does not matter which
    module owns the parameter. A tensor whose memory torch does not show (sparse, or in `torch.vmap`) may be any
    parameter.

    Args:
        need: called with the bucket's number.
    """

    def __init__(self, need: Callable[[int], None], parameters: Sequence[Tensor], layout: Layout) -> None:
        super().__init__()
        self._need = need
        self._missing = {piece.index for piece in layout.buckets}
        self._buckets: dict[int, set[int]] = {}  # address of memory -> buckets of the parameters in it
        for param, slot in zip(parameters, layout.slots, strict=True):
            self._buckets.setdefault(param.untyped_storage().data_ptr(), set()).add(slot.bucket)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._missing:
            self._request_read((args, kwargs))
        return func(*args, **(kwargs or {}))

    def _request_read(self, arguments: object) -> None:
        """Request the buckets of the parameters that these arguments of a call share memory with."""
        for tensor in _tensors_in(arguments):
            try:
                buckets = self._buckets.get(tensor.untyped_storage().data_ptr(), set())
            except NotImplementedError:  # it shows no memory
                buckets = self._missing
            self._request(self._missing & buckets)

    def _request(self, buckets: set[int]) -> None:
        # The last bucket holds the first layers. The program must not run in the mode of the code that reads.
        for bucket in sorted(buckets, reverse=True):
            self._missing.remove(bucket)
            with torch.inference_mode(mode=False):
                self._need(bucket)

    def request_rest(self) -> set[int]:
        """Request the buckets that no call has read, and return them."""
        rest = set(self._missing)
        self._request(rest)
        return rest


@cache
def _untraced_use() -> type[ParameterUse]:
    """Return the class whose mode torch's compiler does not trace: a traced mode returns wrong results (torch 2.13)."""
    traced = ParameterUse.__torch_function__
    return type("UntracedParameterUse", (ParameterUse,), {"__torch_function__": torch.compiler.disable(traced)})


def parameter_use(need: Callable[[int], None], parameters: Sequence[Tensor], layout: Layout) -> ParameterUse:
    """Return a `ParameterUse` that is also right in compiled functions. Importing the compiler takes seconds."""
    kind = _untraced_use() if "torch._dynamo" in sys.modules else ParameterUse
    return kind(need, parameters, layout)


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a call's arguments, also those in lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))


def runs_without_python(model: nn.Module) -> bool:
    """Return whether the forward pass of this module, or of a part of it, is compiled or scripted."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or isinstance(module, torch.jit.ScriptModule)
        for module in model.modules()
    )


@final
class LossScale:
    """Dynamic loss scaling for fp16: halved if a gradient overflows (step skipped), doubled after 2,000 good steps."""

    growth_steps = 2000

    def __init__(self, value: float = 2.0**16) -> None:
        self.value = value
        self.good = 0

    def accept(self, *parts: Tensor) -> bool:
        """Return whether the gradient, in these parts, is finite.

        All ranks hold the same sum, so all make the same decision. If servers sum, each rank has its own scale.
        """
        if not all_finite(parts):
            self.value, self.good = self.value / 2, 0
            return False
        self.good += 1
        if self.good == self.growth_steps:
            self.value, self.good = self.value * 2, 0
        return True


def all_finite(parts: Iterable[Tensor]) -> bool:
    """Return whether all values of all parts are finite."""
    return all(bool(torch.isfinite(part).all()) for part in parts)
