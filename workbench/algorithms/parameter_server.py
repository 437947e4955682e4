"""Parameter servers: the base of the algorithms that have them, and both sides of an exchange.

The gradient is cut into `shards` buckets, and each has a server. A worker pushes a shard of its gradient, with the
version of the parameters from which it was computed. The server replies with that shard's parameters and their version,
in the order in which pushes arrive. Servers are separate ranks after the workers, or run next to the workers of the
first ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeGuard, final

import torch
from torch import Tensor

from workbench.arguments import check_flag, check_whole
from workbench.errors import ConfigError, RankMismatch
from workbench.gradients import WEIGHT, Gradient, Layout, whole
from workbench.ops import (
    ANY,
    FREE,
    Backward,
    Discard,
    EndStep,
    Local,
    Message,
    PackParameters,
    PeerLeft,
    Program,
    Recv,
    Send,
    Start,
    State,
    Ticket,
    UnpackParameters,
    Wait,
    WaitAny,
)
from workbench.program import Algorithm, Buckets, Context, Elasticity, Replicas, Requirements, Roles

REPLY_TAG = 500  # pushes of shard j have tag j, replies have tag REPLY_TAG + j
STAMP_BYTES = 8
LAST = FINAL = 1  # a worker's last push; a server's last reply
NO_GRADIENT = 2  # of a push without a gradient: with LAST a worker's end, alone a request for parameters (`pull`)
DROPPED = 2  # of a reply: the push came too late
LATE_FLAGS = frozenset((DROPPED, FINAL | DROPPED))


def stamp_of(version: int, flags: int = 0) -> int:
    """Return a version and flags as one number.

    >>> stamp_of(7, DROPPED), split(stamp_of(7, DROPPED))
    (30, (7, 2))
    """
    return version * 4 + flags


def split(stamp: int) -> tuple[int, int]:
    """Return the version and flags of a stamp."""
    return divmod(stamp, 4)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState(State):
    """Between two steps of a worker: the version of each shard's parameters that it has pulled."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAlgorithm(Algorithm, ABC):
    """An algorithm with its parameters on servers.

    Attributes:
        shards: M, number of parts of the parameters, each on its own server; a parameter tensor is not split.
        dedicated: servers are the last M ranks and compute no gradients; otherwise server j runs next to rank j's
            worker.
    """

    shards: int = 1
    dedicated: bool = False

    def __post_init__(self) -> None:
        check_whole("shards", self.shards, 1, "the number of servers, 1 to 400", most=400)
        check_flag("dedicated", self.dedicated)

    @property
    def requires(self) -> Requirements:
        return Requirements(buckets=Buckets(count=self.shards), state=WorkerState, servers=True)

    def roles(self, num_ranks: int) -> Roles:
        if self.dedicated:
            num_workers = num_ranks - self.shards
            return Roles(computing=range(num_workers), serving=range(num_workers, num_ranks))
        return Roles(computing=range(num_ranks), serving=range(min(self.shards, num_ranks)))

    @property
    def max_staleness(self) -> int | None:
        return None

    @property
    def replicas(self) -> Replicas:
        return Replicas.AT_END

    def check(self, num_ranks: int) -> None:
        if self.dedicated and num_ranks <= self.shards:
            raise ConfigError(
                f"{self.shards} dedicated servers on {num_ranks} ranks leave no rank to compute: start more ranks, or "
                "use dedicated=False"
            )

    def server_of(self, shard: int, num_ranks: int) -> int:
        """Return the rank that serves a shard."""
        return num_ranks - self.shards + shard if self.dedicated else shard % num_ranks

    def messages_per_step(self, num_ranks: int, num_buckets: float) -> float | None:
        return 2.0 * self.shards

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """Return the bytes of this rank's pushes, and of its servers' replies. Messages to itself do not count."""
        workers, total = self.roles(num_ranks).num_computing, 0.0
        for piece in layout.buckets:
            message = (piece.stop - piece.start) * layout.itemsize + STAMP_BYTES
            here = self.server_of(piece.index, num_ranks) == rank
            total += message * ((workers - (rank < workers)) if here else rank < workers)
        return total

    @property
    def elasticity(self) -> Elasticity:
        """A run can lose a worker that serves no shard. The parameters of a shard are on its server only."""
        return Elasticity.LOSES_WORKERS

    @abstractmethod
    def serve(self, ctx: Context, shard: int) -> Program:
        """Run one shard's server."""

    @abstractmethod
    def work(self, ctx: Context) -> Program:
        """Run one worker."""

    def pull(self, ctx: Context) -> Program:
        yield from _fetch(self, ctx, fresh(ctx), NO_GRADIENT)

    def worker(self, ctx: Context) -> Program:
        assert ctx.layout is not None
        mine = [piece.index for piece in ctx.layout.buckets if self.server_of(piece.index, ctx.num_workers) == ctx.rank]
        if ctx.rank not in self.roles(ctx.num_workers).computing:
            for shard in mine:  # one, or none if there are fewer parameters than servers
                yield from self.serve(ctx, shard)
            return
        serving = []
        for shard in mine:
            serving.append((yield Start(self.serve(ctx, shard), lane=FREE, shares_tags=True)))
        if ctx.in_loop:  # it may pull before its first step
            yield EndStep(ctx.first_step - 1, state=state_of(fresh(ctx)))
        yield from self.work(ctx)
        for ticket in serving:
            yield Wait(ticket)


