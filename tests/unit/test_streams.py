"""The order of work on a GPU, without one: a model of streams checks that each value is read after its write.

`ModelOfStreams` takes the place of CUDA's streams. A stream is a vector clock; an event is a copy of one; to wait for
an event is to take the larger of each entry. A test notes each write and read of a gradient's memory, with its stream.
A read that is not ordered after the last write is a race. So is a write that is not ordered after the last read.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.laws import tiny
from tests.laws.train import make_job
from workbench import ops
from workbench.algorithms import (
    AdaptiveDelaySGD,
    AsyncSGD,
    DeAR,
    DiLoCo,
    LayerwiseSGD,
    PartialAllReduce,
    PipeSGD,
    SynchronousSGD,
)
from workbench.algorithms.diloco import DiLoCoState
from workbench.collectives import Collective
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import EndStep, Program, Value
from workbench.program import Algorithm, Context, leaves, lower
from workbench.replica.backward import MicroBatch
from workbench.replica.local_training import LocalTraining
from workbench.replica.replica import Replica
from workbench.replica.server_copy import ServerCopy
from workbench.runtimes.checkpoint.rank_state import placed, resume, take_checkpoint
from workbench.runtimes.checkpoint.staging import StagingBuffers
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.execution.progress import ProgressEngine
from workbench.runtimes.execution.tasks import TaskHandle
from workbench.runtimes.rank import main
from workbench.runtimes.transport import mailbox, torch_distributed
from workbench.runtimes.transport.base import Deadline, Handle, SoloTransport
from workbench.runtimes.transport.mailbox import Mailbox
from workbench.runtimes.transport.torch_distributed import TorchTransport, agreed_backend, backend_of
from workbench.runtimes.transport.torch_handles import PointHandle, WaiterThreads
from workbench.settings import Settings
from workbench.streams import Streams
from workbench.trace.recorder import NullRecorder

Clock = dict[int, int]


def before(one: Clock, other: Clock) -> bool:
    """Whether everything in `one` has happened where `other` is."""
    return all(other.get(stream, 0) >= count for stream, count in one.items())


@final
class ModelOfStreams(Streams):
    """Streams as vector clocks. `races` says in a sentence what was not in order."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {0: {}}
        self.races: list[str] = []
        self.written: dict[tuple[int, int], Clock] = {}
        self.read_at: dict[tuple[int, int], list[Clock]] = defaultdict(list)
        self.num_host_waits = 0
        self._here = threading.local()
        self._lock = threading.RLock()

    def current(self) -> int:
        return getattr(self._here, "stream", 0)

    def new(self) -> int:
        with self._lock:
            self.clocks[len(self.clocks)] = {}
            return len(self.clocks) - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        outer = self.current()
        self._here.stream = stream
        yield
        self._here.stream = outer

    def record_event(self) -> Clock:
        with self._lock:
            return dict(self.clocks[self.current()])

    def completed_event(self) -> Clock:
        return {}

    def wait(self, event: Clock | None) -> None:
        with self._lock:
            clock = self.clocks[self.current()]
            for stream, count in (event or {}).items():
                clock[stream] = max(clock.get(stream, 0), count)

    def finish(self) -> None:
        self.num_host_waits += 1

    @contextmanager
    def after(self, event: Clock | None) -> Iterator[None]:
        event = self.record_event() if event is None else event
        reader = self.new()
        with self.on(reader):
            self.wait(event)
            yield
        self.wait(self.clocks[reader])  # the host has read: what it enqueues from here on comes later

    def write(self, value: Value, what: str) -> None:
        """The calling thread's stream is given work that writes there."""
        with self._lock:
            clock = self.clocks[self.current()]
            keys = places(value)
            for key in keys:
                for seen in [self.written.get(key, {}), *self.read_at.pop(key, [])]:
                    if not before(seen, clock):
                        self.races.append(f"{what} overwrites memory that is still in use")
            clock[self.current()] = clock.get(self.current(), 0) + 1
            self.written.update({key: dict(clock) for key in keys})

    def read(self, value: Value, what: str) -> None:
        """It is given work that reads there."""
        with self._lock:
            clock = self.clocks[self.current()]
            if not all(before(self.written.get(key, {}), clock) for key in places(value)):
                self.races.append(f"{what} reads memory before it is written")
            clock[self.current()] = clock.get(self.current(), 0) + 1
            for key in places(value):
                self.read_at[key].append(dict(clock))


