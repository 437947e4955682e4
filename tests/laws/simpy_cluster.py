"""A cluster written a second time, on SimPy, from the description of the algorithms: `test_simpy` compares the
simulator with it.

Nothing of the package is used here. Each rank has one full-duplex interface: two queues with one server each. A message
begins when both sides have asked for it. It queues at the sender's and at the receiver's side at once, and takes its
bytes' time at each. It arrives `latency_s` after the later side has ended. If ranks share interfaces and switches, a
message queues in the same way at every queue on its route.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import simpy

Steps = Generator[simpy.Event, Any, Any]
AllReduce = Callable[["Cluster", int, int], Steps]  # of a cluster's rank, the how-manieth it is
Way = tuple[float, dict[Hashable, float]]  # seconds of latency, and of each queue that is passed the seconds a byte


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things take.

    Forward and backward of a step take `factors[step][rank]` times theirs; `way` leads from a rank to a rank.
    """

    way: Callable[[int, int], Way]
    sum_s_per_byte: float
    forward_s: float
    backward_s: float
    update_s: float
    factors: Sequence[Sequence[float]]


def equal_links(latency_s: float, s_per_byte: float) -> Callable[[int, int], Way]:
    """An interface a rank."""
    return lambda sender, to: (latency_s, {("out", sender): s_per_byte, ("in", to): s_per_byte})


@final
class Cluster:
    """Ranks that compute and send. Afterwards `ends[rank]` are the times at which the rank's steps ended."""

    def __init__(self, num_ranks: int, costs: Costs) -> None:
        self.env = simpy.Environment()
        self.num_ranks, self.costs = num_ranks, costs
        self.queues: dict[Hashable, simpy.Resource] = defaultdict(lambda: simpy.Resource(self.env))
        self.boxes: dict[Hashable, simpy.Store] = defaultdict(lambda: simpy.Store(self.env))
        self.ends: list[list[float]] = [[] for _ in range(num_ranks)]

    def run(self, programs: Sequence[Steps]) -> float:
        """Seconds until the last of these has ended; other processes may still wait for work."""
        self.env.run(self.env.all_of([self.env.process(program) for program in programs]))
        return float(self.env.now)

    def send(self, sender: int, to: int, box: Hashable, num_bytes: int, value: Any = None) -> simpy.Event:
        """Offer a message in one of the receiver's boxes; the event is that it has arrived."""
        arrived = self.env.event()
        self.boxes[to, box].put((sender, num_bytes, value, arrived))
        return arrived

    def receive(self, rank: int, box: Hashable) -> Steps:
        """The oldest message in a box: its sender, and its content."""
        sender, num_bytes, value, arrived = yield self.boxes[rank, box].get()
        if sender != rank:
            latency_s, passed = self.costs.way(sender, rank)
            held = [self._occupy(self.queues[queue], num_bytes * s_per_byte) for queue, s_per_byte in passed.items()]
            yield self.env.all_of([self.env.process(holding) for holding in held])
            yield self.env.timeout(latency_s)
        arrived.succeed()
        return sender, value

    def _occupy(self, queue: simpy.Resource, seconds: float) -> Steps:
        with queue.request() as turn:
            yield turn
            yield self.env.timeout(seconds)

    def add(self, num_bytes: int) -> simpy.Event:
        """Sum that many received bytes with the rank's own."""
        return self.env.timeout(num_bytes * self.costs.sum_s_per_byte)


def blocks(numel: int, count: int, itemsize: int) -> list[int]:
    """Bytes of each of `count` blocks, of which the first ones are an element longer."""
    return [itemsize * len(range(block, numel, count)) for block in range(count)]


# -- all-reduce ------------------------------------------------------------------------------------------------