@final
class WorkerPort:
    """A worker's side of an exchange: pushes gradients, pulls parameters. A local variable of the worker's program.

    Args:
        clip_norm: limit of the whole gradient's norm; None for no limit.
    """

    def __init__(self, algorithm: ServerAlgorithm, ctx: Context, clip_norm: float | None = None) -> None:
        self._algorithm, self._ctx, self._clip_norm = algorithm, ctx, clip_norm
        assert ctx.layout is not None
        self._replies = [
            Recv(
                algorithm.server_of(shard, ctx.num_workers),
                like=like_of(ctx.layout, shard),
                tag=REPLY_TAG + shard,
                stamped=True,
            )
            for shard in range(len(ctx.layout.buckets))
        ]

    def push_pull(self, step: int, versions: dict[int, int], flags: int = 0) -> Program:
        """Push a minibatch's gradient to the servers of the shards in `versions`.

        Pull their parameters into the replica. Shards are pushed during backward, unless the gradient must be clipped
        as a whole first.

        Args:
            versions: shard -> version of its parameters; set to the pulled versions.
            flags: of the pushes.

        Returns:
            shard -> flags of its reply.
        """
        ctx, layout, algorithm, clip_norm = self._ctx, self._ctx.layout, self._algorithm, self._clip_norm
        assert layout is not None
        pushed: list[Gradient] = []

        def push(bucket: Gradient) -> Send:
            assert bucket.bucket is not None
            pushed.append(bucket)
            server = algorithm.server_of(bucket.bucket, ctx.num_workers)
            return Send(server, bucket, tag=bucket.bucket, stamp=stamp_of(versions[bucket.bucket], flags))

        if clip_norm is None and len(versions) == len(layout.buckets):
            sending = yield Backward(step, on_bucket=push)
            gradient: Gradient = whole(pushed)
        else:
            gradient = yield Backward(step)
            if clip_norm is not None:
                yield Local("sum", gradient.message_bytes, lambda: clip(gradient, clip_norm))
            sending = []
            for shard in versions:
                sending.append((yield Start(push(gradient.bucket_view(shard)))))
        replies: dict[int, int] = {}
        for shard in versions:
            message = yield self._replies[shard]
            versions[shard], replies[shard] = split(message.stamp)
            yield UnpackParameters(Gradient(message.value, layout, step, versions[shard], shard))
        for ticket in sending:
            yield Wait(ticket)
        yield Discard(gradient)
        return replies


def take_steps(algorithm: ServerAlgorithm, ctx: Context, clip_norm: float | None = None) -> Program:
    """Run a worker that takes every step of the run: push, pull, end the step."""
    port, versions = WorkerPort(algorithm, ctx, clip_norm), fresh(ctx)
    for step in ctx.steps():
        replies = yield from port.push_pull(step, versions, LAST * ctx.is_last(step))
        yield EndStep(step, state=state_of(versions), dropped=not LATE_FLAGS.isdisjoint(replies.values()))
    if ctx.num_steps is not None and ctx.first_step >= ctx.num_steps:
        yield from leave(algorithm, ctx, versions)


