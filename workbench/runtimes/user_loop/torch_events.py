"""What torch does in a training loop, reported as it happens: hooks in torch that are removed without a trace.

Nothing is computed differently: each hook notes the time and calls what torch would have called. `replay` works out later
what the notes mean, for many steps together. At each event this would take longer: a step of a model leaves none of this
code in the processor's caches.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
Sent = Callable[[int, int, int, Any], float]  # bytes of the tensors, size of the group, rank in it, root -> bytes sent
MOST_NOTES = 1000  # more are not kept, also within a long evaluation
BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
QUEUE_CALLBACK = torch.autograd.Variable._execution_engine.queue_callback  # to be called when gradients are known


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call of torch.distributed.

    Attributes:
        kind: kind of its span.
        bucket: its number among the all-reduces of this backward; -1 for other calls.
        num_bytes: bytes that this rank sends at least.
        start_s, end_s: when it was called, and when it was complete; None until then.
        step: its step.
        peer: the other rank of a message; -1 for none.
    """

    kind: str
    bucket: int
    num_bytes: int
    start_s: float
    end_s: float | None = None
    step: int = -1
    peer: int = -1


@final
@dataclass(slots=True)
class _Backward:
    """A backward pass that runs. `computed_s`: when all gradients were known."""

    calls: list[Call] = field(default_factory=list)
    computed_s: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class _Operation:
    """An operation of c10d.

    Attributes:
        kind: kind of its spans.
        values, group: positions of the tensors that count and of the group among its arguments; values None: no bytes.
        sent: bytes that a rank sends at least.
        is_message: the third argument is the other rank, if there are more than three.
    """

    kind: str
    values: int | None = 0
    group: int = 1
    sent: Sent = lambda num_bytes, _size, _rank, _root: num_bytes
    is_message: bool = False


def _sent_by_root(num_bytes: int, _size: int, rank: int, root: Any) -> float:
    return num_bytes if root == rank else 0


def _sent_in_all_reduce(num_bytes: int, size: int, _rank: int, _root: Any) -> float:
    return native_bytes(size, num_bytes)


def _sent_in_half(num_bytes: int, size: int, _rank: int, _root: Any) -> float:
    """Return the bytes of an all-gather or reduce-scatter, from the tensors that hold all ranks' values."""
    return native_bytes(size, num_bytes) / 2


def _sent_to_others(num_bytes: int, size: int, _rank: int, _root: Any) -> float:
    return num_bytes * (size - 1) / size


