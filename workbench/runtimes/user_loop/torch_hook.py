"""torch DDP's communication hooks as a collective of ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from workbench.collectives.base import Collective
from workbench.errors import ConfigError
from workbench.gradients import BucketSlice, Gradient
from workbench.ops import AllReduce, Local, Program, Value
from workbench.program import Context
from workbench.runtimes.transport.base import Deadline
from workbench.runtimes.transport.torch_distributed import failure_in_last_run
from workbench.settings import describe


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TorchHook(Collective):
    """A hook of `torch.distributed.algorithms.ddp_comm_hooks`, or one of your own, in place of a sum.

        sum_i g_i  <-  hook(state, [p g_0, ..., p g_{p-1}])

    A rank's gradient is its share of the mean, so p g_i is what DDP would give the hook, and the mean that the hook returns is
    our sum. The tail of each bucket, which must be exact, does not go through it: the library sums it. The hook is waited for:
    at once, or by a method that starts it, on a lane's thread.

    For methods on torch.distributed alone; the hook speaks to the other ranks through its own group, and waits for them as long
    as that one's time-out says. What it puts on the wire is not known: records count the tails' bytes only, `bytes_sent` is
    NaN, and its span on the timeline is an all-reduce of 0 bytes.

    Args:
        hook: as `register_comm_hook` takes it: (state, bucket) -> future. It sees `index`, `buffer`, `gradients`, `is_last`
            and `set_buffer` of a bucket; no parameters, so a hook that updates them is refused.
        state: what it is given first: None or a process group, a `PowerSGDState`, ... It is yours and outlives the run: a
            second run with the same object goes on from it, and a checkpoint does not keep it. A `PowerSGDState` wants a process
            group when it is unpickled: use it where there is one already, as in a `Trainer` under torchrun.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> from workbench.algorithms import SynchronousSGD
        >>> SynchronousSGD(collective=TorchHook(hook=fp16_compress_hook)).collective
        TorchHook(hook=fp16_compress_hook)
    """

    hook: Callable[[Any, Any], Any]
    state: Any = None

    def __post_init__(self) -> None:
        if not callable(self.hook):
            raise ConfigError(f"hook={self.hook!r}: a function of (state, bucket), such as default_hooks.fp16_compress_hook")

    def __repr__(self) -> str:
        """Without addresses: ranks compare how they describe themselves."""
        state = "" if self.state is None else f", state={type(self.state).__name__}"
        name = describe(self.hook)
        return f"TorchHook(hook={type(self.hook).__name__ if ' at 0x' in name else name}{state})"

    @property
    def lossy(self) -> bool:
        return True  # for all that is known

    @property
    def runtime(self) -> str | None:
        return "torch"

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        there = dist.is_available() and dist.is_initialized()
        found = (dist.get_rank(), dist.get_world_size()) if there else "not initialised"
        if found != (ctx.rank, ctx.num_workers):
            raise ConfigError(
                f"{self} speaks torch.distributed itself, which is {found} here, and not rank {ctx.rank} of {ctx.num_workers}: "
                "run it with runtime='torch', or a Trainer under torchrun"
            )
        if not isinstance(value, Gradient):
            raise ConfigError(f"{self} takes gradients, and was given a plain tensor: use it with a method that sums gradients")
        last = len(value.layout.buckets) - 1
        for piece, flat in value.slices():
            size = piece.tail - piece.start
            yield AllReduce(flat[size:])
            bucket = HookBucket(piece, flat[:size], is_last=piece.index == last)
            yield Local("all_reduce", 0, partial(self._through, bucket, flat[:size], ctx.num_workers))
        return value

    def _through(self, bucket: HookBucket, body: Tensor, num_workers: int) -> None:
        body.mul_(num_workers)
        future = self.hook(self.state, bucket)
        deadline = Deadline(f"other ranks in {self}", failure_in_last_run, None)  # the group of the hook has a time-out of its own
        while not future.done():
            deadline.pause()
        body.copy_(future.wait())

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        """NaN: only the hook knows."""
        return math.nan


@final
class HookBucket:
    """What a hook sees of a bucket: torch's `GradBucket` cannot be made outside DDP."""

    def __init__(self, piece: BucketSlice, buffer: Tensor, *, is_last: bool) -> None:
        self._piece, self._buffer, self._is_last = piece, buffer, is_last

    def index(self) -> int:
        """Which bucket of the gradient."""
        return self._piece.index

    def buffer(self) -> Tensor:
        """The flat gradients."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let it be this one from now on."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Each parameter's, in the order in which they lie in the buffer of now; shares memory with it."""
        start = self._piece.start
        return [self._buffer[slot.offset - start : slot.offset - start + slot.numel].view(slot.shape) for slot in self._piece.slots]

    def is_last(self) -> bool:
        """Whether no bucket of this gradient comes after it."""
        return self._is_last

    def parameters(self) -> list[Tensor]:
        """There are none here.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("this hook asks for the parameters, which a method of ours updates itself: use it in DDP, or another hook")
