"""Handlers of requests that communicate: messages between two ranks, and collectives of all ranks.

A request in the foreground has no ticket. A request that was started in the background has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench import ops
from workbench.collectives import flat_of, native_bytes
from workbench.errors import ConfigError
from workbench.gradients import Gradient, block_bounds
from workbench.ops import Message, PeerLeft, Ticket
from workbench.runtimes.execution.endpoint import bucket_of, not_lowered, size_of
from workbench.runtimes.simulator.comm_schedule import CommSchedule, SchedulePlayer
from workbench.runtimes.simulator.fabric import SENDER_LEFT
from workbench.runtimes.simulator.state import PENDING, SimCluster, SimProcess, complete
from workbench.runtimes.transport.mailbox import STAMP_BYTES

Load = tuple[torch.Tensor, int, bool]  # content, stamp, whether it has a stamp
Combine = Callable[[list[Any]], None]

# -- messages --------------------------------------------------------------------------------------------------


def send(cluster: SimCluster, process: SimProcess, request: ops.Send, ticket: Ticket | None = None) -> Any:
    """Send a message to its receiver."""
    worker, fabric = process.worker, cluster.fabric
    flat = flat_of(request.value)
    num_bytes = int(flat.nbytes)
    content = flat.clone() if worker.has_values else flat  # the program may overwrite its own
    load: Load = (content, 0, False)
    if request.stamp is not None:
        num_bytes += STAMP_BYTES
        load = (content, request.stamp, True)
    sending = (process, request, num_bytes, fabric.clock.now_s, ticket)
    envelope = (process.key, request.tag, worker.rank, request.to)
    fabric.send(envelope, num_bytes, load, _sent, sending, process.priority)
    return PENDING


def _sent(sending: tuple[SimProcess, ops.Send, int, float, Ticket | None]) -> None:
    process, request, num_bytes, begin_s, ticket = sending
    worker = process.worker
    counted = 0 if request.to == worker.rank else num_bytes
    worker.bytes_sent += counted
    if worker.traced:
        _span(process, "send", begin_s, request.value, counted, request.to)
    if ticket is not None:
        complete(process.cluster, ticket, None)
    else:
        process.waited(None, begin_s)


def receive(cluster: SimCluster, process: SimProcess, request: ops.Recv, ticket: Ticket | None = None) -> Any:
    """Ask for a message."""
    fabric, source, rank = cluster.fabric, request.source, process.worker.rank
    if source == ops.ANY and process.recorded is not None:
        source = process.recorded.source()
    receiving = (process, request, fabric.clock.now_s, ticket)
    envelope = (process.key, request.tag, source, rank)
    if request.departures and fabric.may_lose:
        fabric.receive_or_departure(envelope, _received, receiving)
    else:
        fabric.receive(envelope, _received, receiving)
    return PENDING


def _received(receiving: tuple[SimProcess, ops.Recv, float, Ticket | None], sender: int, load: Any) -> None:
    process, request, begin_s, ticket = receiving
    worker, cluster = process.worker, process.cluster
    message: Message | PeerLeft
    if load is SENDER_LEFT:
        worker.recorder.events.append({"left": sender, "seconds": cluster.clock.now_s, "tag": request.tag})
        message = PeerLeft(sender)
    else:
        flat, like = load[0], request.like
        if flat.numel() != like.numel() or flat.dtype != like.dtype:
            error = _mismatch(worker.rank, request, sender, flat)
            process.resume(error=error) if ticket is None else complete(cluster, ticket, None, error)
            return
        assert load[2] == request.stamped, (
            f"rank {sender} and rank {worker.rank} do not agree on whether a message has a stamp"
        )
        if worker.traced:
            num_bytes = 0 if sender == worker.rank else size_of(request.like)
            worker.recorder.span("recv", "comm", begin_s, cluster.clock.now_s, worker.step, -1, num_bytes, sender)
        message = Message(sender, flat, load[1])
    if ticket is not None:
        complete(cluster, ticket, message)
    elif worker.traced:
        process.waited(message, begin_s)
    else:
        process.resume(message)


def _mismatch(rank: int, request: ops.Recv, sender: int, flat: torch.Tensor) -> ConfigError:
    """Return the error for a message that is not the requested one."""
    like = request.like
    return ConfigError(
        f"rank {rank} expected {like.numel()} elements of {like.dtype} from rank {sender}, which sent "
        f"{flat.numel()} of {flat.dtype}"
    )


# -- collectives -----------------------------------------------------------------------------------------------


def all_reduce(
    cluster: SimCluster,
    process: SimProcess,
    request: ops.AllReduce,
    ticket: Ticket | None = None,
    channel: str | None = None,
) -> Any:
    """Sum over all ranks."""
    if request.collective is not None:
        return _play(process, request)
    p, size = cluster.num_workers, size_of(request.value)
    seconds = cluster.network.all_reduce_s(size, p)
    name = f"{channel or process.channel} all-reduce"
    _join(process, name, "all_reduce", request.value, seconds, native_bytes(p, size), _sum, ticket)
    return PENDING


def reduce_scatter(cluster: SimCluster, process: SimProcess, request: ops.ReduceScatter) -> Any:
    """Sum over all ranks. Each rank gets its own block."""
    if request.collective is not None:
        return _play(process, request)
    p, size = cluster.num_workers, size_of(request.value)
    seconds = cluster.network.reduce_scatter_s(size, p)
    _join(
        process,
        f"{process.channel} reduce-scatter",
        "reduce_scatter",
        request.value,
        seconds,
        native_bytes(p, size) / 2,
        _sum_blocks,
    )
    return PENDING


def all_gather(cluster: SimCluster, process: SimProcess, request: ops.AllGather) -> Any:
    """Give every rank each rank's block."""
    if request.collective is not None:
        return _play(process, request)
    p, size = cluster.num_workers, size_of(request.value)
    seconds = cluster.network.all_gather_s(size, p)
    _join(
        process,
        f"{process.channel} all-gather",
        "all_gather",
        request.value,
        seconds,
        native_bytes(p, size) / 2,
        _gather_blocks,
    )
    return PENDING


