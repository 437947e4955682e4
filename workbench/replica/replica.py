"""One rank's model and optimizer: computes gradients into flat buffers and takes steps with them.

It has no ranks, time or communication. Every runtime uses it, and so does a user-written loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from workbench.errors import ConfigError
from workbench.gradients import CONTROL, USED, WEIGHT, BucketSlice, BufferPool, Gradient, build_layout, trainable
from workbench.replica.backward import (
    Accumulation,
    GradientGuard,
    Hooks,
    InPlaceGradients,
    LossScale,
    MicroBatch,
    all_finite,
    parameter_use,
    runs_without_python,
)
from workbench.replica.module_state import ModuleState
from workbench.replica.optimizer_step import (
    OptimizerWrapper,
    TrainedParameters,
    check_not_wrapped,
    check_optimizer,
    check_per_parameter,
)
from workbench.replica.packing import Average, pack, unpack
from workbench.replica.served_optimizer import SentSettings, copy_optimizer
from workbench.replica.server_copy import ServerCopy
from workbench.settings import ScheduleFactory
from workbench.streams import streams_of


@contextmanager
def compute_threads(num_threads: int) -> Iterator[None]:
    """Use this number of threads within the block, and restore the former number after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Set every module to evaluation mode within the block, then restore each module's mode.

    Frozen parts stay frozen.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model
    finally:
        for module, mode in modes:
            module.training = mode


