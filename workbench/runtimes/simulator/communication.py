"""How a simulated program's communication requests are answered in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workbench import ops
from workbench.collectives import flat_of, native_bytes
from workbench.errors import ConfigError
from workbench.gradients import Gradient, block_bounds
from workbench.ops import Message, Request
from workbench.runtimes.execution.endpoint import bucket_of, not_lowered, size_of
from workbench.runtimes.transport.mailbox import STAMP_BYTES

if TYPE_CHECKING:
    from workbench.runtimes.simulator.process import SimProcess

Then = Callable[[Any], None]
Load = tuple[torch.Tensor, int, bool]  # content, stamp, whether it has one
PENDING = object()  # the answer to a request that takes time
Combine = Callable[[list[Any]], None]


def communicate(thread: SimProcess, request: Request, then: Then, channel: str) -> None:
    """Begin a request; `then` is called with its answer when it is done. `channel` names the collectives it is in step with."""
    if request.__class__ is ops.Send:
        return _send(thread, request, then)
    if request.__class__ is ops.Recv:
        return _receive(thread, request, then)
    network, p, rank = thread.simulation.network, thread.simulation.num_workers, thread.worker.rank
    match request:
        case ops.AllReduce(value, None):
            size = size_of(value)
            _join(thread, f"{channel} all-reduce", "all_reduce", value, network.all_reduce_s(size, p), native_bytes(p, size), _sum, then)
        case ops.ReduceScatter(value, None):
            size = size_of(value)
            seconds = network.reduce_scatter_s(size, p)
            _join(thread, f"{channel} reduce-scatter", "reduce_scatter", value, seconds, native_bytes(p, size) / 2, _sum_blocks, then)
        case ops.AllGather(value, None):
            size = size_of(value)
            seconds = network.all_gather_s(size, p)
            _join(thread, f"{channel} all-gather", "all_gather", value, seconds, native_bytes(p, size) / 2, _gather_blocks, then)
        case ops.Broadcast(value, root):
            size = size_of(value)
            sent = size if rank == root else 0
            combine = _copy_from(root)
            _join(thread, f"{channel} broadcast", "broadcast", value, network.broadcast_s(size, p), sent, combine, then)
        case ops.Barrier():
            _join(thread, f"{channel} barrier", "barrier", None, network.barrier_s(p), 0, lambda values: None, then)
        case _:
            raise not_lowered(request)


def _send(thread: SimProcess, request: ops.Send, then: Then) -> None:
    worker, value = thread.worker, request.value
    flat = flat_of(value)
    snapshot = flat.clone() if worker.has_values else flat  # what a wire would have copied
    num_bytes = flat.numel() * flat.element_size() + (0 if request.stamp is None else STAMP_BYTES)
    counted = 0 if request.to == worker.rank else num_bytes

    def sent(begin: float) -> None:
        worker.bytes_sent += counted
        span(thread, "send", begin, value, counted, request.to)
        then(None)

    load = (snapshot, request.stamp or 0, request.stamp is not None)
    fabric = thread.simulation.fabric
    fabric.send(thread.key, request.tag, request.to, worker.rank, num_bytes, load, sent, fabric.clock.now_s, thread.priority)


def _receive(thread: SimProcess, request: ops.Recv, then: Then) -> None:
    worker, simulation, like = thread.worker, thread.simulation, request.like

    def received(begin: float, sender: int, load: Load) -> None:
        check_arrived(worker.rank, like, request.stamped, sender, load)
        if worker.traced:
            num_bytes = 0 if sender == worker.rank else size_of(like)
            worker.recorder.span("recv", "comm", begin, simulation.clock.now_s, worker.step, -1, num_bytes, sender)
        then(Message(sender, load[0], load[1]))

    source = request.source if request.source != ops.ANY else thread.source_of_any()
    begin, departures = simulation.clock.now_s, simulation.departures
    if departures is None or not request.departures or not departures.receive(thread, request, received, begin, then):
        simulation.fabric.receive(thread.key, request.tag, source, worker.rank, received, begin)


def receive_here(thread: SimProcess, request: ops.Recv) -> Any:
    """Begin a receive for which the thread waits."""
    thread.pending, fabric, source = request, thread.simulation.fabric, request.source
    thread.begun_s = fabric.clock.now_s
    if source < 0 and thread.script:
        source = thread.source_of_any()
    departures = thread.simulation.departures
    if departures is not None and request.departures and departures.receive(thread, request, _received_here, thread, thread.resume):
        return PENDING
    fabric.receive(thread.key, request.tag, source, thread.worker.rank, _received_here, thread)
    return PENDING


def _received_here(thread: SimProcess, sender: int, load: Load) -> None:
    request, worker = thread.pending, thread.worker
    assert isinstance(request, ops.Recv)
    if load[0] is not thread.agreed[0] or request is not thread.agreed[1]:
        check_arrived(worker.rank, request.like, request.stamped, sender, load)
        if not worker.has_values:
            thread.agreed = (load[0], request)
    if worker.traced:
        num_bytes, now_s = 0 if sender == worker.rank else size_of(request.like), thread.simulation.clock.now_s
        worker.recorder.span("recv", "comm", thread.begun_s, now_s, worker.step, -1, num_bytes, sender)
        if thread.task == 0:
            worker.recorder.span("wait", "compute", thread.begun_s, now_s, worker.step)
    thread.resume(Message(sender, load[0], load[1]))


def check_arrived(rank: int, like: torch.Tensor, stamped: bool, sender: int, load: Load) -> None:
    """Raise unless what arrived is what was asked for."""
    flat = load[0]
    if flat.numel() != like.numel() or flat.dtype != like.dtype:
        raise ConfigError(
            f"rank {rank} expected {like.numel()} elements of {like.dtype} from rank {sender}, which sent {flat.numel()} of {flat.dtype}"
        )
    assert load[2] == stamped, f"rank {sender} and rank {rank} do not agree on whether a message has a stamp"


def _join(
    thread: SimProcess,
    channel: str,
    kind: str,
    value: Any,
    seconds: float,
    num_bytes: float,
    combine: Callable[[list[Any]], None],
    then: Then,
) -> None:
    seal = _checksum(value) if thread.simulation.check_in_flight else None

    def finish(begin: float) -> None:
        thread.worker.bytes_sent += num_bytes
        span(thread, kind, begin, value, num_bytes)
        then(value)

    def combine_checked(values: list[Any]) -> None:
        for held, sealed in values:
            if sealed is not None and _checksum(held) != sealed:
                raise AssertionError(f"a gradient in flight was overwritten (rank {thread.worker.rank}, step {thread.worker.step})")
        combine([held for held, _ in values])

    thread.simulation.fabric.join(channel, (thread.worker.rank, (value, seal), finish), seconds, combine_checked)


def span(thread: SimProcess, kind: str, begin: float, value: Any, num_bytes: float, peer: int = -1) -> None:
    """Draw a message or a collective."""
    worker = thread.worker
    if not worker.traced:
        return
    step = value.step if isinstance(value, Gradient) and value.step >= 0 else worker.step
    worker.recorder.span(kind, "comm", begin, thread.simulation.clock.now_s, step, bucket_of(value), int(num_bytes), peer)


def _sum(values: list[Any]) -> None:
    """In rank order, into every rank's own memory."""
    flats = [flat_of(value) for value in values]
    for other in flats[1:]:
        flats[0].add_(other)
    for other in flats[1:]:
        other.copy_(flats[0])


