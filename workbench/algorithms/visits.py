"""A visit to a server, from both sides: how a worker pushes and pulls, how a server hears and answers.

What travels is a shard's gradient one way and its parameters the other, each with a stamp: a version, and flags.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, TypeGuard, final

import torch
from torch import Tensor

from workbench.errors import RankMismatch
from workbench.gradients import WEIGHT, Gradient, Layout, whole
from workbench.ops import (
    ANY,
    Backward,
    Discard,
    Local,
    Message,
    PackParameters,
    PeerLeft,
    Program,
    Recv,
    Send,
    Start,
    Ticket,
    UnpackParameters,
    Wait,
)
from workbench.program import Context

if TYPE_CHECKING:
    from workbench.algorithms.servers import ServerAlgorithm

REPLY = 500  # tags: a shard's pushes have its number, the replies REPLY more
STAMP_BYTES = 8
LAST = FINAL = 1  # a worker's last push; a server's last reply
NO_GRADIENT = 2  # of a worker's only push: it has no step to take, and this is no gradient
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


@final
class WorkerPort:
    """A worker's side: pushes minibatches' gradients to servers, pulls parameters. Kept in a local variable of the worker's program.

    Args:
        clip_norm: of the whole gradient, at most; None for no limit.
    """

    def __init__(self, method: ServerAlgorithm, ctx: Context, clip_norm: float | None = None) -> None:
        self._method, self._ctx, self._clip_norm = method, ctx, clip_norm
        assert ctx.layout is not None
        self._replies = [
            Recv(method.server_of(shard, ctx.num_workers), like=like_of(ctx.layout, shard), tag=REPLY + shard, stamped=True)
            for shard in range(len(ctx.layout.buckets))
        ]

    def push_pull(self, step: int, versions: dict[int, int], flags: int = 0) -> Program:
        """Push one minibatch's gradient to the servers of the shards in `versions`; pull their parameters into the replica.

        Shards are pushed during backward, unless the gradient must be clipped as a whole first.

        Args:
            versions: shard -> version of its parameters; afterwards those that were pulled.
            flags: of the pushes.

        Returns:
            shard -> flags of its reply.
        """
        ctx, layout, method, clip_norm = self._ctx, self._ctx.layout, self._method, self._clip_norm
        assert layout is not None
        pushed: list[Gradient] = []

        def push(bucket: Gradient) -> Send:
            assert bucket.bucket is not None
            pushed.append(bucket)
            server = method.server_of(bucket.bucket, ctx.num_workers)
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
                sending.append((yield Start(push(gradient.part(shard)))))
        replies: dict[int, int] = {}
        for shard in versions:
            message = yield self._replies[shard]
            versions[shard], replies[shard] = split(message.stamp)
            yield UnpackParameters(Gradient(message.value, layout, step, versions[shard], shard))
        for ticket in sending:
            yield Wait(ticket)
        yield Discard(gradient)
        return replies


@final
class ServerPort:
    """A server's side of its shard: hears pushes, sends replies. Kept in a local variable of the server's program."""

    def __init__(self, method: ServerAlgorithm, ctx: Context, shard: int) -> None:
        assert ctx.layout is not None
        self.layout, self.shard = ctx.layout, shard
        self.num_workers = method.num_computing(ctx.num_workers)  # of those that have left, none but who had pushed its last
        self._hear = Recv(ANY, like=like_of(ctx.layout, shard), tag=shard, stamped=True, departures=True)
        self._sending: dict[int, Ticket] = {}
        self._gone: set[int] = set()
        self._workers = range(self.num_workers)
        self._ended: set[int] = set()  # who have pushed their last
        self._version = 0  # the newest that anybody was told

    def open(self) -> Program:
        """The shard's version to begin with: the updates it has had, in a resumed run those before the stop too."""
        return (yield from self.parameters()).version

    def parameters(self) -> Program:
        """The shard's parameters to begin with, with that version."""
        packed = yield PackParameters(self.shard, master=True)
        self._version = packed.version
        return packed

    def hear(self) -> Recv:
        """The request for the next push, whoever's it is; the answer may be that a worker has left (`lost`)."""
        return self._hear

    def lost(self, message: Message | PeerLeft, ended: Container[int] = ()) -> TypeGuard[PeerLeft]:
        """Whether a worker has left, of which no push comes any more; `ended`: workers that have pushed their last."""
        if isinstance(message, Message):
            return False
        self.num_workers -= message.rank not in ended
        self._gone.add(message.rank)
        return True

    def at_most(self, quorum: int, of: Sequence[tuple[int, int]]) -> int:
        """So many gradients, or as many as there can be: of the workers that are here, and of those that left theirs in `of`."""
        return quorum if not self._gone else min(quorum, self.num_workers + sum(source in self._gone for source, _ in of))

    def read(self, message: Message) -> tuple[Gradient, int]:
        """A push as a gradient, its version that of the parameters it was taken at; and its flags.

        Raises:
            RankMismatch: no worker of this method can have pushed that now.
        """
        version, flags = divmod(message.stamp, 4)
        if version > self._version or flags == NO_GRADIENT or message.source in self._ended or message.source not in self._workers:
            raise RankMismatch(self._refusal(message.source, version, flags))
        if flags & LAST:
            self._ended.add(message.source)
        return Gradient(message.value, self.layout, -1, version, self.shard), flags

    def _refusal(self, source: int, version: int, flags: int) -> str:
        if source not in self._workers:
            what = "and has no worker"
        elif source in self._ended:
            what = "behind its last one"
        elif flags == NO_GRADIENT:
            what = f"with flags {flags}, which nobody sends"
        else:
            what = f"taken at version {version}, and the newest is {self._version}"
        return f"rank {source} pushed a gradient of shard {self.shard} {what}: run one version of workbench and one method on all ranks"

    def reply(self, source: int, version: int, flags: int = 0) -> Program:
        """Send the shard's present parameters, in the background: a slow worker does not hold up the others. Returns them."""
        self._version = version
        before = self._sending.get(source)
        if before is not None and not before.done:
            yield Wait(before)  # it has pushed since, so it had received it
        packed = yield PackParameters(self.shard, master=True)
        self._sending[source] = yield Start(Send(source, packed.flat, tag=REPLY + self.shard, stamp=stamp_of(version, flags)))
        return packed

    def close(self) -> Program:
        """Until every reply has been received."""
        for ticket in self._sending.values():
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