def leave(algorithm: ServerAlgorithm, ctx: Context, versions: dict[int, int]) -> Program:
    """End a worker that takes no more steps, and whose last push did not say so.

    Servers wait for its last push, and it waits for the last parameters. A loop may continue from them, by
    `ctx.resumed`.
    """
    yield from _fetch(algorithm, ctx, versions, LAST | NO_GRADIENT)
    ctx.resumed = state_of(versions)


def _fetch(algorithm: ServerAlgorithm, ctx: Context, versions: dict[int, int], flags: int) -> Program:
    """Push no gradient, and pull the parameters. `versions` is set to the pulled versions."""
    assert ctx.layout is not None
    sending = []
    for shard, version in versions.items():
        nothing, server = torch.zeros_like(like_of(ctx.layout, shard)), algorithm.server_of(shard, ctx.num_workers)
        sending.append((yield Start(Send(server, nothing, tag=shard, stamp=stamp_of(version, flags)))))
    for shard in versions:
        message = yield Recv(
            algorithm.server_of(shard, ctx.num_workers),
            like=like_of(ctx.layout, shard),
            tag=REPLY_TAG + shard,
            stamped=True,
        )
        versions[shard] = split(message.stamp)[0]
        yield UnpackParameters(Gradient(message.value, ctx.layout, -1, versions[shard], shard))
    for ticket in sending:
        yield Wait(ticket)


@final
class ServerPort:
    """A server's side of an exchange: receives pushes of its shard, sends replies.

    A local variable of the server's program.
    """

    def __init__(self, algorithm: ServerAlgorithm, ctx: Context, shard: int) -> None:
        assert ctx.layout is not None
        self.layout, self.shard = ctx.layout, shard
        self.num_workers = algorithm.roles(ctx.num_workers).num_computing  # fewer after a worker has left
        self._posted: Ticket | None = None  # the receive that no push has answered
        self._next_push = Recv(ANY, like=like_of(ctx.layout, shard), tag=shard, stamped=True, departures=True)
        self._sending: dict[int, Ticket] = {}
        self._gone: set[int] = set()
        self._workers = range(self.num_workers)
        self._ended: set[int] = set()  # workers that have sent their last push
        self._version = 0  # the newest version that was sent

    def open(self) -> Program:
        """Set and return the shard's first version: its number of updates, including those before a stop."""
        return (yield from self.parameters()).version

    def parameters(self) -> Program:
        """Set the first version as `open` does, and return the shard's first parameters."""
        packed = yield PackParameters(self.shard, server_copy=True)
        self._version = packed.version
        return packed

    def next_push(self) -> Program:
        """Return the next push of any worker, or that a worker has left (`departed`). Answer each `pull` before it."""
        message = yield self._next_push
        while self._is_pull(message):
            yield from self._answer_pull(message)
            message = yield self._next_push
        return message

    def next_push_within(self, seconds_left: Callable[[], Program]) -> Program:
        """Return the same; None after a time-out. The next call then waits for the same receive.

        Args:
            seconds_left: returns the seconds until the time-out, or None.
        """
        while True:
            timeout_s = yield from seconds_left()
            self._posted = self._posted or (yield Start(self._next_push))
            found = yield WaitAny((self._posted,), timeout_s=timeout_s)
            if found is None:
                return None
            self._posted = None
            if not self._is_pull(found[1]):
                return found[1]
            yield from self._answer_pull(found[1])

    def _is_pull(self, message: Message | PeerLeft) -> bool:
        if isinstance(message, PeerLeft) or split(message.stamp)[1] != NO_GRADIENT:
            return False
        return message.source in self._workers and message.source not in self._ended  # else `read` refuses it

    def _answer_pull(self, message: Message) -> Program:
        packed = yield PackParameters(self.shard, server_copy=True)
        yield from self.reply(message.source, packed.version)

    def leave(self, worker: int) -> None:
        """Wait no longer for a worker: it has left, or takes no more steps."""
        self.num_workers -= 1
        self._gone.add(worker)

    def departed(self, message: Message | PeerLeft, ended: Container[int] = ()) -> TypeGuard[PeerLeft]:
        """Return True if a worker has left. `ended`: the workers that have sent their last push."""
        if isinstance(message, Message):
            return False
        if message.rank not in ended:
            self.leave(message.rank)
        return True

    def at_most(self, quorum: int, of: Sequence[tuple[int, int]]) -> int:
        """Return the quorum, but at most the number of workers that can contribute.

        If workers have left, these are the remaining ones, and those that have a gradient in `of`.
        """
        return (
            quorum if not self._gone else min(quorum, self.num_workers + sum(source in self._gone for source, _ in of))
        )

    def read(self, message: Message) -> tuple[Gradient, int]:
        """Return (the gradient of a push, with the version of the parameters from which it was computed; flags).

        Raises:
            RankMismatch: no worker of this algorithm sends such a push.
        """
        version, flags = divmod(message.stamp, 4)
        if version > self._version or message.source in self._ended or message.source not in self._workers:
            raise RankMismatch(self._refusal(message.source, version, flags))
        if flags & LAST:
            self._ended.add(message.source)
        return Gradient(message.value, self.layout, -1, version, self.shard), flags

    def _refusal(self, source: int, version: int, flags: int) -> str:
        if source not in self._workers:
            what = "and has no worker"
        elif source in self._ended:
            what = "after its last one"
        else:
            what = f"computed at version {version}, but the newest is {self._version}"
        return f"rank {source} pushed a gradient of shard {self.shard} {what}: run one version of workbench and one algorithm on all ranks"

    def reply(self, source: int, version: int, flags: int = 0) -> Program:
        """Send the shard's present parameters in the background, so a slow worker delays no other. Return them."""
        self._version = version
        before = self._sending.get(source)
        if before is not None and not before.done:
            yield Wait(before)  # the worker has pushed since, so it has received that reply
        packed = yield PackParameters(self.shard, server_copy=True)
        self._sending[source] = yield Start(
            Send(source, packed.flat, tag=REPLY_TAG + self.shard, stamp=stamp_of(version, flags))
        )
        return packed

    def close(self) -> Program:
        """Wait until every reply has been received."""
        for ticket in self._sending.values():
            yield Wait(ticket)