def places(value: Value) -> list[tuple[int, int]]:
    """(memory, bucket) of each bucket of a gradient, or of the one that it is. A tensor is bucket 0."""
    if not isinstance(value, Gradient):
        return [(value.untyped_storage().data_ptr(), 0)]
    memory = value.flat.untyped_storage().data_ptr()
    return [(memory, piece.index) for piece, _ in value.slices()]


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Noted(Collective):
    """A sum over one rank: nothing to add, but the device is given work that reads and writes the value, on the stream at hand."""

    streams: ModelOfStreams = field(compare=False)

    @property
    def splits(self) -> bool:
        return True

    def all_reduce(self, ctx: Context, value: Value) -> Program:
        if isinstance(value, Gradient):
            yield ops.Local(
                "sum", value.message_bytes, partial(self.streams.read, value, f"the sum of step {value.step}")
            )
            yield ops.Local(
                "sum", value.message_bytes, partial(self.streams.write, value, f"the sum of step {value.step}")
            )
        return value

    def reduce_scatter(self, ctx: Context, value: Value) -> Program:
        return self.all_reduce(ctx, value)

    def all_gather(self, ctx: Context, value: Value) -> Program:
        return self.all_reduce(ctx, value)

    def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
        return 0.0


@dataclass
class Watched:
    """A rank whose device is the model."""

    interpreter: Interpreter
    replica: Replica

    def train(self, algorithm: Algorithm, num_steps: int) -> None:
        ctx = Context(0, 1, num_steps=num_steps, layout=self.replica.layout)
        program = lower(ctx, algorithm.worker(ctx))
        while (self.interpreter.advance(program)) is not None:
            pass
        self.interpreter.close()


