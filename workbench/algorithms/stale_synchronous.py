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
class _Clocks:
    """A server's clocks of the workers that have not sent their last push. Each call takes constant time on average."""

    def __init__(self, num_workers: int, bound: int) -> None:
        self._bound = bound
        self._clocks = dict.fromkeys(range(num_workers), 0)  # worker -> number of its steps
        self._counts = Counter(self._clocks.values())  # clock -> number of workers at it
        self._slowest = 0
        self._waiting: list[int] = []  # for their reply: all but the newest are at the clock slowest + bound + 1

    def advance(self, worker: int) -> None:
        """A worker has taken a step, and waits for its reply."""
        self._counts[self._clocks[worker]] -= 1
        self._clocks[worker] += 1
        self._counts[self._clocks[worker]] += 1
        self._waiting.append(worker)

    def remove(self, worker: int) -> None:
        """A worker takes no more steps: none waits for it."""
        if worker in self._clocks:
            self._counts[self._clocks.pop(worker)] -= 1
        if worker in self._waiting:
            self._waiting.remove(worker)

    def release(self) -> list[int]:
        """Return the workers that wait no longer, in the order of their pushes."""
        before = self._slowest
        while self._clocks and not self._counts[self._slowest]:  # clocks only grow, so each is passed once at most
            del self._counts[self._slowest]
            self._slowest += 1
        released: list[int] = []
        if self._slowest > before:
            released, self._waiting = self._waiting, released
        elif self._waiting and self._clocks[self._waiting[-1]] - self._slowest <= self._bound:  # it has just pushed
            released.append(self._waiting.pop())
        return released


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
        clocks = _Clocks(port.num_workers, self.bound)
        last: dict[int, None] = {}  # in the order of their last pushes
        while len(last) < port.num_workers:
            message = yield from port.next_push()
            if port.departed(message, last):
                clocks.remove(message.rank)
            else:
                source = message.source
                gradient, flags = port.read(message)
                if not flags & NO_GRADIENT:
                    yield Apply(gradient, server_copy=True, of=((source, gradient.version),))
                    version += 1
                if flags & LAST:
                    clocks.remove(source)
                    last[source] = None
                else:
                    clocks.advance(source)
            for worker in clocks.release():
                yield from port.reply(worker, version)
        for source in last:
            yield from port.reply(source, version, FINAL)
        yield from port.close()

    def work(self, ctx: Context) -> Program:
        yield from take_steps(self, ctx)