def _sum_blocks(values: list[Any]) -> None:
    """In rank order, each block into its own rank's memory; what the others hold of it is no number any more."""
    flats = [flat_of(value) for value in values]
    bounds = block_bounds(flats[0].numel(), len(flats))
    for block, mine in enumerate(flats):
        where = slice(bounds[block], bounds[block + 1])
        total = flats[0][where].clone()
        for other in flats[1:]:
            total.add_(other[where])
        for other in flats:
            other[where].fill_(float("nan")) if other.is_floating_point() else other[where].zero_()
        mine[where].copy_(total)


def _gather_blocks(values: list[Any]) -> None:
    flats = [flat_of(value) for value in values]
    bounds = block_bounds(flats[0].numel(), len(flats))
    for block, mine in enumerate(flats):
        where = slice(bounds[block], bounds[block + 1])
        for other in flats:
            if other is not mine:
                other[where].copy_(mine[where])


def _copy_from(root: int) -> Callable[[list[Any]], None]:
    def copy(values: list[Any]) -> None:
        for position, value in enumerate(values):
            if position != root:
                flat_of(value).copy_(flat_of(values[root]))

    return copy


def _checksum(value: Any) -> int:
    return 0 if value is None or flat_of(value).is_meta else hash(flat_of(value).numpy().tobytes())