_ALL_REDUCE = _Operation(kind="all_reduce", sent=_sent_in_all_reduce)
_ALL_GATHER = _Operation(kind="all_gather", group=2, sent=_sent_in_half)
_REDUCE_SCATTER = _Operation(kind="reduce_scatter", values=1, group=2, sent=_sent_in_half)
_RECV = _Operation(kind="recv", is_message=True)
_ALL_TO_ALL = _Operation(kind="communicate", values=1, group=2, sent=_sent_to_others)
_OPERATIONS = {
    "allreduce_": _ALL_REDUCE,
    "allreduce_coalesced_": _ALL_REDUCE,
    "broadcast_": _Operation(kind="broadcast", sent=_sent_by_root),
    "allgather_": _ALL_GATHER,
    "_allgather_base_": _ALL_GATHER,
    "allgather_coalesced_": _ALL_GATHER,
    "allgather_into_tensor_coalesced_": _ALL_GATHER,
    "reduce_scatter_": _REDUCE_SCATTER,
    "_reduce_scatter_base_": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "send": _Operation(kind="send", is_message=True),
    "recv_": _RECV,
    "recv_any_source_": _RECV,
    "reduce_": _Operation(kind="communicate"),
    "gather_": _Operation(kind="communicate", values=1, group=2),
    "scatter_": _Operation(kind="communicate", values=1, group=2),
    "alltoall_": _ALL_TO_ALL,
    "alltoall_base_": _ALL_TO_ALL,
    "barrier": _Operation(kind="barrier", values=None),
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
        phases: told what the loop does, in `replay`.
        communicated: called with each call that is complete, in `replay`.
        now: the time in seconds.
        between_steps: called with the time after a step has ended, when the next one begins.

    Attributes:
        has_ddp, has_gpu: whether a model of the loop is torch's DDP, or is on a GPU; known once an optimizer has begun
            a step.
        parameters: name, shape and bytes of a number of each parameter that has a gradient, of all models.
        num_buckets: the most all-reduces of a step.
    """

    def __init__(
        self,
        phases: LoopPhases,
        communicated: Communicated,
        now: Callable[[], float],
        between_steps: Callable[[float], object],
    ) -> None:
        self._phases, self._communicated, self._now, self._between_steps = phases, communicated, now, between_steps
        self._notes: list[tuple[Callable[..., object], tuple[Any, ...]]] = []  # what to call in `replay`
        self._begun: list[Call] = []  # calls that were replayed before they were complete
        self._thread = -1
        self._updated = False  # since the step began
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
        self._updating, self._updated, self._forwards, self._backward = None, False, 0, None
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
            for name, operation in _OPERATIONS.items():
                function = getattr(torch.ops.c10d, name).default
                library.impl(name, partial(self._in_call, function, operation), with_keyset=True)

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

    # -- notes -------------------------------------------------------------------------------------------------

    def note(self, function: Callable[..., object], *args: Any) -> None:
        """Call the function in the next `replay`. Any thread may call this."""
        self._notes.append((function, args))
        if len(self._notes) >= MOST_NOTES and self._is_loop():
            self.replay()

    def replay(self) -> None:
        """Report everything that was noted, in order."""
        notes = self._notes[:]
        del self._notes[: len(notes)]  # other threads may have added some
        begun, self._begun = self._begun, []
        for call in begun:
            self._report(call)
        for function, args in notes:
            function(*args)

    def note_call(self, call: Call) -> None:
        """Note a call that torch does not see."""
        self.note(self._report_in_step, call)

    def _report_in_step(self, call: Call) -> None:
        call.step = self._phases.step.number
        self._report(call)

    def _report(self, call: Call) -> None:
        """Report a call if it is complete."""
        if call.end_s is None:
            self._begun.append(call)
        else:
            self._communicated(call)

    def _begin_step(self, now_s: float) -> None:
        """A forward or backward begins, and with it perhaps a step."""
        if self._updated:
            self._updated = False
            self.note(self._phases.settle)
            self._between_steps(now_s)

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
        self.note(self._phases.begin_update, self._now())

    def _end_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        began_before = (
            self._updating is None and optimizer not in self._optimizers
        )  # the recording began in its closure
        if began_before and self._is_loop():
            self._optimizers.add(optimizer)
            self._find_models(optimizer)
            self._updating = optimizer
        if self._is_loop() and self._updating is optimizer:
            now_s = self._now()
            self._updating, self._updated = None, True
            rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
            if isinstance(rate, Tensor):
                rate = None if rate.is_cuda else float(rate)
            lr = float(rate) if isinstance(rate, (int, float)) else None
            self.note(partial(self._phases.end_update, is_whole=not began_before), now_s, lr)

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
            now_s = self._now()
            self._begin_step(now_s)
            self.note(self._phases.begin_forward, now_s)
        else:
            self.note(self._phases.begin_evaluation, self._now())

    def _end_forward(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if not self._is_loop() or self._backward is not None:
            return
        self._forwards -= 1
        if self._forwards == 0:
            ends = model.training and torch.is_grad_enabled()
            self.note(self._phases.end_forward if ends else self._phases.end_evaluation, self._now())

    # -- functions of torch: each calls the original ----------------------------------------------------------------

    def _in_backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_loop() or self._backward is not None:
            original(tensors, *args, **kwargs)
            return
        self._forwards = self._num_buckets = 0
        now_s = self._now()
        self._begin_step(now_s)
        self.note(self._phases.begin_backward, now_s)
        if isinstance(tensors, Tensor) and tensors.numel() == 1 and not tensors.is_cuda:
            self.note(self._phases.add_loss, float(tensors.item()))
        self._backward = backward = _Backward()
        try:
            original(tensors, *args, **kwargs)
        finally:
            self._backward = None
            if self._pending:
                self._note_completed()
            self.note(self._end_backward, backward, self._now())

    def _end_backward(self, backward: _Backward, now_s: float) -> None:
        """Report the end of a backward pass. It did not wait for calls that ended later."""
        ends = [call.end_s for call in backward.calls if call.end_s is not None and call.end_s <= now_s]
        self._phases.end_backward(now_s, backward.computed_s, max(ends, default=None))

    def _in_load(self, original: Callable[..., Any], iterator: Any) -> Any:
        begin_s = self._now()
        value = original(iterator)
        if self._is_loop():
            self.note(self._phases.load, begin_s, self._now())
        return value

    def _in_wait(self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        begin_s = self._now()
        value = original(work, *args, **kwargs)
        self._completed(id(work))
        if self._is_loop():
            self.note(self._phases.wait, begin_s, self._now())
        return value

    # -- communication -----------------------------------------------------------------------------------------

    def _in_call(self, function: Any, operation: _Operation, keys: Any, *args: Any) -> Any:
        start_s = self._now()
        answer = function.redispatch(keys.remove(BACKEND_SELECT), *args)
        kind = operation.kind
        first = args[0][0] if kind == "all_reduce" else next(_tensors(args[0]), None)
        bucket = -1
        if kind == "all_reduce" and first is not None and first.dtype.is_floating_point:
            bucket = self._num_buckets
            self._num_buckets = bucket + 1
        call = Call(kind, bucket, 0 if operation.values is None else _bytes(args[operation.values]), start_s)
        other = args[2] if len(args) > 3 and isinstance(args[2], int) else None
        self.note(self._report_seen, call, operation, args[operation.group], other)
        if self._backward is not None and kind != "barrier":
            self._in_this_backward(self._backward, call)
        work = dist.Work.unbox(answer[-1] if isinstance(answer, (tuple, list)) else answer)
        key = id(work)
        if first is not None and first.is_cuda:
            self._pending[key] = (call, work, None)
            self._completed(key)  # the device works later: these are the times of the host
            return answer
        try:
            future = work.get_future()
        except RuntimeError:  # gloo has no future for a message: its end is that of the wait for it
            future = None
        self._pending[key] = (call, work, future)  # torch gives the same Work to the loop, as long as it lives
        if future is not None:
            future.add_done_callback(partial(self._from_future, key, call))
        return answer

    def _report_seen(self, call: Call, operation: _Operation, boxed: Any, other: int | None) -> None:
        """Report a call of an operation, with what follows from its group and the root or peer."""
        group = dist.ProcessGroup.unbox(boxed)
        self.num_buckets = max(self.num_buckets, call.bucket + 1)
        call.num_bytes = int(operation.sent(call.num_bytes, group.size(), group.rank(), other))
        if operation.is_message and other is not None:
            known = group in dist.distributed_c10d._world.pg_map
            call.peer = dist.get_global_rank(group, other) if known else other
        self._report_in_step(call)

    def _in_this_backward(self, backward: _Backward, call: Call) -> None:
        """Note a call within backward. Torch calls back when the gradients are known, before DDP waits for its sums."""

        def computed() -> None:
            backward.computed_s = self._now()

        if not backward.calls:
            try:
                QUEUE_CALLBACK(computed)
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
            found = self._pending.pop(key, None)
            if found is not None:
                found[0].end_s = now_s


def _replace(undo: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function or method by one that is called with the original first, until `undo` is closed."""
    original = vars(owner)[name]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    undo.callback(setattr, owner, name, original)
