"""What methods with parameter servers share: who serves, how a worker pushes and pulls, how a server answers.

The gradient is cut into `shards` buckets, each of which has a server. A worker sends a shard of its gradient with the
version of the parameters it was taken at, and is sent that shard's parameters with their version. A server hears
whoever comes first. Servers are ranks of their own behind the workers, or run beside the workers of the first ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from workbench.errors import ConfigError
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
    Program,
    Recv,
    Request,
    Send,
    Start,
    Ticket,
    UnpackParameters,
    Wait,
)
from workbench.program import Algorithm, Context, Replicas, answered, exchanged

REPLY = 500  # tags: a shard's pushes have its number, the replies REPLY more
STAMP_BYTES = 8
LAST = FINAL = 1  # a worker's last push; a server's last reply
GONE = 2  # of a worker's only push: it has no step to take, and this is no gradient
DROPPED = 2  # of a reply: the push that this answers came too late
LATE = frozenset((DROPPED, FINAL | DROPPED))


def stamp_of(version: int, flags: int = 0) -> int:
    """A version and flags as one number.

    >>> stamp_of(7, DROPPED), split(stamp_of(7, DROPPED))
    (30, (7, 2))
    """
    return version * 4 + flags


def split(stamp: int) -> tuple[int, int]:
    """The version and flags of a stamp."""
    return divmod(stamp, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMethod(Algorithm, ABC):
    """A method whose parameters live on servers.

    Attributes:
        shards: M, parts of the parameters, each with a server; parameters are not split, so there may be fewer.
        dedicated: servers are the last `shards` ranks and compute no gradients; else shard j is served beside rank j's worker.
    """

    shards: int = 1
    dedicated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shards, int) or not 1 <= self.shards <= 400:
            raise ConfigError(f"shards={self.shards}: the number of servers, 1 to 400")

    @property
    def num_buckets(self) -> int:
        return self.shards

    @property
    def max_staleness(self) -> int | None:
        return None

    @property
    def replicas(self) -> Replicas:
        return Replicas.AT_END

    @property
    def has_servers(self) -> bool:
        return True

    def num_computing(self, num_ranks: int) -> int:
        return num_ranks - self.shards if self.dedicated else num_ranks

    def check(self, num_ranks: int) -> None:
        if self.dedicated and num_ranks <= self.shards:
            raise ConfigError(
                f"{self.shards} dedicated servers on {num_ranks} ranks leave nobody to compute: start more ranks, or use dedicated=False"
            )

    def server_of(self, shard: int, num_ranks: int) -> int:
        """The rank that serves a shard."""
        return num_ranks - self.shards + shard if self.dedicated else shard % num_ranks

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        """A push of each shard and its reply; nothing for what stays on the rank."""
        workers, total = self.num_computing(num_ranks), 0.0
        for piece in layout.buckets:
            message = (piece.stop - piece.start) * layout.itemsize + STAMP_BYTES
            here = self.server_of(piece.index, num_ranks) == rank
            total += message * ((workers - (rank < workers)) if here else rank < workers)
        return total

    @abstractmethod
    def serve(self, ctx: Context, shard: int) -> Program:
        """The program of one shard's server."""

    @abstractmethod
    def work(self, ctx: Context) -> Program:
        """The program of one worker."""

    def worker(self, ctx: Context) -> Program:
        assert ctx.layout is not None
        mine = [piece.index for piece in ctx.layout.buckets if self.server_of(piece.index, ctx.num_workers) == ctx.rank]
        if ctx.rank >= self.num_computing(ctx.num_workers):
            for shard in mine:  # one, or none where there are fewer parameters than servers
                yield from self.serve(ctx, shard)
            return
        serving = []
        for shard in mine:
            serving.append((yield Start(self.serve(ctx, shard), lane=FREE, shares_tags=True)))
        yield from self.work(ctx)
        for ticket in serving:
            yield Wait(ticket)