@final
class Replica:
    """A module, its optimizer and its gradient buffers.

    Args:
        model: any `nn.Module`; its trainable parameters are laid out in buckets of `bucket_bytes`.
        optimizer: any `torch.optim` optimizer of (some of) its parameters that needs no closure.
        bucket_bytes, num_buckets: see `gradients.build_layout`.
        schedule: made for the optimizer; it advances after each update.
        clip_norm: global norm to clip the mean gradient to; needs whole gradients.
        precision: "fp32", "bf16" or "fp16" (automatic mixed precision).
        applies_buckets: whether single buckets will be applied.
        served: servers update with copies of the optimizer. Each gradient then brings the optimizer's settings.

    Raises:
        ConfigError: a combination that cannot work; the message says what to use instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: float | None = None,
        schedule: ScheduleFactory | None = None,
        clip_norm: float | None = None,
        precision: str = "fp32",
        applies_buckets: bool = False,
        num_buckets: int | None = None,
        served: bool = False,
    ) -> None:
        check_not_wrapped(model)
        self.module_state = ModuleState(model)
        named = trainable(model)
        self.model = model
        self.settings = SentSettings(optimizer) if served else None
        self.layout = build_layout(named, bucket_bytes, num_buckets, self.settings.num if self.settings else 0)
        self.pool = BufferPool(self.layout)
        self.streams = streams_of(self.layout.device)
        self.optimizer_wrapper = OptimizerWrapper(
            optimizer, [param for _, param in named], self.layout, schedule=schedule, clip_norm=clip_norm
        )
        self.precision = precision
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.leaves_out_overflow = served and precision == "fp16"  # no rank checks a sum: each checks its own gradient
        self.updates = [0] * len(self.layout.buckets)  # number of updates of each bucket
        self.control_out = 0  # rank 0's control value, sent with every gradient
        self.control_seen = 0
        self.average: Average | None = None  # see `keep_average`
        self.make_server_copy: Callable[[], ServerCopy] | None = None  # set if the algorithm may ask for a server copy
        self._server_copy: ServerCopy | None = None
        self.guard: GradientGuard | None = None  # set if gradients are checked
        # step -> sum of all ranks' weights, if it is known in advance
        self.total_weight: Callable[[int], float] | None = None
        self.compiled = False  # torch.compile made the forward pass
        self._parameters = [param for _, param in named]
        self._views: dict[int, list[Tensor]] = {}
        self._applied: dict[int, int] = {}  # buffer in use -> number of its buckets that were applied
        self._members = [frozenset(slot.index for slot in piece.slots) for piece in self.layout.buckets]
        self._tails: dict[int, tuple[tuple[Any, ...], Tensor]] = {}
        self._running: Accumulation | None = None
        self._trained = TrainedParameters(model, optimizer, self._parameters)
        check_optimizer(optimizer, clip_norm, precision, applies_buckets)
        if (applies_buckets or served) and len(self.layout.buckets) > 1:
            check_per_parameter(optimizer)
        if self.settings is not None:
            copy_optimizer(optimizer, self._parameters, self._parameters)  # its errors, on all ranks
            self.make_server_copy = self._copy_for_server
        self._in_place = InPlaceGradients(self._parameters, self.layout)
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Node] = []
        self._watch(set(range(len(named))) - self._in_place.all)

    def close(self) -> None:
        """Remove the hooks from the module."""
        self._in_place.exclude(self._in_place.all)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    # -- gradients ---------------------------------------------------------------------------------------------

    def backward(self, step: int, micro_batches: Sequence[MicroBatch], hooks: Hooks) -> tuple[Gradient, Tensor | None]:
        """Return this rank's share of the mean gradient at its present parameters, and its mean loss (scalar or None).

        Without micro-batches (a rank without samples in a short last batch) the gradient is zero and has weight 0.
        Each bucket is given to `hooks.bucket` when its gradients are final, in bucket order.
        """
        self._trained.check()
        if hooks.need or hooks.tick or len(micro_batches) > 1:
            self._add_hooks(self._in_place.all)
        use = parameter_use(hooks.need, self._parameters, self.layout) if hooks.need else None
        if use is not None and (self.compiled or not micro_batches or runs_without_python(self.model)):
            use.request_rest()
            use = None
        gradient = Gradient(self.pool.take(), self.layout, step, min(self.updates))
        if self.total_weight is not None:
            gradient.total_weight = self.total_weight(step)
        weight = sum(micro.share for micro in micro_batches)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        views = self._views_of(gradient.flat)
        state = Accumulation(gradient, views, self._in_place, hooks, weight / scale, weight, self.control_out)
        total, num_samples = None, 0
        self._running = state
        saved = [param.grad for param in self._parameters]
        if self.guard is not None:
            self.guard.begin_step(step)
        try:
            for param, grad in zip(self._parameters, saved, strict=True):
                if grad is not None:
                    param.grad = None
            for position, micro in enumerate(micro_batches):
                state.begin(last=position == len(micro_batches) - 1)
                hooks.phase("forward")
                with self._autocast(), use or nullcontext():
                    loss = micro.loss()
                if use is not None:
                    state.late = use.request_rest()
                    gradient.version = min(self.updates)
                    use = None
                hooks.phase("backward")
                self._check_loss(loss)
                if self.guard is not None:
                    self.guard.check_loss(loss)
                factor = scale if len(micro_batches) == 1 else scale * micro.share / weight  # as hooks expect it
                self._detect_hooks(state)
                state.begin_backward()
                (loss if factor == 1.0 else loss * factor).backward()
                state.end_backward()
                part = loss.detach().double() * micro.num_samples
                total = part if total is None else total + part
                num_samples += micro.num_samples
            if not micro_batches:
                hooks.phase("backward")
            self._finish(state)
            hooks.phase("")
        finally:
            self._running = None
            for param, grad in zip(self._parameters, saved, strict=True):
                param.grad = grad
        self._add_hooks(state.missed)
        return gradient, None if total is None else total / max(num_samples, 1)

    def _detect_hooks(self, state: Accumulation) -> None:
        """Keep the gradients if hooks of the user may change a parameter's `.grad`."""
        if not state.keeps and any(param._post_accumulate_grad_hooks for param in self._parameters):
            state.keeps = True
            self._add_hooks(self._in_place.all)

    def _autocast(self) -> Any:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.layout.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def _check_loss(self, loss: Tensor) -> None:
        check_is_mean(loss)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on any trainable parameter: was it detached, or computed under no_grad?"
            )

    def _hook_for(self, index: int) -> Callable[[object, object], None]:
        slot, parameters = self.layout.slots[index], self._parameters
        # Python's garbage collector does not see a parameter's hooks: a hook with a reference to this replica would
        # keep it alive.
        find = weakref.ref(self)

        def hook(_inputs: object, _outputs: object) -> None:
            replica, param = find(), parameters[index]
            state = None if replica is None else replica._running
            if replica is None or state is None:
                return  # a backward pass of the user, outside `backward`
            grad = param.grad
            if not state.keeps:
                param.grad = None  # free its memory now: the buffer holds the gradient
            if state.write_gradient(index, grad, slot) and state.on_bucket is not None:
                replica._launch_ready(state)
            if state.tick is not None:
                state.tick()

        return hook

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Return each slot's part of one of the pool's buffers."""
        views = self._views.get(id(flat))
        if views is None:  # the pool keeps its buffers alive, so ids are unique
            # `.data`: each has its own version counter
            views = self._views[id(flat)] = [slot.view(flat).data for slot in self.layout.slots]
        return views

    def _watch(self, indices: Iterable[int]) -> None:
        """Add hooks that are called when the gradients of these parameters arrive.

        As DDP's, they are hooks of autograd's node that accumulates the gradient: it calls them after all hooks of the
        parameter itself, so they see what the user's hooks made of the gradient.
        """
        for index in indices:
            node = get_gradient_edge(self._parameters[index]).node
            self._nodes.append(node)  # the parameter does not keep it alive
            self._handles.append(node.register_hook(self._hook_for(index)))

    def _add_hooks(self, indices: set[int]) -> None:
        """From the next backward on, use hooks for those of these parameters that had none."""
        if indices:
            self._watch(self._in_place.exclude(indices))

    def _launch_ready(self, state: Accumulation) -> None:
        """Pass on the buckets that are final, in bucket order."""
        if self.sends_whole:
            return
        while state.next_bucket < len(self.layout.buckets) and state.is_final(state.next_bucket):
            state.count_in_place(state.next_bucket)
            self._seal(state, state.next_bucket)

    def _finish(self, state: Accumulation) -> None:
        """Zero the gradients that backward did not reach, and pass on the remaining buckets."""
        state.write_kept()
        for bucket in range(len(self.layout.buckets)):
            state.count_in_place(bucket) if bucket >= state.next_bucket else state.check_once(bucket)
        for index in set(range(len(self.layout.slots))) - state.written:
            state.views[index].zero_()
        if self.leaves_out_overflow and state.weight:
            self._leave_out_overflow(state)
        if self.guard is not None:
            self.guard.check_norm(state.gradient, state.weight)
        while state.next_bucket < len(self.layout.buckets):
            self._seal(state, state.next_bucket)
        if self.guard is not None:
            self.guard.restore_buffers()

    @property
    def sends_whole(self) -> bool:
        """Return True if no bucket may be sent before the whole gradient was checked."""
        return self.leaves_out_overflow or (self.guard is not None and self.guard.whole)

    def _leave_out_overflow(self, state: Accumulation) -> None:
        """Make a gradient that overflowed in 16 bits count nothing: zeros with weight 0, and no used parameter.

        The guard leaves out one that a smaller loss scale would not help. The scale then stays.
        """
        assert self.loss_scale is not None
        bodies = [state.gradient.body(piece.index) for piece in self.layout.buckets]
        if self.guard is not None and self.guard.reports_overflow() and not all_finite(bodies):
            return
        if not self.loss_scale.accept(*bodies):
            state.gradient.flat.zero_()
            state.weight = 0.0
            state.written.clear()

    def _seal(self, state: Accumulation, bucket: int) -> None:
        """Write a bucket's tail and pass the bucket on."""
        piece = self.layout.buckets[bucket]
        settings = () if self.settings is None else tuple(self.settings.differences())
        facts = (state.weight, state.control, self._members[bucket] - state.written, settings)
        cached = self._tails.get(bucket)
        if cached is None or cached[0] != facts:
            used = (float(slot.index in state.written) for slot in piece.slots)
            words = (state.weight, float(state.control), *used, *(state.weight * number for number in settings))
            cached = self._tails[bucket] = (
                facts,
                torch.tensor(words, dtype=self.layout.dtype, device=self.layout.device),
            )
        state.gradient.flat[piece.tail : piece.stop].copy_(cached[1])
        if self.guard is not None:
            self.guard.check_bucket(state.gradient, bucket)
        state.next_bucket += 1
        if state.on_bucket is not None:
            state.on_bucket(state.gradient.bucket_view(bucket))

    # -- updates -----------------------------------------------------------------------------------------------

    def apply(self, gradient: Gradient, lr_scale: float = 1.0, *, local: bool = False) -> int:
        """Take one optimizer step with a summed gradient or bucket, which is consumed.

        Return its staleness in updates.

        `local`: it is this rank's gradient alone, so other ranks may not know its control value yet.
        """
        owner = gradient if gradient.bucket is None else gradient.owner
        assert owner is not None
        if self.average is not None:
            self.average.catch_up()
        pieces = self.layout.buckets if gradient.bucket is None else (self.layout.buckets[gradient.bucket],)
        staleness = max(self.updates[piece.index] for piece in pieces) - gradient.version
        tails = [self._read_tail(gradient, piece) for piece in pieces]
        if pieces[0].index == 0 and not local:
            self.control_seen = max(self.control_seen, int(tails[0][CONTROL]))
        _divide(gradient, [tail[WEIGHT] for tail in tails])
        touched, views = [], self._views_of(owner.flat) if self.pool.owns(owner.flat) else None
        for piece, tail in zip(pieces, tails, strict=True):
            for slot, num_users in zip(piece.slots, tail[USED:], strict=True):
                param = self._parameters[slot.index]
                if num_users > 0:
                    view = slot.view(owner.flat) if views is None else views[slot.index]
                    param.grad = view if view.dtype == param.dtype else view.to(param.dtype)
                    touched.append(param)
                else:
                    param.grad = None
        if self._accepts(gradient, local):
            self.optimizer_wrapper.step(gradient.bucket, lr_scale, gradient.step)
            if self.optimizer_wrapper.keeps:
                self.optimizer_wrapper.keep(slot.index for piece in pieces for slot in piece.slots)
        for param in touched:
            param.grad = None
        self._consume(owner, pieces)
        return staleness

    def _accepts(self, gradient: Gradient, local: bool) -> bool:
        """Return whether the optimizer may use it. This rank's own gradient was checked before."""
        if self.guard is not None and not local and not self.guard.accepts_sum(gradient):
            return False
        return self.loss_scale is None or self.loss_scale.accept(gradient.flat)

    def _read_tail(self, gradient: Gradient, piece: BucketSlice) -> list[float]:
        """Read a bucket's tail. On a GPU the host waits for the sum only, not for later work."""
        with self.streams.after(gradient.ready):
            return gradient.tail(piece.index).tolist()

    def _consume(self, owner: Gradient, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            self.updates[piece.index] += 1
        key = id(owner.flat)
        self._applied[key] = self._applied.get(key, 0) + len(pieces)
        if self._applied[key] == len(self.layout.buckets):
            del self._applied[key]
            self.discard(owner)
            self.optimizer_wrapper.advance_schedule()
            if self.average is not None:
                self.average.note_update()

    def end_step(self) -> None:
        """The algorithm has ended a step: it writes no more parameters of it."""
        if self.average is not None:
            self.average.catch_up()

    def show_gradients(self) -> None:
        """Set each parameter's `.grad` to the gradient of its last update."""
        for index, param in enumerate(self._parameters):
            param.grad = self.optimizer_wrapper.kept.get(index)

    def discard(self, gradient: Gradient) -> None:
        """Take a gradient's buffer back. A buffer that is not from the pool is left to its owner."""
        self.optimizer_wrapper.of_step.pop(gradient.step, None)
        if self.pool.owns(gradient.flat):
            self.pool.give_back(gradient.flat)

    # -- parameters and state ----------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        return float(self.optimizer_wrapper.optimizer.param_groups[0]["lr"])

    @property
    def used_lr(self) -> float | None:
        """The first group's learning rate in the last update, with its `lr_scale`; None before the first update."""
        used = self.optimizer_wrapper.used_lr
        return None if used is None else float(used)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate, also of the server copy: see `OptimizerWrapper.set_lr`."""
        self.optimizer_wrapper.set_lr(lr)
        if self._server_copy is not None:
            self._server_copy.set_lr(lr)

    def clear_control(self) -> None:
        """Clear the control values: all ranks have acted on them, and no gradient in flight carries one."""
        self.control_out = self.control_seen = 0
        if self._server_copy is not None:
            self._server_copy.control_seen = 0

    def read_parameters(self) -> Tensor:
        """Return a copy of the trainable parameters, flat, in order of registration."""
        return torch.cat([param.detach().reshape(-1).to(self.layout.dtype) for param in self._parameters])

    @torch.no_grad()
    def write_parameters(self, value: Tensor) -> None:
        """Overwrite the parameters from a tensor of the form that `read_parameters` returns."""
        offset = 0
        for param in self._parameters:
            param.copy_(value[offset : offset + param.numel()].view(param.shape))
            offset += param.numel()

    def pack_parameters(self, bucket: int | None, *, server_copy: bool, step: int = -1) -> Gradient:
        """Return parameters in the layout of a gradient: the replica's, or the server copy's."""
        if server_copy:
            return self.server_copy.pack(bucket)
        return pack(self._parameters, self.layout, bucket, self.control_out, max(self.updates), step)

    def unpack_parameters(self, packed: Gradient) -> None:
        """Overwrite the replica's parameters by packed ones. All ranks know the control value in them."""
        self.control_seen = max(self.control_seen, unpack(packed, self._parameters))

    @property
    def server_copy(self) -> ServerCopy:
        """The server copy, made from the present parameters at first use."""
        if self._server_copy is None:
            assert self.make_server_copy is not None, "make_server_copy is not set"
            self._server_copy = self.make_server_copy()
            self._server_copy.guard = self.guard
        return self._server_copy

    def _copy_for_server(self) -> ServerCopy:
        optimizer = self.optimizer_wrapper.optimizer
        make = partial(copy_optimizer, optimizer, self._parameters)
        return ServerCopy(self._parameters, self.layout, make, settings=self.settings)

    @property
    def has_server_copy(self) -> bool:
        return self._server_copy is not None

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the parameters from here on; it advances once for each update."""
        self.average = Average(self._parameters, decay)

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters, in the layout's order."""
        return list(self._parameters)

    def shared_tensors(self) -> list[Tensor]:
        """Return all tensors that must be equal on all ranks at the start: parameters (frozen ones too) and buffers."""
        return [tensor.detach() for tensor in (*self.model.parameters(), *self.module_state.buffers)]

    def state(self) -> dict[str, Any]:
        """Return all state that a resumed run needs, as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            **self.optimizer_wrapper.state(),
            "updates": list(self.updates),
            "loss_scale": (self.loss_scale.value, self.loss_scale.good) if self.loss_scale else None,
            "average": self.average.state() if self.average else None,
            "master": self._server_copy.state() if self._server_copy else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state()`."""
        self.model.load_state_dict(state["model"])
        self.optimizer_wrapper.load(state)
        self.updates = list(state["updates"])
        if self.average is not None and state["average"] is not None:
            self.average.load(state["average"])
        if state["master"] is not None:
            self.server_copy.load(state["master"])
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.value, self.loss_scale.good = state["loss_scale"]

    def gradient_from(
        self,
        flat: Tensor,
        step: int,
        version: int,
        bucket: int | None = None,
        owners: dict[int, Gradient] | None = None,
    ) -> Gradient:
        """Return a gradient (or bucket) that was in flight at a checkpoint, in a buffer of this replica.

        `owners`: step -> the gradient whose buckets have been restored so far.
        """
        owner = owners.get(step) if bucket is not None and owners else None
        if owner is None:
            owner = Gradient(self.pool.take(), self.layout, step, version)
        if bucket is not None and owners is not None:
            owners[step] = owner
        gradient = owner if bucket is None else owner.bucket_view(bucket)
        gradient.flat.copy_(flat)
        if bucket in (None, 0):
            # the control value that stopped the former run does not apply to this one
            gradient.tail(0)[CONTROL] = 0.0
        return gradient


def check_is_mean(loss: Any) -> None:
    """Raise `ConfigError` unless a loss is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"the loss must be one number, the mean over the batch; got {found} (reduction='none'?)")


def _divide(gradient: Gradient, weights: Sequence[float]) -> None:
    """Divide a sum of shares by its weights: the mean over the samples that contributed.

    The weights of buckets differ if a rank left out only some of them.
    """
    little = 64 * torch.finfo(gradient.flat.dtype).eps
    parts = [(gradient.flat, weights[0])]
    if any(abs(weight - weights[0]) > little for weight in weights):
        parts = [(flat, weight) for (_, flat), weight in zip(gradient.slices(), weights, strict=True)]
    for flat, weight in parts:
        if weight > 0 and abs(weight - 1.0) > little:
            flat.div_(weight)
