"""Asynchronous SGD with parameter servers: no worker waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from workbench.algorithms.parameter_server import (
    DROPPED,
    FINAL,
    LAST,
    NO_GRADIENT,
    ServerAlgorithm,
    ServerPort,
    take_steps,
)
from workbench.arguments import check_number, check_whole
from workbench.ops import Apply, Program
from workbench.program import Card, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSGD(ServerAlgorithm):
    """Server of shard j, on any gradient:   w[j] <- w[j] - lr * g_k[j](w_read),   then sends w[j] to that worker k

    A worker's parameters may match no version, because other pushes come between its reads of two shards. Staleness
    depends on timing: p - 1 on average for p equal workers. One worker is serial SGD. Each worker takes every step of
    the run once, so p workers make p updates a step. The servers continue without a worker that leaves.

    Attributes:
        clip_norm: largest global norm of a gradient that is pushed; then no push during backward. None: no clipping.
        cutoff: largest staleness, in updates; a gradient with more is dropped. None: all are used.

    Paper: chen2016revisiting, Alg. 1 and 2 (Async-Opt), section A.3 (clipping). Its reviewers asked for the cut-off.
    """

    card: ClassVar[Card] = Card(
        paper="chen2016revisiting, Alg. 1-2",
        staleness="p - 1 on average, unbounded",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="n on servers; replies in flight",
        roles="p workers, M servers",
    )

    clip_norm: float | None = None
    cutoff: int | None = None

    def __post_init__(self) -> None:
        ServerAlgorithm.__post_init__(self)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, 1e-12, "a norm above 0, or None")
        if self.cutoff is not None:
            check_whole("cutoff", self.cutoff, 0, "the largest staleness that is applied, 0 or more, or None")

    def serve(self, ctx: Context, shard: int) -> Program:
        port = ServerPort(self, ctx, shard)
        version = yield from port.open()
        last: dict[int, bool] = {}  # worker -> whether its last push came too late
        dropped: list[tuple[int, int]] = []
        while len(last) < port.num_workers:
            message = yield from port.next_push()
            if port.departed(message, last):
                continue
            gradient, flags = port.read(message)
            if flags & NO_GRADIENT:
                last[message.source] = False
                continue
            push = (message.source, gradient.version)
            late = self.cutoff is not None and version - gradient.version > self.cutoff
            if late:
                dropped.append(push)
            else:
                yield Apply(gradient, server_copy=True, of=(push,), dropped=tuple(dropped))
                version += 1
                dropped = []
            if flags & LAST:
                last[message.source] = late
            else:
                yield from port.reply(message.source, version, DROPPED * late)
        for source, late in last.items():  # all have ended: all get the same parameters
            yield from port.reply(source, version, FINAL | DROPPED * late)
        yield from port.close()

    def work(self, ctx: Context) -> Program:
        yield from take_steps(self, ctx, self.clip_norm)