def _play(process: SimProcess, request: ops.AllReduce | ops.ReduceScatter | ops.AllGather) -> Any:
    """Send and receive the messages of a collective with a known schedule."""
    schedule: object = request.collective
    if not isinstance(schedule, CommSchedule):
        raise not_lowered(request)
    player = SchedulePlayer(process, schedule, request.value)
    process.pending = player
    player.go()
    return PENDING


def broadcast(cluster: SimCluster, process: SimProcess, request: ops.Broadcast) -> Any:
    """Replace every rank's value by the root's."""
    size = size_of(request.value)
    sent = size if process.worker.rank == request.root else 0
    seconds = cluster.network.broadcast_s(size, cluster.num_workers)
    _join(process, f"{process.channel} broadcast", "broadcast", request.value, seconds, sent, _copy_from(request.root))
    return PENDING


def barrier(cluster: SimCluster, process: SimProcess, _: ops.Barrier) -> Any:
    """Wait for all ranks."""
    seconds = cluster.network.barrier_s(cluster.num_workers)
    _join(process, f"{process.channel} barrier", "barrier", None, seconds, 0, lambda values: None)
    return PENDING


def _join(
    process: SimProcess,
    channel: str,
    kind: str,
    value: Any,
    seconds: float,
    num_bytes: float,
    combine: Combine,
    ticket: Ticket | None = None,
) -> None:
    """Take part in a collective.

    Args:
        channel: the n-th collectives of all ranks on one channel are the same collective.
        num_bytes: bytes that this rank sends.
        combine: called once, with all ranks' values in order of rank.
    """
    cluster, worker = process.cluster, process.worker
    checksum = _checksum(value) if cluster.check_in_flight else None

    def finish(begin_s: float, error: Exception | None) -> None:
        if error is not None:
            process.resume(error=error) if ticket is None else complete(cluster, ticket, None, error)
            return
        worker.bytes_sent += num_bytes
        if worker.traced:
            _span(process, kind, begin_s, value, num_bytes)
        if ticket is None:
            process.waited(value, begin_s)
        else:
            complete(cluster, ticket, value)

    def combine_checked(values: list[Any]) -> Exception | None:
        for held, sealed in values:
            if sealed is not None and _checksum(held) != sealed:
                raise AssertionError(f"a gradient in flight was overwritten (rank {worker.rank}, step {worker.step})")
        try:
            combine([held for held, _ in values])
        except Exception as error:  # noqa: BLE001 - raised where each rank waits
            return error
        return None

    cluster.fabric.join(channel, (worker.rank, (value, checksum), finish), seconds, combine_checked)


def _span(process: SimProcess, kind: str, begin_s: float, value: Any, num_bytes: float, peer: int = -1) -> None:
    """Record a message or a collective."""
    worker = process.worker
    step = value.step if isinstance(value, Gradient) and value.step >= 0 else worker.step
    worker.recorder.span(
        kind, "comm", begin_s, process.cluster.clock.now_s, step, bucket_of(value), int(num_bytes), peer
    )


def _flats(values: list[Any]) -> list[torch.Tensor]:
    """Return the memory of each rank's value.

    Raises:
        ConfigError: the values differ in size or type.
    """
    flats = [flat_of(value) for value in values]
    numel, dtype = flats[0].numel(), flats[0].dtype
    for rank, flat in enumerate(flats):
        if flat.numel() != numel or flat.dtype != dtype:
            raise ConfigError(
                f"all ranks give a collective values of one size and type: rank 0 has {numel} elements of {dtype}, "
                f"rank {rank} has "
                f"{flat.numel()} of {flat.dtype}"
            )
    return flats


def _sum(values: list[Any]) -> None:
    """Sum in rank order, into every rank's own memory."""
    flats = _flats(values)
    for other in flats[1:]:
        flats[0].add_(other)
    for other in flats[1:]:
        other.copy_(flats[0])


def _sum_blocks(values: list[Any]) -> None:
    """Sum in rank order, each block into its own rank's memory. The contents of the other blocks are lost."""
    flats = _flats(values)
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
    flats = _flats(values)
    bounds = block_bounds(flats[0].numel(), len(flats))
    for block, mine in enumerate(flats):
        where = slice(bounds[block], bounds[block + 1])
        for other in flats:
            if other is not mine:
                other[where].copy_(mine[where])


def _copy_from(root: int) -> Callable[[list[Any]], None]:
    def copy(values: list[Any]) -> None:
        flats = _flats(values)
        for rank, flat in enumerate(flats):
            if rank != root:
                flat.copy_(flats[root])

    return copy


def _checksum(value: Any) -> int:
    return 0 if value is None or flat_of(value).is_meta else hash(flat_of(value).numpy().tobytes())
