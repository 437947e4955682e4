"""Collectives and codecs as communication hooks of torch's DistributedDataParallel."""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

import atexit
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from workbench.codecs import Codec, check_codec
from workbench.collectives import Collective, Native, Ring, check_collective, with_codec
from workbench.errors import ConfigError, LaunchError, PeerFailed
from workbench.gradients import BucketSlice, Gradient, Layout, Slot
from workbench.ops import AllReduce, Program, Request
from workbench.program import Context, lower
from workbench.rng import derive_seed
from workbench.runtimes.execution.endpoint import COMMUNICATION, Caller, Endpoint, RankClock
from workbench.runtimes.execution.progress import NUM_TAG_RANGES, TAG_SPAN
from workbench.runtimes.execution.tasks import LANE_SPINS, Lane, Task, TaskHandle
from workbench.runtimes.liveness.failure_detector import lost_connection
from workbench.runtimes.rank.main import cause_of
from workbench.runtimes.transport.mailbox import Mailbox
from workbench.runtimes.transport.measure_link import measure_link
from workbench.runtimes.transport.torch_distributed import TorchTransport, backend_of
from workbench.runtimes.user_loop.peers import stop_watching, translated_errors, watch_peers
from workbench.trace.recorder import NullRecorder

Signature = tuple[tuple[int, ...], ...]  # for each parameter of a bucket: its number and its shape
_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()  # of all hooks, as long as their threads run


@final
@dataclass(slots=True)
class Bucket:
    """One of DDP's buckets: its parameters, and the layout and context for the collective."""

    signature: Signature
    layout: Layout
    ctx: Context


