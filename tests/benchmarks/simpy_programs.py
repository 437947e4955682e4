"""The message schedules of `simulator.py` on SimPy, each in its cheapest form.

`bare`: a message is a timeout and an item in its receiver's store; a server takes one push after the other. There are
no interfaces to share. `interfaces`: a message holds its sender's outgoing and its receiver's incoming interface
(`simpy.Resource`), so other messages on them wait. Nothing is traced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

import simpy

Steps = Generator[simpy.Event, Any, Any]
Transfer = Callable[[int, int], Steps]  # from a rank to a rank


@final
@dataclass(frozen=True, slots=True)
class Counts:
    """The result of a run; `seconds` are virtual."""

    messages: int
    events: int
    seconds: float


@final
class Wires:
    """Seconds of a message, and the resources that it holds meanwhile."""

    def __init__(self, env: simpy.Environment, num_ranks: int, seconds: float, *, interfaces: bool) -> None:
        self.env, self.seconds = env, seconds
        self.transfer: Transfer = self._held if interfaces else self._bare
        if interfaces:
            self._out = [simpy.Resource(env) for _ in range(num_ranks)]
            self._in = [simpy.Resource(env) for _ in range(num_ranks)]

    def _bare(self, sender: int, to: int) -> Steps:
        yield self.env.timeout(self.seconds)

    def _held(self, sender: int, to: int) -> Steps:
        with self._out[sender].request() as out, self._in[to].request() as into:
            yield out
            yield into
            yield self.env.timeout(self.seconds)


def counted(env: simpy.Environment, messages: int) -> Counts:
    env.run()
    return Counts(messages, next(env._eid), float(env.now))


def ring(compute_s: Sequence[Sequence[float]], message_s: float, *, width: int = 2, interfaces: bool = False) -> Counts:
    """Pipe-SGD with a ring; `compute_s[step][rank]` seconds of a minibatch."""
    env = simpy.Environment()
    num_steps, p = len(compute_s), len(compute_s[0])
    wires = Wires(env, p, message_s, interfaces=interfaces)
    arrived = [simpy.Store(env) for _ in range(p)]
    hops = 2 * (p - 1)

    def communicate(rank: int, gradients: simpy.Store) -> Steps:
        right, mine, there = (rank + 1) % p, arrived[rank], arrived[(rank + 1) % p]
        for _ in range(num_steps):
            summed = yield gradients.get()
            for _ in range(hops):
                yield from wires.transfer(rank, right)
                there.put(None)
                yield mine.get()
            summed.succeed()

    def compute(rank: int) -> Steps:
        gradients, in_flight = simpy.Store(env), deque[simpy.Event]()
        env.process(communicate(rank, gradients))
        for seconds in compute_s:
            yield env.timeout(seconds[rank])
            in_flight.append(env.event())
            gradients.put(in_flight[-1])
            if len(in_flight) == width:
                yield in_flight.popleft()

    for rank in range(p):
        env.process(compute(rank))
    return counted(env, num_steps * p * hops)


def server(
    compute_s: Sequence[Sequence[float]], message_s: float, update_s: float, *, interfaces: bool = False
) -> Counts:
    """Asynchronous SGD: workers push and wait for the parameters; the server, on a separate rank, receives one push after the other."""
    env = simpy.Environment()
    num_steps, p = len(compute_s), len(compute_s[0])
    wires = Wires(env, p + 1, message_s, interfaces=interfaces)
    pushes, replies = simpy.Store(env), [simpy.Store(env) for _ in range(p)]

    def serve() -> Steps:
        for _ in range(num_steps * p):
            rank = yield pushes.get()
            yield from wires.transfer(rank, p)
            yield env.timeout(update_s)
            replies[rank].put(None)

    def work(rank: int) -> Steps:
        for seconds in compute_s:
            yield env.timeout(seconds[rank])
            pushes.put(rank)
            yield replies[rank].get()
            yield from wires.transfer(p, rank)

    env.process(serve())
    for rank in range(p):
        env.process(work(rank))
    return counted(env, 2 * num_steps * p)
