"""What torch does in a training loop, reported as it happens: hooks in torch that are removed without a trace.

Nothing is computed differently: each hook notes the time and calls what torch would have called.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from workbench.collectives import native_bytes
from workbench.runtimes.user_loop.loop_phases import LoopPhases

Communicated = Callable[["Call"], object]


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call of torch.distributed.

    Attributes:
        kind: kind of its span.
        step, bucket: its step, and its number among the all-reduces of this backward; -1 for other calls.
        num_bytes: bytes that this rank sends at least.
        peer: the other rank of a message; -1 for none.
        start_s, end_s: when it was called, and when it was complete; None until then.
    """

    kind: str
    step: int
    bucket: int
    num_bytes: int
    peer: int
    start_s: float
    end_s: float | None = None


@final
@dataclass(slots=True)
class _Backward:
    """A backward pass that runs. `computed_s`: when all gradients were known."""

    calls: list[Call] = field(default_factory=list)
    computed_s: float | None = None


def _sent_in_half(inputs_or_outputs: int) -> Callable[[tuple[Any, ...], int, int], float]:
    """Return the bytes of an all-gather or reduce-scatter, by the argument that holds all ranks' values."""
    return lambda args, size, _: native_bytes(size, _bytes(args[inputs_or_outputs])) / 2


