"""Our collectives and codecs as communication hooks of torch's DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from workbench.codecs import Codec, check_codec
from workbench.collectives import Collective, Native, Ring, check_collective, with_codec
from workbench.errors import ConfigError, LaunchError, PeerFailed
from workbench.gradients import BucketSlice, Gradient, Layout, Slot
from workbench.ops import Program, Request
from workbench.program import Context, perform
from workbench.rng import derive_seed
from workbench.runtimes.background import NUM_TAG_RANGES, TAG_SPAN
from workbench.runtimes.company import explained, keep_company, part
from workbench.runtimes.endpoint import Endpoint, Ledger
from workbench.runtimes.launch import cause_of
from workbench.runtimes.link import measure_link
from workbench.runtimes.post import Post
from workbench.runtimes.strands import LANE_SPINS, Lane, Strand, StrandHandle
from workbench.runtimes.torch_dist import TorchTransport, backend_of
from workbench.runtimes.torch_hook import TorchHook
from workbench.trace.recorder import NullRecorder

Signature = tuple[tuple[int, ...], ...]  # of each parameter in a bucket: its number, and its shape


@final
@dataclass(slots=True)
class Bucket:
    """One of DDP's buckets: what is in it, and what the collective is told of it."""

    signature: Signature
    layout: Layout
    ctx: Context


