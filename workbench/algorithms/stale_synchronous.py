"""Stale synchronous parallel SGD: asynchronous, but the fastest worker waits if it is too far ahead of the slowest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, final

from workbench.algorithms.parameter_server import (
    FINAL,
    LAST,
    NO_GRADIENT,
    ServerAlgorithm,
    ServerPort,
    take_steps,
)
from workbench.arguments import check_whole
from workbench.ops import Apply, Program
from workbench.program import Card, Context


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StaleSynchronousSGD(ServerAlgorithm):
    """w <- w - lr * g_k(w_read)   on any gradient; worker k gets its reply when   clock_k - min_i clock_i <= bound

    A worker's clock is its number of steps. Between a worker's read and its push, at most 2 bound + 1 pushes of any
    other worker are applied. So staleness is at most (p - 1)(2 bound + 1). With `bound=0` each worker waits for all
    others at each step, and each gradient is still a separate update. One worker is serial SGD. In a resumed run all
    clocks begin at 0. No worker waits for one that has left.

    Attributes:
        bound: number of steps that a worker may be ahead of the slowest one before it waits.

    Paper: ho2013ssp (SSP); the bounded-staleness baseline that the reviewers of chen2016revisiting ask for.
    """

    card: ClassVar[Card] = Card(
        paper="ho2013ssp",
        staleness="at most (p - 1)(2 bound + 1)",
        bytes_per_step="n + 8M; server (p+M-2) (n/M + 8)",
        memory="n on servers; replies in flight",
        roles="p workers, M servers",
    )

    bound: int = 3

    def __post_init__(self) -> None:
        ServerAlgorithm.__post_init__(self)
        check_whole(
            "bound", self.bound, 0, "the steps by which the fastest worker may be ahead of the slowest, 0 or more"
        )

    def serve(self, ctx: Context, shard: int) -> Program:
        port = ServerPort(self, ctx, shard)
        version = yield from port.open()
        clocks = dict.fromkeys(range(port.num_workers), 0)  # of the workers that have not sent their last push
        counts = Counter(clocks.values())  # clock -> number of workers at it
        slowest = 0
        waiting: list[int] = []  # workers that wait for the slowest: all at the clock slowest + bound + 1
        last: dict[int, None] = {}  # in the order of their last pushes
        while len(last) < port.num_workers:
            message = yield from port.next_push()
            if port.departed(message, last):
                if message.rank in clocks:
                    counts[clocks.pop(message.rank)] -= 1
                if message.rank in waiting:
                    waiting.remove(message.rank)
            else:
                source = message.source
                gradient, flags = port.read(message)
                if not flags & NO_GRADIENT:
                    yield Apply(gradient, server_copy=True, of=((source, gradient.version),))
                    version += 1
                counts[clocks[source]] -= 1
                if flags & LAST:
                    del clocks[source]
                    last[source] = None
                else:
                    clocks[source] += 1
                    counts[clocks[source]] += 1
                    waiting.append(source)
            before = slowest
            while clocks and not counts[slowest]:  # clocks only grow, so each is passed once at most
                del counts[slowest]
                slowest += 1
            released: list[int] = []
            if slowest > before:
                released, waiting = waiting, released
            elif waiting and clocks[waiting[-1]] - slowest <= self.bound:  # the one that has just pushed
                released.append(waiting.pop())
            for worker in released:
                yield from port.reply(worker, version)
        for source in last:
            yield from port.reply(source, version, FINAL)
        yield from port.close()

    def work(self, ctx: Context) -> Program:
        yield from take_steps(self, ctx)