@final
class DDPHook:
    """The state of `ddp_hook`: a rank's lane, its groups, and the codecs' memory between steps.

    This memory (residuals of error feedback, factors of PowerSGD) belongs to the parameters of a bucket. After the
    first backward DDP makes new buckets, in the order in which gradients became ready. The memory of a bucket that
    changes is lost, so the residual of the first step may be lost. `PowerSGD(start_step=2)` begins after that.

    `state_dict` is one rank's: save it on every rank, next to the model's and the optimizer's.
    """

    def __init__(
        self, collective: Collective, process_group: dist.ProcessGroup | None, seed: int, timeout_s: float | None
    ) -> None:
        on_gpu = backend_of(process_group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.collective, self.seed, self.step, self._num_started = collective, seed, 0, 0
        self._transport = TorchTransport(device, timeout_s, process_group)
        self.rank, self.num_workers = self._transport.rank, self._transport.num_workers
        self._detector = watch_peers(self, self._transport, timeout_s, announces=False)
        self._clock = RankClock(self._transport, NullRecorder(), timeout_s)
        self._link = measure_link(self._transport, self._clock.deadline) if collective.needs_link else None
        self._mailbox, self._lane = Mailbox(self._transport), Lane(self._clock)
        _lanes.add(self._lane)
        weakref.finalize(self, self._lane.leave).atexit = False
        self._numbers: dict[Tensor, int] = {}  # parameter -> its number, in the order of DDP's first buckets
        self._buckets: dict[int, Bucket] = {}
        self._memory: dict[Signature, dict[str, Tensor]] = {}
        self._cut: list[Signature] = []  # buckets of a loaded state: the next step is averaged in them
        # DDP's buckets of that step, until its last one.
        self._waiting: list[tuple[dist.GradBucket, Future[Tensor]]] = []
        self._error: BaseException | None = None

    @property
    def bytes_sent(self) -> float:
        """Bytes this rank has put on the wire."""
        return self._clock.bytes_sent

    # -- a bucket ----------------------------------------------------------------------------------------------

    def start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to average a bucket over the ranks.

        The future's value is its buffer. All ranks call it in the same order.
        """
        if self._error is not None:
            raise self._error
        with translated_errors(lambda error: self._fail(error, self.step)):
            return self._start(bucket)

    def _start(self, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        self._check(buffer)
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        if self._cut:
            self._wait_for_all(bucket, future)
        else:
            self._submit(self._known(bucket.index(), bucket.parameters(), buffer), buffer, future)
        if bucket.is_last():
            self._forget_beyond(max(bucket.index(), len(self._cut) - 1))
            self._cut, self._waiting = [], []
            self.step += 1
        return future.then(_value)  # `_value` raises an error: DDP would take an exception for the value

    def _submit(self, known: Bucket, buffer: Tensor, future: Future[Tensor], program: Program | None = None) -> None:
        """Average on the lane; the future's value is the buffer."""
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        self._num_started += 1
        tags = (1 + self._num_started % NUM_TAG_RANGES) * TAG_SPAN
        endpoint = Endpoint(
            self._transport.for_lane(0), self._clock, self._mailbox, spins=LANE_SPINS, tags=tags, task=self._num_started
        )
        averaging = lower(known.ctx, program or self._average(known, buffer, self.step, ready))
        task = Task(averaging, endpoint, self._clock, _answer)
        task.handle.then = partial(self._end, task.handle, future, buffer, self.step)
        self._lane.submit(task)

    def _wait_for_all(self, bucket: dist.GradBucket, future: Future[Tensor]) -> None:
        """Take part in the first step after a state was loaded.

        DDP then has its first buckets, but the codecs' memory belongs to the saved run's buckets. So when all gradients
        are ready, they are averaged in the saved run's buckets and copied back.
        """
        self._waiting.append((bucket, future))
        if not bucket.is_last():
            return
        parts: dict[int, tuple[Tensor, Tensor]] = {}  # number -> parameter, its gradient in DDP's buffer
        for one, _ in self._waiting:
            for param, gradient in zip(one.parameters(), one.gradients(), strict=True):
                parts[self._numbers.setdefault(param, len(self._numbers))] = (param, gradient)
        saved = {number: tuple(shape) for signature in self._cut for number, *shape in signature}
        if saved != {number: tuple(param.shape) for number, (param, _) in parts.items()}:
            raise ConfigError(
                "the state of the hook was saved with another model, or with other parameters frozen: load it with the "
                "same"
            )
        for index, signature in enumerate(self._cut):
            pairs = [parts[number] for number, *_ in signature]
            parameters, gradients = [param for param, _ in pairs], [gradient for _, gradient in pairs]
            joined = torch.cat([_in_memory_order(gradient) for gradient in gradients])
            known = self._known(index, parameters, joined)
            ready = torch.cuda.current_stream(joined.device).record_event() if joined.is_cuda else None
            last = index == len(self._cut) - 1
            done: Future[Tensor] = Future(devices=[joined.device]) if joined.is_cuda else Future()
            program = self._average_and_return(known, joined, gradients, self.step, ready)
            if last:  # a lane works in order, so the others have ended by then
                done.then(partial(_end_all, self._waiting))
            self._submit(known, joined, done, program)

    def _average_and_return(
        self, bucket: Bucket, joined: Tensor, gradients: list[Tensor], step: int, ready: Any
    ) -> Program:
        yield from self._average(bucket, joined, step, ready)
        for gradient, mean in zip(gradients, joined.split([gradient.numel() for gradient in gradients]), strict=True):
            _in_memory_order(gradient).copy_(mean)

    def _average(self, bucket: Bucket, buffer: Tensor, step: int, ready: Any) -> Program:
        """Average a bucket, on the lane's thread.

        Divides first, as DDP does: in 16 bits the sum may overflow where the mean does not.
        """
        if self._error is not None:
            raise self._error
        if ready is not None:  # the lane uses its thread's stream
            torch.cuda.current_stream(buffer.device).wait_event(ready)
        self._clock.step = step
        if not self.collective.lossy:
            yield AllReduce(buffer.div_(self.num_workers), self.collective)
            return
        flat = buffer.to(bucket.layout.dtype).div_(self.num_workers)  # the buffer itself, unless it is of 16 bits
        yield AllReduce(Gradient(flat, bucket.layout, step, step), self.collective)
        if flat is not buffer:
            buffer.copy_(flat)

    def _end(self, handle: TaskHandle, future: Future[Tensor], buffer: Tensor, step: int) -> None:
        error = handle.error
        if error is None:
            future.set_result(buffer)
        else:
            error = self._fail(error, step)
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]  # a wrong annotation

    def _fail(self, error: BaseException, step: int) -> BaseException:
        """Announce the error to the other ranks, and fail every later bucket of this rank.

        Returns the error to raise.
        """
        error = cause_of(error, self._transport, self._detector)
        if self._detector is not None and lost_connection(error):  # no rank failed
            ended = self._detector.departed() or ([1 - self.rank] if self.num_workers == 2 else [])
            who = f"rank {ended[0]}" if ended else "another rank"
            error = PeerFailed(
                f"the connection to {who} was lost at step {step}, and no error was reported. A rank with fewer "
                "batches ends early: give every rank the same number (DistributedSampler(drop_last=True)), or read "
                "that rank's output"
            )
        if self._error is None:
            self._error = error
            if not isinstance(error, PeerFailed):
                reason = f"rank {self.rank} failed at step {step}: {type(error).__name__}: {error}"
                self._transport.announce_failure(reason)
        return error

    # -- memory of codecs --------------------------------------------------------------------------------------

    def _check(self, buffer: Tensor) -> None:
        if buffer.is_sparse:
            raise ConfigError("a sparse gradient cannot be sent through ddp_hook: make the embedding with sparse=False")
        if buffer.device != self._transport.device:
            raise ConfigError(
                f"a bucket is on {buffer.device}, and ddp_hook was made for {self._transport.device}: with NCCL call "
                "torch.cuda.set_device before ddp_hook; with gloo keep the model on the CPU"
            )

    def _known(self, index: int, params: list[Tensor], buffer: Tensor) -> Bucket:
        """The bucket of that number. Its memory is that of the same parameters, if they were in one bucket before."""
        numbers = [self._numbers.setdefault(param, len(self._numbers)) for param in params]
        signature = tuple((number, *param.shape) for number, param in zip(numbers, params, strict=True))
        before = self._buckets.get(index)
        if before is None or before.signature != signature:
            layout = _layout_of(index, params, buffer)
            memory = self._memory.setdefault(signature, {})
            ctx = Context(
                self.rank, self.num_workers, layout=layout, seed=derive_seed(self.seed, f"ddp/{index}"), memory=memory
            )
            ctx.link = self._link
            self._buckets[index] = Bucket(signature, layout, ctx)
            self._forget(before)
        return self._buckets[index]

    def _forget(self, bucket: Bucket | None) -> None:
        """Drop the memory of a bucket that no longer exists. Loaded memory stays until a bucket has used it."""
        if bucket is not None and bucket.signature not in {item.signature for item in self._buckets.values()}:
            self._memory.pop(bucket.signature, None)

    def _forget_beyond(self, last: int) -> None:
        for index in [index for index in self._buckets if index > last]:
            self._forget(self._buckets.pop(index))

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory, as copies of tensors and plain values that `torch.load` reads.

        Call it between two steps.
        """
        kept = [
            {
                "parameters": [list(item) for item in signature],
                "values": {name: value.clone() for name, value in memory.items()},
            }
            for signature, memory in self._memory.items()
            if memory
        ]
        cut = [[list(item) for item in self._buckets[index].signature] for index in sorted(self._buckets)]
        return {**self._place(), "step": self.step, "memory": kept, "buckets": cut}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from this rank's `state_dict`, with the same model. Call it before the first step.

        The gradients are bit-identical to those of a run that was not stopped. A new DDP begins with other buckets than
        it has later, so the first step is averaged in the saved run's buckets, after backward. The exception is a state
        that was saved after the first step: DDP makes its new buckets after that step, and they are not in the state.

        Raises:
            ConfigError: it is of another rank, number of ranks or collective; in the first step, of another model.
        """
        for name, value in self._place().items():
            if saved[name] != value:
                raise ConfigError(
                    f"the state of the hook was saved with {name} {saved[name]}, and not {value}: load each rank's own"
                )
        self.step = saved["step"]
        self._buckets.clear()
        self._numbers.clear()  # a loaded state numbers parameters as a new DDP brings them
        self._cut = [tuple(tuple(item) for item in signature) for signature in saved.get("buckets", ())]
        self._memory = {
            tuple(tuple(item) for item in kept["parameters"]): {
                name: value.to(self._transport.device if value.ndim else "cpu", copy=True)
                for name, value in kept["values"].items()
            }
            for kept in saved["memory"]
        }

    def _place(self) -> dict[str, Any]:
        return {"rank": self.rank, "num_workers": self.num_workers, "collective": repr(self.collective)}

    def close(self) -> None:
        """End the thread and destroy the groups; every rank calls it. Call it if one process makes many hooks."""
        self._lane.close()
        stop_watching(self._detector)
        self._transport.close()


