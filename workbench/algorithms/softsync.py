"""n-softsync: a server updates once for every p/n gradients, each divided by its staleness."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

from workbench.algorithms.parameter_server import (
    FINAL,
    LAST,
    NO_GRADIENT,
    ServerAlgorithm,
    ServerPort,
    add,
    take_steps,
)
from workbench.arguments import check_flag, check_whole
from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import Apply, Local, Program
from workbench.program import Card, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SoftsyncSGD(ServerAlgorithm):
    """w[t+1] = w[t] - lr * (1/c) sum_{i of c} g_i / max(1, tau_i),   the first c = floor(p / n) gradients of any workers

    A worker gets the present parameters at once, so no worker waits. tau_i is the gradient's own staleness, about n.
    `splits=1` updates once for every p gradients. (That is not synchronous SGD: one update may have two gradients of a
    fast worker.) `splits=p` is asynchronous SGD with lr / staleness. One worker is serial SGD. If fewer than c
    gradients remain at the end, they make one last update.

    Attributes:
        splits: n, number of updates for every p gradients, 1 to p.
        divide: divide each gradient by its staleness; otherwise take plain means.

    Paper: zhang2016softsync (n-softsync, lr / tau).
    """

    card: ClassVar[Card] = Card(
        paper="zhang2016softsync",
        staleness="about `splits`",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="2n on servers; replies in flight",
        roles="p workers, M servers",
    )

    splits: int = 1
    divide: bool = True

    def __post_init__(self) -> None:
        ServerAlgorithm.__post_init__(self)
        check_whole("splits", self.splits, 1, "n, updates for every p gradients, 1 to p")
        check_flag("divide", self.divide)

    def check(self, num_ranks: int) -> None:
        ServerAlgorithm.check(self, num_ranks)
        workers = self.roles(num_ranks).num_computing
        if self.splits > workers:
            raise ConfigError(
                f"splits={self.splits} on {workers} workers: use at most {workers}, one update for each gradient"
            )

    def serve(self, ctx: Context, shard: int) -> Program:
        port = ServerPort(self, ctx, shard)
        version = yield from port.open()
        last: list[int] = []
        of: list[tuple[int, int]] = []
        total: Gradient | None = None
        while len(last) < port.num_workers:
            message = yield from port.next_push()
            left = port.departed(message, last)
            gradient, flags = (None, 0) if left else port.read(message)
            if gradient is not None and not flags & NO_GRADIENT:
                of.append((message.source, gradient.version))
                stale = version - gradient.version
                if self.divide and stale > 1:
                    yield Local("sum", gradient.message_bytes, partial(gradient.body().div_, stale))
                if total is None:
                    total = gradient
                else:
                    yield add(total, gradient)
            if flags & LAST:
                last.append(message.source)
            group = max(1, port.num_workers // self.splits)
            if total is not None and (len(of) >= group or len(last) == port.num_workers):
                yield Apply(total, server_copy=True, of=tuple(of))
                version += 1
                of, total = [], None
            if not left and not flags & LAST:
                yield from port.reply(message.source, version)
        for source in last:
            yield from port.reply(source, version, FINAL)
        yield from port.close()

    def work(self, ctx: Context) -> Program:
        yield from take_steps(self, ctx)