def like_of(layout: Layout, shard: int) -> Tensor:
    """Return a tensor with the size and dtype of a shard's messages."""
    piece = layout.buckets[shard]
    return torch.empty(piece.stop - piece.start, dtype=layout.dtype, device=layout.device)


def clip(gradient: Gradient, norm: float) -> None:
    """Scale a rank's share so that the mean gradient over its own samples has at most this norm, over all parameters."""
    bodies = [gradient.body(piece.index) for piece, _ in gradient.slices()]
    weight = gradient.tail(0)[WEIGHT].clamp_min(1e-30)
    total = torch.stack([body.double().square().sum() for body in bodies]).sum().sqrt() / weight
    scale = torch.clamp(norm / (total + 1e-6), max=1.0)
    for body in bodies:
        body.mul_(scale)


def add(total: Gradient, other: Gradient) -> Local:
    """Return the request that sums two pushes, tails included."""
    return Local("sum", other.message_bytes, lambda: total.flat.add_(other.flat))


def ended(versions: dict[int, int], replies: dict[int, int]) -> None:
    """Remove from `versions` the shards with a final reply: their servers have ended."""
    for shard, flags in replies.items():
        if flags & FINAL:
            del versions[shard]


def fresh(ctx: Context) -> dict[int, int]:
    """Return shard -> a worker's first version: 0, or that of the last reply before the run was stopped."""
    assert ctx.layout is not None
    resumed: WorkerState = ctx.resumed or WorkerState(versions=(0,) * len(ctx.layout.buckets))
    return {piece.index: version for piece, version in zip(ctx.layout.buckets, resumed.versions, strict=True)}


def state_of(versions: dict[int, int]) -> WorkerState:
    """The state of a worker that has pulled these versions: shard -> version."""
    return WorkerState(versions=tuple(versions.values()))