@atexit.register
def _end_lanes() -> None:
    """End the threads of all hooks. A thread that releases a process group while the interpreter ends would abort it."""
    for lane in list(_lanes):
        lane.close()


def ddp_hook(
    *,
    collective: Collective | None = None,
    codec: Codec | None = None,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    timeout_s: float | None = 120.0,
) -> tuple[DDPHook, Any]:
    """A communication hook for torch's DistributedDataParallel: (state, hook), as `register_comm_hook` takes them.

    Each bucket is averaged over the ranks by `collective`, in the background of backward, one bucket after the other.
    All ranks call it, after torch.distributed was initialised, and in the same order if more than once. The gradients
    are those of `SynchronousSGD(collective=...)`: without a codec DDP's own, to rounding; with a codec they have its
    error, equal on all ranks. One rank's failure ends backward on all with an error that names it.

    Nothing is copied, unless a codec meets a model of 16-bit parameters: then a bucket is summed in float32.

    Args:
        collective: any of `workbench.collectives`, such as `PowerSGD()`. None: `Native()`, or with a codec `Ring()`.
        codec: compresses the messages of the collective.
        process_group: the one that DDP was given; None for the default.
        seed: of stochastic codecs and first factors; the same on all ranks.
        timeout_s: how long a bucket waits for another rank; None: no limit.

    Returns:
        state: a `DDPHook`; with error feedback or PowerSGD its `state_dict()` belongs to a checkpoint.
        hook: what DDP calls.

    Raises:
        LaunchError: torch.distributed is not initialised.
        ConfigError: the codec and the collective do not match, or there are too many or too few ranks.

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
    if not (dist.is_available() and dist.is_initialized()):
        raise LaunchError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group before ddp_hook"
        )
    collective.check(dist.get_world_size(process_group))
    return DDPHook(collective, process_group, seed, timeout_s), hook


def hook(state: DDPHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """The function that DDP calls with each bucket."""
    return state.start(bucket)


def _value(future: Future[Tensor]) -> Tensor:
    return future.value()


def _answer(request: Request, task: Caller) -> Any:
    handler = COMMUNICATION.get(type(request))
    if handler is None:
        raise TypeError(
            f"{type(request).__name__} cannot be answered inside torch's DDP: a collective sends, receives and sums"
        )
    return handler(None, task, request)


def _end_all(waiting: list[tuple[dist.GradBucket, Future[Tensor]]], done: Future[Tensor]) -> None:
    """Complete the futures of DDP's buckets: all with their averages, or all with the error."""
    try:
        done.value()
    except Exception as error:  # noqa: BLE001 - for any error: DDP waits for it on every future
        for _, future in waiting:
            future.set_exception(error)  # type: ignore[arg-type]  # a wrong annotation
        return
    for bucket, future in waiting:
        future.set_result(bucket.buffer())


def _in_memory_order(gradient: Tensor) -> Tensor:
    """A gradient in DDP's buffer as a flat view, its numbers in order of memory (channels last, for example)."""
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def _layout_of(index: int, parameters: list[Tensor], buffer: Tensor) -> Layout:
    """DDP's bucket `index` as a gradient without a tail.

    Every rank counts the same, and DDP itself knows which parameters were used. DDP puts gradients one after the other,
    each as its parameter lies in memory.
    """
    offsets = [0, *accumulate(param.numel() for param in parameters)]
    dtype = torch.promote_types(torch.float32, buffer.dtype)
    slots = tuple(
        Slot(
            index=place,
            name=f"parameter {place} of bucket {index}",
            shape=tuple(param.shape),
            stride=tuple(torch.empty_like(param, device="meta").stride()),
            offset=offset,
            numel=param.numel(),
            bucket=0,
            dtype=param.dtype,
        )
        for place, (param, offset) in enumerate(zip(parameters, offsets, strict=False))
    )
    end = buffer.numel()
    return Layout(slots, (BucketSlice(0, slots, 0, end, end),), end, dtype, buffer.device)