# Operation -> kind, position of its group, and its bytes from its arguments, the group's size and the rank in it.
_OPERATIONS: dict[str, tuple[str, int, Callable[[tuple[Any, ...], int, int], float]]] = {
    "allreduce_": ("all_reduce", 1, lambda args, size, _: native_bytes(size, _bytes(args[0]))),
    "allreduce_coalesced_": ("all_reduce", 1, lambda args, size, _: native_bytes(size, _bytes(args[0]))),
    "broadcast_": ("broadcast", 1, lambda args, _, rank: _bytes(args[0]) if args[2] == rank else 0),
    "allgather_": ("all_gather", 2, _sent_in_half(0)),
    "_allgather_base_": ("all_gather", 2, _sent_in_half(0)),
    "allgather_coalesced_": ("all_gather", 2, _sent_in_half(0)),
    "allgather_into_tensor_coalesced_": ("all_gather", 2, _sent_in_half(0)),
    "reduce_scatter_": ("reduce_scatter", 2, _sent_in_half(1)),
    "_reduce_scatter_base_": ("reduce_scatter", 2, _sent_in_half(1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2, _sent_in_half(1)),
    "send": ("send", 1, lambda args, _size, _rank: _bytes(args[0])),
    "recv_": ("recv", 1, lambda args, _size, _rank: _bytes(args[0])),
    "recv_any_source_": ("recv", 1, lambda args, _size, _rank: _bytes(args[0])),
    "reduce_": ("communicate", 1, lambda args, _size, _rank: _bytes(args[0])),
    "gather_": ("communicate", 2, lambda args, _size, _rank: _bytes(args[1])),
    "scatter_": ("communicate", 2, lambda args, _size, _rank: _bytes(args[1])),
    "alltoall_": ("communicate", 2, lambda args, size, _: _bytes(args[1]) * (size - 1) / size),
    "alltoall_base_": ("communicate", 2, lambda args, size, _: _bytes(args[1]) * (size - 1) / size),
    "barrier": ("barrier", 1, lambda _args, _size, _rank: 0),
}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    else:
        for value in values:
            yield from _tensors(value)


def _bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return int(values.nbytes)
    return sum(map(_bytes, values))


@final
class TorchEvents:
    """Reports the phases of a loop and its communication, between `install` and `remove`.

    The thread that calls `install` is the loop's. What other threads compute is not seen; what they communicate is.

    Communication is seen below torch.distributed's functions, where c10d's operations are dispatched. So DDP's own
    all-reduces, those of its communication hooks and the loop's calls are all seen, and DDP still runs its own code.

    Args:
        phases: told what the loop does.
        communicated: called with each call that is complete, on any thread.
        now: the time in seconds.

    Attributes:
        has_ddp, has_gpu: whether a model of the loop is torch's DDP, or is on a GPU; known once an optimizer has begun
            a step.
        parameters: name, shape and bytes of a number of each parameter that has a gradient, of all models.
        num_buckets: the most all-reduces of a step.
    """

    def __init__(self, phases: LoopPhases, communicated: Communicated, now: Callable[[], float]) -> None:
        self._phases, self._communicated, self._now = phases, communicated, now
        self._thread = -1
        self._undo: ExitStack | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.has_ddp = self.has_gpu = False
        self.parameters: list[tuple[str, list[int], int]] = []
        self.num_buckets = 0
        self._updating: Optimizer | None = None  # the outermost: ZeRO's contains another
        self._forwards = 0  # depth of calls of models
        self._backward: _Backward | None = None
        self._num_buckets = 0
        self._pending: dict[int, tuple[Call, Any, Any]] = {}  # id of a torch Work -> its call, the Work, its future
        self._completing = threading.RLock()  # so that whoever finds a call gone finds its end too

    # -- install and remove ----------------------------------------------------------------------------------------

    @property
    def installed(self) -> bool:
        """Whether the hooks are in torch."""
        return self._undo is not None

    def install(self) -> None:
        """Put the hooks into torch."""
        assert self._undo is None, "the hooks are installed"
        self._thread = threading.get_ident()
        self._updating, self._forwards, self._backward = None, 0, None
        self._undo = undo = ExitStack()
        undo.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
        undo.callback(register_optimizer_step_post_hook(self._end_update).remove)
        _replace(undo, torch.autograd, "backward", self._in_backward)
        _replace(undo, dataloader._BaseDataLoaderIter, "__next__", self._in_load)
        for model in list(self._hooked):
            self._hook(model)
        if dist.is_available():
            _replace(undo, dist.Work, "wait", self._in_wait)
            library = torch.library.Library("c10d", "IMPL", "BackendSelect")
            undo.callback(library._destroy)
            for name in _OPERATIONS:
                operation = getattr(torch.ops.c10d, name).default
                library.impl(name, partial(self._in_call, operation, *_OPERATIONS[name]), with_keyset=True)

    def remove(self) -> None:
        """Take the hooks out again. Removing twice is allowed."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def complete(self, timeout_s: float) -> None:
        """Wait for calls that the loop has begun and not waited for, so that their ends are recorded."""
        end = time.perf_counter() + timeout_s
        while self._pending and time.perf_counter() < end:
            self._note_completed()
            time.sleep(1e-3)
        with self._completing:
            self._pending.clear()

    def _is_loop(self) -> bool:
        return threading.get_ident() == self._thread

    # -- the optimizer -----------------------------------------------------------------------------------------

    def _begin_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._is_loop() or self._updating not in (None, optimizer):
            return
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._find_models(optimizer)
        self._updating, self._forwards = optimizer, 0  # a forward that raised has not ended
        self._phases.begin_update(self._now())

    def _end_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_loop() and self._updating is optimizer:
            self._updating = None
            rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
            on_host = isinstance(rate, int | float) or (isinstance(rate, Tensor) and not rate.is_cuda)
            self._phases.end_update(self._now(), float(rate) if on_host and rate is not None else None)

    def _find_models(self, optimizer: Optimizer) -> None:
        """Hook the outermost modules with this optimizer's parameters.

        Hooks of all modules would cost microseconds at each layer, and would make torch.compile compile again.
        """
        updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
        modules = [item for item in gc.get_objects() if issubclass(type(item), nn.Module) and "_modules" in vars(item)]
        inner = {id(child) for module in modules for child in module._modules.values()}
        for module in modules:
            if id(module) in inner or module in self._hooked:
                continue
            if any(id(param) in updated for param in module.parameters()):
                is_ddp = isinstance(module, DistributedDataParallel)
                self._hook(module.module if is_ddp else module)  # evaluations often call what DDP wraps
                self.has_ddp |= is_ddp
                self.has_gpu |= any(param.is_cuda for param in module.parameters())
                named = (module.module if is_ddp else module).named_parameters()
                self.parameters += [
                    (name, list(param.shape), param.element_size()) for name, param in named if param.requires_grad
                ]

    # -- models ------------------------------------------------------------------------------------------------

    def _hook(self, model: nn.Module) -> None:
        assert self._undo is not None
        self._hooked.add(model)
        self._undo.callback(model.register_forward_pre_hook(self._begin_forward).remove)
        self._undo.callback(model.register_forward_hook(self._end_forward).remove)

    def _begin_forward(self, model: nn.Module, _args: Any) -> None:
        if not self._is_loop() or self._backward is not None:  # a checkpoint computes its part again in backward
            return
        self._forwards += 1
        if self._forwards > 1:
            return
        if model.training and torch.is_grad_enabled():
            self._phases.begin_forward(self._now())
        else:
            self._phases.begin_evaluation(self._now())

    def _end_forward(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if not self._is_loop() or self._backward is not None:
            return
        self._forwards -= 1
        if self._forwards == 0:
            if model.training and torch.is_grad_enabled():
                self._phases.end_forward(self._now())
            else:
                self._phases.end_evaluation(self._now())

    # -- functions of torch: each calls the original ----------------------------------------------------------------

    def _in_backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_loop() or self._backward is not None:
            original(tensors, *args, **kwargs)
            return
        self._forwards = self._num_buckets = 0
        self._phases.begin_backward(self._now())
        if isinstance(tensors, Tensor) and tensors.numel() == 1 and not tensors.is_cuda:
            self._phases.add_loss(float(tensors.detach()))
        self._backward = backward = _Backward()
        try:
            original(tensors, *args, **kwargs)
        finally:
            self._backward = None
            self._note_completed()
            ends = [call.end_s for call in backward.calls if call.end_s is not None]
            self._phases.end_backward(self._now(), backward.computed_s, max(ends, default=None))

    def _in_load(self, original: Callable[..., Any], iterator: Any) -> Any:
        begin_s = self._now()
        value = original(iterator)
        if self._is_loop():
            self._phases.load(begin_s, self._now())
        return value

    def _in_wait(self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        begin_s = self._now()
        value = original(work, *args, **kwargs)
        self._completed(id(work))
        if self._is_loop():
            self._phases.wait(begin_s, self._now())
        return value

    # -- communication -----------------------------------------------------------------------------------------

    def _in_call(
        self,
        operation: Any,
        kind: str,
        position: int,
        sent: Callable[[tuple[Any, ...], int, int], float],
        keys: Any,
        *args: Any,
    ) -> Any:
        start_s = self._now()
        answer = operation.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *args)
        group = dist.ProcessGroup.unbox(args[position])
        first = args[0][0] if kind == "all_reduce" else next(_tensors(args[0]), None)
        bucket, peer = -1, -1
        if kind == "all_reduce" and first is not None and first.is_floating_point():
            bucket = self._num_buckets
            self._num_buckets += 1
            self.num_buckets = max(self.num_buckets, self._num_buckets)
        elif kind in ("send", "recv") and isinstance(args[2], int) and len(args) > 3:
            peer = dist.get_global_rank(group, args[2]) if group in dist.distributed_c10d._world.pg_map else args[2]
        num_bytes = int(sent(args, group.size(), group.rank()))
        call = Call(kind, self._phases.step.number, bucket, num_bytes, peer, start_s)
        if self._backward is not None and kind != "barrier":
            self._in_this_backward(self._backward, call)
        boxed = answer[-1] if isinstance(answer, tuple | list) else answer
        work = dist.Work.unbox(boxed)
        on_gpu = first is not None and first.is_cuda
        future = None
        if not on_gpu:
            with suppress(RuntimeError):  # gloo has no future for a message: its end is that of the wait for it
                future = work.get_future()
        self._pending[id(work)] = (call, work, future)  # torch gives the same Work to the loop, as long as it lives
        if on_gpu:
            self._completed(id(work))  # the device works later: these are the times of the host
        elif future is not None:
            future.add_done_callback(partial(self._from_future, id(work), call))
        return answer

    def _in_this_backward(self, backward: _Backward, call: Call) -> None:
        """Note a call within backward. Torch calls back when the gradients are known, before DDP waits for its sums."""

        def computed() -> None:
            backward.computed_s = self._now()

        if not backward.calls:
            try:
                torch.autograd.Variable._execution_engine.queue_callback(computed)
            except RuntimeError:  # another thread, which completes a call of a communication hook
                return
        backward.calls.append(call)

    def _from_future(self, key: int, call: Call, _future: Any) -> None:
        if self._pending.get(key, (None,))[0] is call:
            self._completed(key)

    def _note_completed(self) -> None:
        """Record what is complete though torch's thread has not said so yet: it waits for the interpreter."""
        with self._completing:
            for key, (_, work, future) in list(self._pending.items()):
                if work.is_completed() if future is None else future.done():
                    self._completed(key)

    def _completed(self, key: int) -> None:
        """Record a call's end, once: torch's thread and the loop may both see it."""
        now_s = self._now()  # before the wait for another thread
        with self._completing:
            call = self._pending.pop(key, (None,))[0]
            if call is not None:
                call.end_s = now_s
                self._communicated(call)


def _replace(undo: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function or method by one that is called with the original first, until `undo` is closed."""
    original = vars(owner)[name]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    undo.callback(setattr, owner, name, original)