@final
class DDPHook:
    """The state of `ddp_hook`: a rank's lane and groups of its own, and what codecs remember from step to step.

    What is remembered (the residuals of error feedback, the factors of PowerSGD) belongs to the parameters of a bucket. DDP
    cuts its buckets anew after the first backward, in the order in which gradients came: of a bucket that then holds other
    parameters, memory starts afresh, and the first step's residual is lost. `PowerSGD(start_step=2)` begins after that.

    `state_dict` is one rank's: save it on every rank, beside the model's and the optimizer's.
    """

    def __init__(self, collective: Collective, process_group: dist.ProcessGroup | None, seed: int, timeout_s: float | None) -> None:
        on_gpu = backend_of(process_group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.collective, self.seed, self.step, self._num_started = collective, seed, 0, 0
        self._transport = TorchTransport(device, timeout_s, process_group)
        self.rank, self.num_workers = self._transport.rank, self._transport.num_workers
        self._presence = keep_company(self, self._transport, timeout_s, announces=False)
        self._ledger = Ledger(self._transport, NullRecorder(), timeout_s)
        self._link = measure_link(self._transport, self._ledger.patience) if collective.needs_link else None
        self._post, self._lane = Post(self._transport), Lane(self._ledger)
        weakref.finalize(self, self._lane.leave).atexit = False
        self._numbers: dict[Tensor, int] = {}  # parameter -> its number, in the order in which DDP first brought them
        self._buckets: dict[int, Bucket] = {}
        self._memory: dict[Signature, dict[str, Tensor]] = {}
        self._error: BaseException | None = None

    @property
    def bytes_sent(self) -> float:
        """Bytes this rank has put on the wire."""
        return self._ledger.bytes_sent

    # -- a bucket ----------------------------------------------------------------------------------------------

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to average a bucket over the ranks; the future's value is its buffer. Every rank's buckets come in the same order."""
        if self._error is not None:
            raise self._error
        with explained(lambda error: self._fail(error, self.step)):
            return self._start(bucket)

    def _start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        known = self._known(bucket, buffer)
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        self._num_started += 1
        tags = (1 + self._num_started % NUM_TAG_RANGES) * TAG_SPAN
        endpoint = Endpoint(self._transport.for_lane(0), self._ledger, self._post, spins=LANE_SPINS, tags=tags, strand=self._num_started)
        strand = Strand(self._average(known, buffer, self.step, ready), endpoint, self._ledger, _refuse)
        strand.handle.then = partial(self._end, strand.handle, future, buffer, self.step)
        self._lane.submit(strand)
        if bucket.is_last():
            self._forget_beyond(bucket.index())
            self.step += 1
        return future.then(_value)  # raises there what went wrong: DDP asks a future for its value, and takes an exception for one

    def _average(self, bucket: Bucket, buffer: Tensor, step: int, ready: Any) -> Program:
        """On the lane's thread. Divides first, as DDP does: in 16 bits the sum may be too large where the mean is not."""
        if self._error is not None:
            raise self._error
        if ready is not None:  # the lane works on its thread's stream
            torch.cuda.current_stream(buffer.device).wait_event(ready)
        self._ledger.step = step
        if not self.collective.lossy:
            yield from perform(self.collective.all_reduce(bucket.ctx, buffer.div_(self.num_workers)))
            return
        flat = buffer.to(bucket.layout.dtype).div_(self.num_workers)  # the buffer itself, unless it is of 16 bits
        yield from perform(self.collective.all_reduce(bucket.ctx, Gradient(flat, bucket.layout, step, step)))
        if flat is not buffer:
            buffer.copy_(flat)

    def _end(self, handle: StrandHandle, future: Future[Tensor], buffer: Tensor, step: int) -> None:
        error = handle.error
        if error is None:
            future.set_result(buffer)
        else:
            error = self._fail(error, step)
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]  # its annotation is a slip

    def _fail(self, error: BaseException, step: int) -> BaseException:
        """Tell the other ranks, and every later bucket of this one; what is to be raised."""
        error = cause_of(error, self._transport, self._presence)
        if self._error is None:
            self._error = error
            if not isinstance(error, PeerFailed):
                self._transport.announce_failure(f"rank {self.rank} failed at step {step}: {type(error).__name__}: {error}")
        return error

    # -- what is remembered ------------------------------------------------------------------------------------

    def _known(self, bucket: dist.GradBucket, buffer: Tensor) -> Bucket:
        """What is in the bucket; its memory is that of the same parameters, if there is any."""
        if buffer.is_sparse:
            raise ConfigError("a sparse gradient cannot be sent through ddp_hook: make the embedding with sparse=False")
        if buffer.device != self._transport.device:
            raise ConfigError(
                f"a bucket lies on {buffer.device}, and ddp_hook was made for {self._transport.device}: with NCCL call "
                "torch.cuda.set_device before ddp_hook; with gloo keep the model on the CPU"
            )
        index, params = bucket.index(), bucket.parameters()
        numbers = [self._numbers.setdefault(param, len(self._numbers)) for param in params]
        signature = tuple((number, *param.shape) for number, param in zip(numbers, params, strict=True))
        before = self._buckets.get(index)
        if before is None or before.signature != signature:
            layout = _layout_of(bucket, buffer)
            memory = self._memory.setdefault(signature, {})
            ctx = Context(self.rank, self.num_workers, layout=layout, seed=derive_seed(self.seed, f"ddp/{index}"), memory=memory)
            ctx.link = self._link
            self._buckets[index] = Bucket(signature, layout, ctx)
            self._forget(before)
        return self._buckets[index]

    def _forget(self, bucket: Bucket | None) -> None:
        """What no bucket has any more; what was loaded stays until a bucket has had it."""
        if bucket is not None and bucket.signature not in {item.signature for item in self._buckets.values()}:
            self._memory.pop(bucket.signature, None)

    def _forget_beyond(self, last: int) -> None:
        for index in [index for index in self._buckets if index > last]:
            self._forget(self._buckets.pop(index))

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers, as copies of tensors and plain values that `torch.load` reads. Call it between two steps."""
        kept = [
            {"parameters": [list(item) for item in signature], "values": {name: value.clone() for name, value in memory.items()}}
            for signature, memory in self._memory.items()
            if memory
        ]
        return {**self._place(), "step": self.step, "memory": kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank, with the same model.

        Its residuals are used from the moment on when DDP has cut its buckets as they were: the second step.

        Raises:
            ConfigError: it is of another rank, number of ranks or collective.
        """
        for name, value in self._place().items():
            if saved[name] != value:
                raise ConfigError(f"the state of the hook was saved with {name} {saved[name]}, and not {value}: load each rank's own")
        self.step = saved["step"]
        self._buckets.clear()
        self._memory = {
            tuple(tuple(item) for item in kept["parameters"]): {
                name: value.to(self._transport.device if value.ndim else "cpu", copy=True) for name, value in kept["values"].items()
            }
            for kept in saved["memory"]
        }

    def _place(self) -> dict[str, Any]:
        return {"rank": self.rank, "num_workers": self.num_workers, "collective": repr(self.collective)}

    def close(self) -> None:
        """Give threads and groups back; every rank calls it. Who makes many hooks in one process should: groups stay else until its end."""
        self._lane.close()
        part(self._presence)
        self._transport.close()


