"""What methods with parameter servers share: who serves, how a worker pushes and pulls, how a server answers.

The gradient is cut into `shards` buckets, each of which has a server. A worker sends a shard of its gradient with the
version of the parameters it was taken at, and is sent that shard's parameters with their version. A server hears
whoever comes first. Servers are ranks of their own behind the workers, or run beside the workers of the first ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.algorithms.visits import FINAL, LAST, LATE, NO_GRADIENT, REPLY, STAMP_BYTES, WorkerPort, like_of, split, stamp_of
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import (
    FREE,
    EndStep,
    Local,
    Program,
    Recv,
    Send,
    Start,
    UnpackParameters,
    Wait,
)
from workbench.program import Algorithm, Context, Replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAlgorithm(Algorithm, ABC):
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

    def goes_on_without(self, rank: int, num_ranks: int) -> bool:
        """Without a worker that serves nothing: the parameters of a shard are nowhere but on its server."""
        serves = any(self.server_of(shard, num_ranks) == rank for shard in range(self.shards))
        return rank < self.num_computing(num_ranks) and not serves

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


def take_steps(method: ServerAlgorithm, ctx: Context, clip_norm: float | None = None) -> Program:
    """A worker that takes every step of the run: push, pull, end the step."""
    caller, versions = WorkerPort(method, ctx, clip_norm), fresh(ctx)
    for step in ctx.steps():
        replies = yield from caller.push_pull(step, versions, LAST * ctx.is_last(step))
        yield EndStep(step, state=tuple(versions.values()), dropped=not LATE.isdisjoint(replies.values()))
    if ctx.num_steps is not None and ctx.first_step >= ctx.num_steps:
        yield from _leave(method, ctx, versions)


def _leave(method: ServerAlgorithm, ctx: Context, versions: dict[int, int]) -> Program:
    """A worker that had taken all its steps when the run was stopped: servers wait for its last push, and it for the last parameters."""
    assert ctx.layout is not None
    sending = []
    for shard, version in versions.items():
        nothing, server = torch.zeros_like(like_of(ctx.layout, shard)), method.server_of(shard, ctx.num_workers)
        sending.append((yield Start(Send(server, nothing, tag=shard, stamp=stamp_of(version, LAST | NO_GRADIENT)))))
    for shard in versions:
        message = yield Recv(method.server_of(shard, ctx.num_workers), like=like_of(ctx.layout, shard), tag=REPLY + shard, stamped=True)
        yield UnpackParameters(Gradient(message.value, ctx.layout, -1, split(message.stamp)[0], shard))
    for ticket in sending:
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