def watched(streams: ModelOfStreams, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A rank that notes what backward, the host, messages to itself and the optimizer do with gradients."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    buckets = algorithm.requires.buckets
    replica = Replica(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        bucket_bytes=buckets.max_bytes,
        applies_buckets=buckets.applied_singly,
        num_buckets=buckets.count,
    )
    replica.streams = streams
    transport = SoloTransport()
    transport.__dict__["streams"] = streams
    replica.make_server_copy = lambda: ServerCopy(replica.parameters, replica.layout, partial(torch.optim.SGD, lr=0.1))
    seal, apply, tail, with_header = replica._seal, replica.apply, Gradient.tail, mailbox.with_header
    original_put, original_take, here = Mailbox.put, Mailbox.take, threading.RLock()

    def sealed(state: Any, bucket: int) -> None:
        streams.write(state.gradient.bucket_view(bucket), f"backward of step {state.gradient.step}")
        seal(state, bucket)

    def read_tail(gradient: Gradient, bucket: int | None = None) -> Tensor:
        streams.read(gradient, f"the host, for the tail of step {gradient.step},")
        return tail(gradient, bucket)

    def sent(flat: Tensor, stamp: int) -> Tensor:
        streams.read(flat, "a message")
        message = with_header(flat, stamp)
        streams.write(message, "a message")
        return message

    def put(self: Mailbox, flat: Tensor, tag: int) -> Handle:
        with here:
            handle = original_put(self, flat, tag)
            streams.read(flat, "a message to the rank itself")
            streams.write(self._messages[tag][-1][0], "a message to the rank itself")
            return handle

    def take(self: Mailbox, tag: int) -> Any:
        with here:
            return original_take(self, tag)

    def applied(gradient: Gradient, *args: Any, **named: Any) -> int:
        streams.read(gradient, f"the update of step {gradient.step}")
        return apply(gradient, *args, **named)

    monkeypatch.setattr(replica, "_seal", sealed)
    monkeypatch.setattr(Gradient, "tail", read_tail)
    monkeypatch.setattr(mailbox, "with_header", sent)
    monkeypatch.setattr(Mailbox, "put", put)
    monkeypatch.setattr(Mailbox, "take", take)
    monkeypatch.setattr(replica, "apply", applied)
    data = torch.randn(8, 5)
    micro = [MicroBatch(lambda: model(data).square().mean(), 1.0, 8)]
    return Watched(Interpreter(transport, replica, NullRecorder(), lambda step: micro, timeout_s=20.0), replica)


def algorithms(streams: ModelOfStreams) -> list[Algorithm]:
    noted = Noted(streams=streams)
    return [
        SynchronousSGD(collective=noted),
        PipeSGD(width=2, collective=noted),
        PipeSGD(width=4, lanes=3, collective=noted),
        PipeSGD(width=3, first="duplicate", collective=noted),  # type: ignore[arg-type]  # the string is the member
        LayerwiseSGD(bucket_bytes=0, collective=noted),
        LayerwiseSGD(bucket_bytes=0, apply="any", lanes=2, collective=noted),  # type: ignore[arg-type]
        LayerwiseSGD(bucket_bytes=0, order="priority", collective=noted),  # type: ignore[arg-type]
        DeAR(bucket_bytes=0, collective=noted),
        AdaptiveDelaySGD(max_delay=2, adapt_every=3, collective=noted),
        PartialAllReduce(quorum="solo", collective=noted),  # type: ignore[arg-type]
        AsyncSGD(),
    ]


NAMES = [
    "synchronous",
    "pipe",
    "pipe-lanes",
    "pipe-duplicate",
    "layerwise",
    "layerwise-any",
    "layerwise-priority",
    "dear",
    "adaptive",
    "partial",
    "server",
]


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_what_is_read_was_written_before_on_every_stream(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ModelOfStreams()
    algorithm = algorithms(streams)[number]
    watched(streams, algorithm, monkeypatch).train(algorithm, 7)
    assert streams.races == []
    assert len(streams.written) > 0, "nothing was noted"


@pytest.mark.parametrize("missing", ["begin", "end", "tail"])
def test_a_missing_event_is_found(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a lane waits for, or what waits for a lane, the model sees a race."""
    streams = ModelOfStreams()
    algorithm = PipeSGD(width=2, collective=Noted(streams=streams))
    rank = watched(streams, algorithm, monkeypatch)
    if missing == "begin":
        monkeypatch.setattr(streams, "record_event", dict)
    elif missing == "end":
        end = TaskHandle.end
        monkeypatch.setattr(
            TaskHandle, "end", lambda self, value=None, error=None, ready=None: end(self, value, error, {})
        )
    else:  # the host waits for the backward's end, as if the sum had been taken on its stream
        before_sum: dict[int, Clock] = {}
        start: Callable[[Any, ops.Start], Any] = ProgressEngine.start

        def started(self: ProgressEngine, request: ops.Start) -> Any:
            before_sum[len(before_sum)] = streams.record_event()
            return start(self, request)

        monkeypatch.setattr(ProgressEngine, "start", started)
        original = streams.after
        monkeypatch.setattr(streams, "after", lambda event: original(before_sum[max(0, len(before_sum) - 2)]))
    rank.train(algorithm, 5)
    assert streams.races != []


def test_now_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdaptiveDelaySGD compares seconds of compute and communication: on a GPU a time is taken when the work before it is done."""
    streams = ModelOfStreams()
    algorithm = AdaptiveDelaySGD(max_delay=1, adapt_every=4, collective=Noted(streams=streams))
    watched(streams, algorithm, monkeypatch).train(algorithm, 3)
    assert streams.num_host_waits >= 3 * 4, "a step asks for the time around its backward, its sum and its update"


def test_the_host_reads_a_tail_without_waiting_for_the_next_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipe-SGD's point: the event before the tail of step t says nothing of step t + 1."""
    streams = ModelOfStreams()
    algorithm = PipeSGD(width=2, collective=Noted(streams=streams))
    rank = watched(streams, algorithm, monkeypatch)
    seen: list[tuple[int, int]] = []
    tail = Gradient.tail

    def read_tail(gradient: Gradient, bucket: int | None = None) -> Tensor:
        seen.append((streams.clocks[0].get(0, 0), streams.record_event().get(0, 0)))
        return tail(gradient, bucket)

    monkeypatch.setattr(Gradient, "tail", read_tail)
    rank.train(algorithm, 5)
    assert all(waited_for < newest for newest, waited_for in seen[:-1]), f"(work enqueued, work waited for) is {seen}"


def test_a_step_does_not_wait_for_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when the next step has been enqueued, and after the events of its own step only."""
    streams, transport = ModelOfStreams(), SoloTransport()
    transport.device = torch.device("cuda")
    transport.__dict__["streams"] = streams
    monkeypatch.setattr(main, "LocalTraining", lambda *given: LocalTraining(*given[:-1], torch.device("cpu")))
    backward, metrics, seen = Replica.backward, LocalTraining.metrics, []

    def noted_backward(self: Replica, step: int, *given: Any) -> Any:
        gradient, loss = backward(self, step, *given)
        streams.write(gradient, f"backward of step {step}")
        seen.append(f"backward {step}")
        return gradient, loss

    def noted_metrics(self: LocalTraining, step: int, *given: Any, **named: Any) -> Any:
        seen.append(f"loss {step}, after {streams.record_event()[0]} backward passes")
        return metrics(self, step, *given, **named)

    monkeypatch.setattr(Replica, "backward", noted_backward)
    monkeypatch.setattr(LocalTraining, "metrics", noted_metrics)
    monkeypatch.setattr(SoloTransport, "enter_thread", lambda self: None)
    settings = Settings(steps=3, batch_size=4, timeout_s=30, optimizer=tiny.sgd)
    main.run_rank(make_job("torch", 1, SynchronousSGD(), tiny.problem(), settings), transport)
    assert seen == [
        "backward 0",
        "backward 1",
        "loss 0, after 1 backward passes",
        "backward 2",
        "loss 1, after 2 backward passes",
        "loss 2, after 3 backward passes",
    ]


# -- which library, which device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b", "c"], "nccl"),  # also where each rank sees one GPU alone: its own
        (["a", "a", "c"], "gloo"),  # NCCL wants one for each rank
        (["a", "", "c"], "gloo"),
        (["", "", ""], "gloo"),
    ],
)
def test_all_ranks_choose_one_library(gpus: list[str], backend: str) -> None:
    store = torch.distributed.HashStore()
    chosen: dict[int, str] = {}

    def choose(rank: int) -> None:
        chosen[rank] = agreed_backend(store, rank, len(gpus), gpus[rank])

    threads = [threading.Thread(target=choose, args=(rank,)) for rank in range(len(gpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert chosen == dict.fromkeys(range(len(gpus)), backend)


def test_a_checkpoint_is_placed_on_the_device_but_counts_stay_on_the_host() -> None:
    device = torch.device("meta")  # stands for a GPU: any device but the one the file was read to
    assert placed(torch.ones(3), device).device == device
    assert placed(torch.ones((), dtype=torch.int64), device).device == torch.device("cpu")
    assert placed(5, device) == 5


def test_a_resumed_run_has_its_memory_and_its_state_on_the_device() -> None:
    """Residuals, factors and anchors; a count of sums stays on the host."""
    model = nn.Linear(3, 2, device="meta")
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    algorithm, ctx = DiLoCo(), Context(0, 1, layout=replica.layout)
    end = EndStep(4, state=DiLoCoState(anchor=torch.ones(2)))
    memory = {"residual": torch.ones(3), "calls": torch.ones((), dtype=torch.int64)}
    resume(take_checkpoint(algorithm, replica, 1, end, memory), algorithm, replica, ctx)
    assert {name: value.device.type for name, value in ctx.memory.items()} == {"residual": "meta", "calls": "cpu"}
    assert [value.device.type for value in leaves(ctx.resumed)] == ["meta"]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group of this process, made without a backend's name."""
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "has_gpu", "backend"),
    [
        (None, False, "gloo"),
        ("cpu:gloo,cuda:nccl", True, "nccl"),
        ("cpu:gloo,cuda:nccl", False, "gloo"),
        ("cpu:gloo", True, "gloo"),
    ],
)
@pytest.mark.usefixtures("group_of_one")
def test_a_group_without_a_backends_name_has_that_of_the_ranks_device(
    config: str | None, has_gpu: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls its backend "undefined"."""
    if config is not None:
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert backend_of(None) == backend


class OnGpu(Tensor):
    """Host memory that passes for a GPU's."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


class Pinned(TorchFunctionMode):
    """Notes how much pinned memory is asked for, and gives any other: without a GPU there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        if is_pinned:
            self.numels.append(result.numel())
        return result


@final
class NcclTransport:
    """A rank of a group that passes for NCCL's; its groups are gloo's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: list[Any] = []
        new_group = torch.distributed.new_group

        def new(backend: str, **given: Any) -> Any:
            group = new_group(backend="gloo", **given)
            if backend == "nccl":
                self.groups.append(group)
            return group

        monkeypatch.setattr(torch.distributed, "new_group", new)
        monkeypatch.setattr(torch_distributed, "backend_of", lambda group: "nccl")
        self.transport = TorchTransport(device=torch.device("cpu"), timeout_s=20.0)


@pytest.fixture
def nccl(group_of_one: None, monkeypatch: pytest.MonkeyPatch) -> NcclTransport:
    return NcclTransport(monkeypatch)


@pytest.mark.parametrize("failed", [True, False])
def test_groups_of_a_failed_run_are_aborted(failed: bool, nccl: NcclTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog would end the process minutes later. gloo has no such watchdog, and messages go through the host's group."""
    aborted: list[Any] = []
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", aborted.append)
    nccl.transport.open_lanes(3)
    if failed:
        nccl.transport.announce_failure("rank 1 failed")
    nccl.transport.close()
    assert len(nccl.groups) == 4, "the foreground's, and one a lane"
    assert set(aborted) == (set(nccl.groups) if failed else set())


def test_sixteen_bit_integers_are_refused_before_nccl_is_asked(nccl: NcclTransport) -> None:
    deadline = Deadline("the test", lambda: None, 20.0)
    for begin in (lambda flat: nccl.transport.all_reduce(flat, deadline), nccl.transport.start_all_reduce):
        with pytest.raises(ConfigError, match=r"nccl cannot sum 16-bit integers.*inner=Ring\(\)"):
            begin(torch.ones(3, dtype=torch.int16))
    nccl.transport.close()


def test_messages_and_checkpoints_go_through_pinned_memory(
    nccl: NcclTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of other memory does not overlap with anything.

    The library may read the copy when the device has made it.
    """

    class Work:
        def wait(self) -> None:
            """It has come."""

    def receive(host: Tensor, *_: Any, **__: Any) -> Work:
        host.fill_(7.0)
        return Work()

    monkeypatch.setattr(torch.distributed, "irecv", receive)
    transport, streams = nccl.transport, ModelOfStreams()
    transport.__dict__["streams"] = streams
    values = torch.arange(3.0).as_subclass(OnGpu)
    with Pinned() as pinned:
        host = transport._to_host(values)
        assert (pinned.numels, host.tolist(), streams.num_host_waits) == ([3], [0.0, 1.0, 2.0], 1)
        transport.start_recv(0, values, 5).wait(Deadline("the test", lambda: None, 20.0))
        assert (pinned.numels, values.tolist()) == ([3, 3], [7.0] * 3)
        StagingBuffers().take({"weights": torch.ones(4).as_subclass(OnGpu)})
        assert pinned.numels == [3, 3, 4]
        StagingBuffers().take({"weights": torch.ones(4)})
        assert transport._to_host(torch.ones(3)).numel() == 3
        assert len(pinned.numels) == 3, "host memory needs no copy"
    transport.close()


def test_a_message_is_copied_to_the_device_by_the_thread_that_asks_for_it() -> None:
    """The library's waiting thread has a stream of its own: a copy on it would not be ordered with the receiver's work."""
    copying: list[str] = []

    class Target:
        def copy_(self, host: Tensor) -> None:
            copying.append(threading.current_thread().name)

    class Work:
        def wait(self) -> None:
            """It has come."""

    waiters = WaiterThreads()
    handle = PointHandle(Work(), torch.zeros(1), 0, Target(), None, waiters)  # type: ignore[arg-type]  # all that is used of it
    assert handle.event.wait(20)
    assert copying == []
    assert handle.poll()
    assert handle.poll()
    assert copying == [threading.current_thread().name]
    waiters.close()


def test_library_sums_on_several_lanes_are_refused_where_threads_would_begin_them_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL: two ranks that begin the sums of two lanes in different orders wait for each other."""

    @dataclass(frozen=True, slots=True, kw_only=True, repr=False)
    class Through(Collective):
        def all_reduce(self, ctx: Context, value: Value) -> Program:
            return (yield ops.AllReduce(value))

        def bytes_sent(self, rank: int, num_workers: int, numel: int, itemsize: int, tail: int = 0) -> float:
            return 0.0

    streams = ModelOfStreams()
    algorithm = PipeSGD(width=3, lanes=2, collective=Through())
    rank = watched(streams, algorithm, monkeypatch)
    rank.interpreter.transport.sums_from_threads = False
    rank.interpreter.transport.for_lane = lambda lane: rank.interpreter.transport  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="use lanes=1"):
        rank.train(algorithm, 4)


def test_hooks_on_autograds_thread_do_not_call_a_library_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ModelOfStreams()
    algorithm = LayerwiseSGD(bucket_bytes=0, collective=Noted(streams=streams))
    rank = watched(streams, algorithm, monkeypatch)
    rank.interpreter.transport.has_threads = False
    backward = rank.replica.backward

    def elsewhere(*args: Any) -> Any:
        """As on a GPU: what backward calls, it calls from another thread."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(backward(*args))
            except ConfigError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(timeout=30)
        if isinstance(found[0], ConfigError):
            raise found[0]
        return found[0]

    monkeypatch.setattr(rank.replica, "backward", elsewhere)
    with pytest.raises(ConfigError, match="MPI_THREAD_MULTIPLE"):
        rank.train(algorithm, 2)