@final
class Caller:
    """A worker's side: pushes minibatches' gradients to servers, pulls parameters. Kept in a local variable of the worker's program.

    Args:
        clip_norm: of the whole gradient, at most; None for no limit.
    """

    def __init__(self, method: ServerMethod, ctx: Context, clip_norm: float | None = None) -> None:
        self._method, self._ctx, self._clip_norm = method, ctx, clip_norm
        self._exchange = exchanged(ctx, (Caller, method, clip_norm), self._push_and_pull)

    def push_pull(self, step: int, versions: dict[int, int], flags: int = 0) -> Program:
        """One minibatch's gradient to the servers of the shards in `versions`, and their parameters back into the replica.

        Shards are pushed while backward goes on, unless the gradient must be clipped as a whole first.

        Args:
            versions: shard -> version of its parameters; afterwards those that were pulled.
            flags: of the pushes.

        Returns:
            shard -> flags of its reply.
        """
        shards, replies = tuple(versions), dict.fromkeys(versions, 0)
        work = self._exchange(shards, step, [version * 4 + flags for version in versions.values()])
        found = (yield work) if isinstance(work, Request) else (yield from work)
        for shard, stamp in zip(shards, found):  # noqa: B905 - a stamp for each, and this runs for every message
            versions[shard], replies[shard] = divmod(stamp, 4)
        return replies

    def _push_and_pull(self, shards: tuple[int, ...], step: int, stamps: list[int]) -> Program:
        """The same with stamps as they travel: those of the pushes in, those of the replies out."""
        ctx, layout, method, clip_norm = self._ctx, self._ctx.layout, self._method, self._clip_norm
        assert layout is not None
        stamp_to = dict(zip(shards, stamps, strict=True))
        pushed: list[Gradient] = []

        def push(bucket: Gradient) -> Send:
            assert bucket.bucket is not None
            pushed.append(bucket)
            server = method.server_of(bucket.bucket, ctx.num_workers)
            return Send(server, bucket, tag=bucket.bucket, stamp=stamp_to[bucket.bucket])

        if clip_norm is None and len(shards) == len(layout.buckets):
            sending = yield Backward(step, on_bucket=push)
            gradient: Gradient = whole(pushed)
        else:
            gradient = yield Backward(step)
            if clip_norm is not None:
                yield Local("sum", gradient.message_bytes, lambda: clip(gradient, clip_norm))
            sending = []
            for shard in shards:
                sending.append((yield Start(push(gradient.part(shard)))))
        found: list[int] = []
        for shard in shards:
            server = method.server_of(shard, ctx.num_workers)
            message = yield Recv(server, like=like_of(layout, shard), tag=REPLY + shard, stamped=True)
            found.append(message.stamp)
            yield UnpackParameters(Gradient(message.value, layout, step, split(message.stamp)[0], shard))
        for ticket in sending:
            yield Wait(ticket)
        yield Discard(gradient)
        return found


def take_steps(method: ServerMethod, ctx: Context, clip_norm: float | None = None) -> Program:
    """A worker that takes every step of the run: push, pull, end the step."""
    caller, versions = Caller(method, ctx, clip_norm), fresh(ctx)
    for step in ctx.steps():
        replies = yield from caller.push_pull(step, versions, LAST * ctx.is_last(step))
        yield EndStep(step, state=tuple(versions.values()), dropped=not LATE.isdisjoint(replies.values()))
    if ctx.num_steps is not None and ctx.first_step >= ctx.num_steps:
        yield from _leave(method, ctx, versions)


def _leave(method: ServerMethod, ctx: Context, versions: dict[int, int]) -> Program:
    """A worker that had taken all its steps when the run was stopped: servers wait for its last push, and it for the last parameters."""
    assert ctx.layout is not None
    sending = []
    for shard, version in versions.items():
        nothing, server = torch.zeros_like(like_of(ctx.layout, shard)), method.server_of(shard, ctx.num_workers)
        sending.append((yield Start(Send(server, nothing, tag=shard, stamp=stamp_of(version, LAST | GONE)))))
    for shard in versions:
        message = yield Recv(method.server_of(shard, ctx.num_workers), like=like_of(ctx.layout, shard), tag=REPLY + shard, stamped=True)
        yield UnpackParameters(Gradient(message.value, ctx.layout, -1, split(message.stamp)[0], shard))
    for ticket in sending:
        yield Wait(ticket)