def ring(numel: int, itemsize: int) -> AllReduce:
    """In hop h rank i sends block i - h - 1 to the right and receives block i - h - 2 from the left.

    It asks for a block as soon as it has the one before. Empty blocks are not sent.
    """

    def run(cluster: Cluster, rank: int, number: int) -> Steps:
        p = cluster.num_ranks
        sizes, hops = blocks(numel, p, itemsize), 2 * (p - 1)

        def pass_on(hop: int) -> simpy.Event | None:
            size = sizes[(rank - hop - 1) % p]
            return cluster.send(rank, (rank + 1) % p, (number, hop), size) if size and hop < hops else None

        def ask(hop: int) -> simpy.Event | None:
            asks = hop < hops and sizes[(rank - hop - 2) % p]
            return cluster.env.process(cluster.receive(rank, (number, hop))) if asks else None

        asked = ask(0)
        sending = pass_on(0)
        for hop in range(hops):
            here = asked
            if here is not None:
                yield here
            asked = ask(hop + 1)
            if here is not None and hop < p - 1:
                yield cluster.add(sizes[(rank - hop - 2) % p])
            following = pass_on(hop + 1)
            if sending is not None:
                yield sending
            sending = following

    return run


def tree(num_bytes: int) -> AllReduce:
    """Binomial: a rank without its lowest set bit is its parent.

    Up with sums, the smallest subtree first, and down, the largest first.
    """

    def run(cluster: Cluster, rank: int, number: int) -> Steps:
        below, bit = [], 1
        while rank % (2 * bit) == 0 and bit < cluster.num_ranks:
            if rank + bit < cluster.num_ranks:
                below.append(rank + bit)
            bit *= 2
        for child in below:
            yield from cluster.receive(rank, (number, "up", child))
            yield cluster.add(num_bytes)
        if rank:
            yield cluster.send(rank, rank - bit, (number, "up", rank), num_bytes)
            yield from cluster.receive(rank, (number, "down"))
        for child in reversed(below):
            yield cluster.send(rank, child, (number, "down"), num_bytes)

    return run


def halving_doubling(numel: int, itemsize: int) -> AllReduce:
    """For a power of two of ranks: halves are exchanged over distances p/2, p/4, ..., 1 and summed; sums return the same way."""

    def run(cluster: Cluster, rank: int, number: int) -> Steps:
        p = cluster.num_ranks
        sizes = blocks(numel, p, itemsize)
        distances = [p >> shift for shift in range(1, p.bit_length())]

        def exchange(distance: int, sent: int, summed: int, back: bool) -> Steps:
            sending = cluster.send(rank, rank ^ distance, (number, distance, back), sent) if sent else None
            if summed:
                yield from cluster.receive(rank, (number, distance, back))
                if not back:
                    yield cluster.add(summed)
            if sending is not None:
                yield sending

        for back in (False, True):
            for distance in reversed(distances) if back else distances:
                mine, other = (
                    sum(sizes[at - at % distance : at - at % distance + distance]) for at in (rank, rank ^ distance)
                )
                yield from exchange(distance, mine if back else other, other if back else mine, back)

    return run


def library(seconds: float) -> AllReduce:
    """As one operation of all ranks: begins when the last has come and those before it are done, and takes so long."""
    meetings: dict[int, list[simpy.Event]] = defaultdict(list)
    network: list[simpy.Resource] = []

    def hold(cluster: Cluster, number: int) -> Steps:
        with network[0].request() as turn:
            yield turn
            yield cluster.env.timeout(seconds)
        for event in meetings[number]:
            event.succeed()

    def run(cluster: Cluster, rank: int, number: int) -> Steps:
        if not network:
            network.append(simpy.Resource(cluster.env))
        over = cluster.env.event()
        meetings[number].append(over)
        if len(meetings[number]) == cluster.num_ranks:
            cluster.env.process(hold(cluster, number))
        yield over

    return run


# -- algorithms ---------------------------------------------------------------------------------------------------


