"""Synchronous SGD with backup workers: each update takes the first N of N + b gradients, and drops the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from workbench.algorithms.parameter_server import (
    DROPPED,
    FINAL,
    LATE_FLAGS,
    ServerAlgorithm,
    ServerPort,
    WorkerPort,
    add,
    check_positive,
    ended,
    fresh,
    state_of,
)
from workbench.algorithms.quorum import FixedQuorum, OnlineQuorum
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout
from workbench.ops import Apply, EndStep, Now, Program
from workbench.program import Card, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSGD(ServerAlgorithm):
    """w[t+1] = w[t] - lr * (1/N) sum_{first N} g_k(w[t]),   N = p - b workers

    A worker sends (g, t). The server drops a gradient of an older version than its own, and answers at once with its
    parameters. So a straggler catches up and skips the steps that it missed; no worker is cancelled. Staleness is 0.
    The mean is over the samples of the N gradients. Each server takes its own first N, so a worker may be late for one
    shard only. b = 0 is PS-Sync, synchronous SGD with the sum taken on servers: `ParameterServerSGD`. A worker that
    leaves counts as one of the b. If more than b have left, an update takes the gradients of all remaining workers.

    Args:
        backups: b; or "online": each server chooses N again for every update, by  min over N of  t(N) (1 + S/N).
            t(N) is the measured mean time of the N-th gradient. S is the measured noise scale of the gradients, in
            units of one worker's batch (McCandlish et al. 2018). I(N) = I (1 + S/N) is the number of updates that are
            needed with N gradients in each.
        timeout_s: the longest wait after the first gradient of an update; the update then takes the gradients that
            have arrived. With backups=0 it is used instead of backups, otherwise in addition.
        noise_scale: S, if it is known, for "online" only. None: it is measured.

    Paper: chen2016revisiting, Alg. 3-4 and section 3.1, which suggests time-outs. Choosing b online: after
    xu2020dynamic. The noise scale: mccandlish2018empirical, appendix A.1.
    """

    card: ClassVar[Card] = Card(
        paper="chen2016revisiting, Alg. 3-4; xu2020dynamic; mccandlish2018empirical, A.1",
        staleness="0; late gradients dropped",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="n on servers; replies in flight",
        roles="N + b workers, M servers",
    )

    backups: int | Literal["online"] = 1
    timeout_s: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        ServerAlgorithm.__post_init__(self)
        if self.backups != "online":
            check_positive(
                "backups", self.backups, int, 0, 'b, gradients that an update does not wait for, 0 or more, or "online"'
            )
        if self.timeout_s is not None:
            check_positive("timeout_s", self.timeout_s, (int, float), 0, "seconds after the first gradient, or None")
        if self.noise_scale is not None:
            check_positive(
                "noise_scale", self.noise_scale, (int, float), 0, "S, in gradients of one worker, or None to measure it"
            )
            if self.backups != "online":
                raise ConfigError(
                    f"noise_scale={self.noise_scale} chooses b online, and backups={self.backups} is fixed: leave "
                    'noise_scale out, or give backups="online"'
                )

    @property
    def max_staleness(self) -> int:
        return 0

    def check(self, num_ranks: int) -> None:
        ServerAlgorithm.check(self, num_ranks)
        workers = self.roles(num_ranks).num_computing
        if self.backups != "online" and self.backups >= workers:
            raise ConfigError(
                f"backups={self.backups} of {workers} workers leave no gradient to wait for: use at most {workers - 1}"
            )

    def bytes_per_step(self, rank: int, num_ranks: int, layout: Layout) -> float | None:
        if self.backups != 0 or self.timeout_s is not None:
            return None  # a straggler takes fewer steps
        return ServerAlgorithm.bytes_per_step(self, rank, num_ranks, layout)

    def serve(self, ctx: Context, shard: int) -> Program:
        port, end = ServerPort(self, ctx, shard), ctx.num_steps or 0
        version = yield from port.open()
        quorum = self._quorum(port.num_workers, (yield Now()))
        active = set(range(port.num_workers)) if version < end else set()  # workers that still need the last version
        while active:
            total: Gradient | None = None
            first_s = 0.0
            of: list[tuple[int, int]] = []
            dropped: list[tuple[int, int]] = []
            while active and (total is None or len(of) < port.at_most(quorum.size, of)):
                push = yield from port.next_push_within((yield from self._seconds_left(total, first_s)))
                if push is None:
                    break  # the time-out
                if port.departed(push):
                    quorum.left(push.rank)
                    active.discard(push.rank)
                    continue
                gradient, _ = port.read(push)
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
                break  # every worker has left or been sent the last version
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
        yield from port.close()

    def _quorum(self, num_workers: int, now_s: float) -> FixedQuorum | OnlineQuorum:
        if self.backups == "online":
            return OnlineQuorum(num_workers, self.noise_scale, now_s)
        return FixedQuorum(num_workers - self.backups)

    def _seconds_left(self, total: Gradient | None, first_s: float) -> Program:
        """Seconds until the time-out of the present update; None before its first gradient, and without a time-out."""
        if self.timeout_s is None or total is None:
            return None
        return max(0.0, first_s + self.timeout_s - (yield Now()))

    def work(self, ctx: Context) -> Program:
        port, known = WorkerPort(self, ctx), fresh(ctx)
        versions = {shard: version for shard, version in known.items() if version < (ctx.num_steps or 0)}
        while versions:
            step = min(versions.values())
            replies = yield from port.push_pull(step, versions)
            known.update(versions)
            ended(versions, replies)
            yield EndStep(step, state=state_of(known), dropped=not LATE_FLAGS.isdisjoint(replies.values()))


def ParameterServerSGD(*, shards: int = 1, dedicated: bool = False) -> BackupSGD:  # noqa: N802 - named as a class
    """PS-Sync: servers gather p gradients, update, and return the parameters: `BackupSGD(backups=0)`.

    Paper: li2018pipesgd (PS-Sync); chen2016revisiting, Alg. 3-4 with b = 0 (Sync-Opt).

    >>> ParameterServerSGD(shards=2).backups
    0
    """
    return BackupSGD(backups=0, shards=shards, dedicated=dedicated)