def ddp_hook(
    *,
    collective: Collective | None = None,
    codec: Codec | None = None,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    timeout_s: float | None = 120.0,
) -> tuple[DDPHook, Any]:
    """A communication hook for torch's DistributedDataParallel: (state, hook), as `register_comm_hook` takes them.

    Each bucket is averaged over the ranks by `collective`, in the background of backward, one bucket after the other. All ranks
    call it, after torch.distributed was initialised, and in the same order if more than once. The gradients are those of
    `SynchronousSGD(collective=...)`: without a codec DDP's own, to rounding; with one what it leaves of them, the same on all
    ranks. One rank's failure ends backward on all with an error that names it.

    Nothing is copied, unless a codec meets a model of 16-bit parameters: then a bucket is summed in float32.

    Args:
        collective: any of `workbench.collectives`, such as `PowerSGD()`. None: `Native()`, or with a codec `Ring()`.
        codec: goes into the collective's hops.
        process_group: the one that DDP was given; None for the default.
        seed: of stochastic codecs and first factors; the same on all ranks.
        timeout_s: how long a bucket waits for another rank; None for ever.

    Returns:
        state: a `DDPHook`; with error feedback or PowerSGD its `state_dict()` belongs to a checkpoint.
        hook: what DDP calls.

    Raises:
        LaunchError: torch.distributed is not initialised.
        ConfigError: a codec and a collective that do not go together, or too many or too few ranks.

    Example:
        In a script under `torchrun`, without the store and the numbers:
        >>> from torch import nn
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from workbench.codecs import Truncate16
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        >>> state, hook = ddp_hook(codec=Truncate16())
        >>> model.register_comm_hook(state, hook)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> model.module.weight.grad, state.step
        (tensor([[1., 1., 1.]]), 1)
        >>> dist.destroy_process_group()
    """
    if codec is not None:
        check_codec(codec)
    collective = collective or (Native() if codec is None else Ring())
    check_collective(collective)
    if codec is not None:
        if getattr(collective, "codec", None) is not None:
            raise ConfigError(f"codec={codec}: {collective} has a codec already: give one of the two")
        collective = with_codec(collective, codec)
    if isinstance(collective, TorchHook):
        raise ConfigError(f"{collective} is torch's own: give its hook to register_comm_hook itself")
    if not (dist.is_available() and dist.is_initialized()):
        raise LaunchError("torch.distributed is not initialised: call torch.distributed.init_process_group before ddp_hook")
    collective.check(dist.get_world_size(process_group))
    return DDPHook(collective, process_group, seed, timeout_s), hook


def hook(state: DDPHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """What DDP calls with each bucket."""
    return state.start(bucket)


def _value(future: Future[Tensor]) -> Tensor:
    return future.value()


def _refuse(request: Request, _strand: int) -> Any:
    raise TypeError(f"{type(request).__name__} cannot be answered inside torch's DDP: a collective sends, receives and sums")


def _layout_of(bucket: dist.GradBucket, buffer: Tensor) -> Layout:
    """DDP's own bucket as a gradient without a tail: every rank counts the same, and DDP itself knows which parameters were used."""
    dtype = torch.promote_types(torch.float32, buffer.dtype)
    slots = tuple(
        Slot(
            index=index,
            name=f"parameter {index} of bucket {bucket.index()}",
            shape=tuple(param.shape),
            stride=tuple(torch.empty_like(param, device="meta").stride()),  # DDP lays gradients as their parameters lie
            offset=int(gradient.storage_offset()) - int(buffer.storage_offset()),
            numel=param.numel(),
            bucket=0,
            dtype=param.dtype,
        )
        for index, (param, gradient) in enumerate(zip(bucket.parameters(), bucket.gradients(), strict=True))
    )
    end = buffer.numel()
    return Layout(slots, (BucketSlice(0, slots, 0, end, end),), end, dtype, buffer.device)