def like_of(layout: Layout, shard: int) -> Tensor:
    """The size and dtype of a shard's messages."""
    piece = layout.buckets[shard]
    return torch.empty(piece.stop - piece.start, dtype=layout.dtype, device=layout.device)


def clip(gradient: Gradient, norm: float) -> None:
    """Scale a rank's share so that the mean gradient over its own samples has at most this norm (all parameters together)."""
    bodies = [flat[: piece.tail - piece.start] for piece, flat in gradient.slices()]
    total = torch.stack([body.double().square().sum() for body in bodies]).sum().sqrt() / gradient.tail(0)[WEIGHT].clamp_min(1e-30)
    scale = torch.clamp(norm / (total + 1e-6), max=1.0)
    for body in bodies:
        body.mul_(scale)


@final
class Desk:
    """A server's side of its shard: hears pushes, sends replies. Kept in a local variable of the server's program."""

    def __init__(self, method: ServerMethod, ctx: Context, shard: int) -> None:
        assert ctx.layout is not None
        self.layout, self.shard = ctx.layout, shard
        self.num_workers = method.num_computing(ctx.num_workers)
        self._hear = Recv(ANY, like=like_of(ctx.layout, shard), tag=shard, stamped=True)
        self._sending: dict[int, Ticket] = {}
        self._answer = answered(ctx, (Desk, shard), self._send)

    def open(self) -> Program:
        """The shard's version to begin with: the updates it has had, in a resumed run those before the stop too."""
        packed = yield PackParameters(self.shard, master=True)
        return packed.version

    def hear(self) -> Recv:
        """The request for the next push, whoever's it is."""
        return self._hear

    def read(self, message: Message) -> tuple[Gradient, int]:
        """A push as a gradient, its version that of the parameters it was taken at; and its flags."""
        version, flags = divmod(message.stamp, 4)
        return Gradient(message.value, self.layout, -1, version, self.shard), flags

    def reply(self, source: int, version: int, flags: int = 0) -> Program:
        """Send the shard's present parameters, in the background: a slow worker does not hold up the others. Returns them."""
        before = self._sending.get(source)
        if before is not None and not before.done:
            yield Wait(before)  # it has pushed since, so it had received it
        work = self._answer(source, stamp_of(version, flags))
        packed, self._sending[source] = (yield work) if isinstance(work, Request) else (yield from work)
        return packed

    def _send(self, to: int, stamp: int) -> Program:
        """The parameters, and the ticket of their sending."""
        packed = yield PackParameters(self.shard, master=True)
        return packed, (yield Start(Send(to, packed.flat, tag=REPLY + self.shard, stamp=stamp)))

    def close(self) -> Program:
        """Until every reply has been received."""
        for ticket in self._sending.values():
            yield Wait(ticket)


def body_of(gradient: Gradient) -> Tensor:
    """A shard's values without its tail; shares memory."""
    assert gradient.bucket is not None
    piece = gradient.layout.buckets[gradient.bucket]
    return gradient.flat[: piece.tail - piece.start]


def add(total: Gradient, other: Gradient) -> Local:
    """The request that sums two pushes, tails too."""
    return Local("sum", other.message_bytes, lambda: total.flat.add_(other.flat))


def check_positive(name: str, value: Any, kinds: type | tuple[type, ...], least: float, what: str) -> None:
    """Raise `ConfigError` unless a setting is a number of at least that."""
    if isinstance(value, bool) or not isinstance(value, kinds) or value < least:  # type: ignore[operator]  # it is a number by then
        raise ConfigError(f"{name}={value!r}: {what}")


def ended(versions: dict[int, int], replies: dict[int, int]) -> None:
    """Take the shards whose last reply this was out of `versions`."""
    for shard, flags in replies.items():
        if flags & FINAL:
            del versions[shard]


def fresh(ctx: Context) -> dict[int, int]:
    """shard -> version that a worker begins with: 0, or that of the last reply before the run was stopped."""
    assert ctx.layout is not None
    known = ctx.resumed or (0,) * len(ctx.layout.buckets)
    return {piece.index: version for piece, version in zip(ctx.layout.buckets, known, strict=True)}
