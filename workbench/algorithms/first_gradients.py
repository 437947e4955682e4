"""Servers that update with the first gradients of each version: the base of the algorithms with backup workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

from workbench.algorithms.parameter_server import (
    DROPPED,
    FINAL,
    LAST,
    LATE_FLAGS,
    ServerAlgorithm,
    ServerPort,
    WorkerPort,
    add,
    ended,
    fresh,
    leave,
    state_of,
)
from workbench.algorithms.quorum import FixedQuorum, OnlineQuorum
from workbench.arguments import check_number
from workbench.gradients import Gradient
from workbench.ops import Apply, EndStep, Now, Program
from workbench.program import LOOP_ENDED, Context


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstGradients(ServerAlgorithm, ABC):
    """The rule of `BackupSGD`, with N of p workers from `quorum`.

    If fewer than N workers remain, an update takes the gradients of all of them.

    Attributes:
        timeout_s: longest wait after an update's first gradient, in seconds; the update then uses what has arrived.
            None: no limit.
    """

    timeout_s: float | None = None

    def __post_init__(self) -> None:
        ServerAlgorithm.__post_init__(self)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0, "seconds after the first gradient, or None")

    @abstractmethod
    def quorum(self, num_workers: int, now_s: float) -> FixedQuorum | OnlineQuorum:
        """Return the quorum of one server, which chooses N.

        Args:
            num_workers: p.
            now_s: the time at which all workers begin.
        """

    @property
    def max_staleness(self) -> int:
        return 0

    def serve(self, ctx: Context, shard: int) -> Program:
        port, end = ServerPort(self, ctx, shard), math.inf if ctx.in_loop else ctx.num_steps or 0
        version = yield from port.open()
        quorum = self.quorum(port.num_workers, (yield Now()))
        active = set(range(port.num_workers)) if version < end else set()  # workers that still need the last version
        last: list[int] = []  # workers that have sent their last push: in a loop, which has no last version
        while active:
            total: Gradient | None = None
            first_s = 0.0
            of: list[tuple[int, int]] = []
            dropped: list[tuple[int, int]] = []
            while active and (total is None or len(of) < port.at_most(quorum.size, of)):
                push = yield from port.next_push_within(partial(self._seconds_left, total, first_s))
                if push is None:
                    break  # the time-out
                if port.departed(push, last):
                    if push.rank not in last:
                        quorum.left(push.rank)
                    active.discard(push.rank)
                    continue
                gradient, flags = port.read(push)
                if flags & LAST:
                    last.append(push.source)
                    port.leave(push.source)
                    quorum.left(push.source)
                    active.discard(push.source)
                    continue
                now_s = yield Now()
                quorum.arrived(push.source, now_s)
                if gradient.version < version:
                    dropped.append((push.source, gradient.version))
                    yield from port.reply(push.source, version, DROPPED | FINAL * (version >= end))
                    quorum.answered(push.source, now_s)
                    if version >= end:
                        active.discard(push.source)
                    continue
                yield from quorum.accepted(gradient)
                if total is None:
                    total, first_s = gradient, now_s
                else:
                    yield add(total, gradient)
                of.append((push.source, version))
            if total is None:
                break  # every worker has left, has ended, or was sent the last version
            quorum.complete(total, len(of))
            stopping = yield Apply(total, server_copy=True, of=tuple(of), dropped=tuple(dropped), completes=1.0)
            version += 1
            end = min(end, version + 1) if stopping else end
            now_s = yield Now()
            for source, _ in of:
                yield from port.reply(source, version, FINAL * (version >= end))
                quorum.answered(source, now_s)
                if version >= end:
                    active.discard(source)
        for source in last:
            yield from port.reply(source, version, FINAL)
        yield from port.close()

    def _seconds_left(self, total: Gradient | None, first_s: float) -> Program:
        """Seconds until the time-out of the present update; None before its first gradient, or without a time-out."""
        if self.timeout_s is None or total is None:
            return None
        return max(0.0, first_s + self.timeout_s - (yield Now()))

    def work(self, ctx: Context) -> Program:
        port, known = WorkerPort(self, ctx), fresh(ctx)
        versions = {shard: version for shard, version in known.items() if ctx.in_loop or version < (ctx.num_steps or 0)}
        while versions and ctx.num_steps != LOOP_ENDED:
            step = min(versions.values())
            replies = yield from port.push_pull(step, versions)
            known.update(versions)
            ended(versions, replies)
            yield EndStep(step, state=state_of(known), dropped=not LATE_FLAGS.isdisjoint(replies.values()))
        if ctx.in_loop:
            yield from leave(self, ctx, known)