def pipe_sgd(costs: Costs, num_ranks: int, num_steps: int, width: int, all_reduce: AllReduce) -> Cluster:
    """A compute and a communication process a rank; up to `width` gradients under way, which are summed one after the other."""
    cluster = Cluster(num_ranks, costs)
    env = cluster.env

    def communicate(rank: int, gradients: simpy.Store) -> Steps:
        for number in range(num_steps):
            summed = yield gradients.get()
            yield from all_reduce(cluster, rank, number)
            summed.succeed()

    def compute(rank: int) -> Steps:
        gradients, in_flight = simpy.Store(env), deque[simpy.Event]()
        env.process(communicate(rank, gradients))
        for step in range(num_steps):
            factor = costs.factors[step][rank]
            yield env.timeout(costs.forward_s * factor)
            yield env.timeout(costs.backward_s * factor)
            in_flight.append(env.event())
            gradients.put(in_flight[-1])
            if len(in_flight) == width:
                yield in_flight.popleft()
                yield env.timeout(costs.update_s)
            cluster.ends[rank].append(env.now)
        for summed in in_flight:
            yield summed
            yield env.timeout(costs.update_s)

    cluster.run([compute(rank) for rank in range(num_ranks)])
    return cluster


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of the parameters and where it is kept; ready when `ready` of backward is done, `update` of a whole update's time."""

    rank: int
    num_bytes: int
    ready: float
    update: float


STAMP_BYTES = 8  # of a version, with each push and each reply


def parameter_servers(
    costs: Costs, num_ranks: int, num_workers: int, num_steps: int, shards: Sequence[Shard], quorum: int | None = None
) -> Cluster:
    """Workers push each shard when it is ready and take the answers in turn.

    Without `quorum` a server updates at every push and answers it. With it, a server updates once that many gradients
    of its version are there; a later one is answered at once and not used.
    """
    cluster = Cluster(num_ranks, costs)
    env = cluster.env

    def answer(shard: int, worker: int, version: int) -> None:
        mine = shards[shard]
        cluster.send(mine.rank, worker, ("parameters", shard), mine.num_bytes + STAMP_BYTES, version)

    def serve_each(shard: int) -> Steps:
        last: list[int] = []
        while len(last) < num_workers:
            worker, step = yield from cluster.receive(shards[shard].rank, ("push", shard))
            yield env.timeout(costs.update_s * shards[shard].update)
            if step == num_steps - 1:
                last.append(worker)
            else:
                answer(shard, worker, step + 1)
        for worker in last:
            answer(shard, worker, num_steps)

    def serve_together(shard: int, quorum: int) -> Steps:
        version, left, there = 0, num_workers, list[int]()
        while left:
            worker, of_version = yield from cluster.receive(shards[shard].rank, ("push", shard))
            if of_version < version:
                left -= version == num_steps
                answer(shard, worker, version)
                continue
            if there:
                yield cluster.add(shards[shard].num_bytes)
            there.append(worker)
            if len(there) == quorum:
                yield env.timeout(costs.update_s * shards[shard].update)
                version += 1
                left -= quorum if version == num_steps else 0
                for worker in there:
                    answer(shard, worker, version)
                there = []

    def push(rank: int, shard: int, after_s: float, step: int) -> Steps:
        yield env.timeout(after_s)
        yield cluster.send(rank, shards[shard].rank, ("push", shard), shards[shard].num_bytes + STAMP_BYTES, step)

    def work(rank: int) -> Steps:
        step = 0
        while step < num_steps:
            backward_s = costs.backward_s * costs.factors[step][rank]
            yield env.timeout(costs.forward_s * costs.factors[step][rank])
            pushes = [
                env.process(push(rank, shard, backward_s * part.ready, step)) for shard, part in enumerate(shards)
            ]
            yield env.timeout(backward_s)
            for shard in range(len(shards)):
                _, version = yield from cluster.receive(rank, ("parameters", shard))
            yield env.all_of(pushes)
            cluster.ends[rank].append(env.now)
            step = version

    for shard in range(len(shards)):
        env.process(serve_each(shard) if quorum is None else serve_together(shard, quorum))
    cluster.run([work(rank) for rank in range(num_workers)])
    return cluster
