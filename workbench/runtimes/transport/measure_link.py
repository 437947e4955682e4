"""Measure latency and bandwidth of this run's network before the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import final

import torch
from torch import Tensor

from workbench.collectives import Ring
from workbench.runtimes.liveness.membership import require_all
from workbench.runtimes.transport.base import CLOCK_TAG, Deadline, Transport

SMALL_BYTES, LARGE_BYTES, LONG_BYTES, LONGEST_BYTES = 8, 1 << 20, 8 << 20, 64 << 20
ROUNDS, LARGE_ROUNDS, RING_ROUNDS, LONG_ROUNDS, LONGEST_ROUNDS = 8, 3, 2, 5, 3
# Warm-up: a library's first long sums take two to three times as long as later ones.
LARGE_WARM, LONG_WARM, LONGEST_WARM = 1, 2, 1
LONG_LIMIT_S = 0.25  # longest sum that is worth measuring: on a slower network, shorter sums are bandwidth-bound too


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A measured link, equal on all ranks: `collectives.Auto` chooses by it.

    Attributes:
        latency_s, bandwidth_bytes_per_s, sum_s_per_byte: see `collectives.Link`. Measured while all ranks send and
            receive at once, as in a sum: they share processors and wires.
        native_latency_s, native_s_per_byte: of the library's all-reduce: a line through a short one and one of 1 MiB.
        long_s_per_byte: of the library's all-reduce, per byte beyond 1 MiB, where libraries change their algorithm.
        longest_s_per_byte: of the library's all-reduce, per byte of 64 MiB or more, where libraries allocate memory
            each time. None if no sum is as long, or if measuring it would take too long.
        slowdown: measured time of a ring, divided by that of its formula, which ignores processors and memory. Of a
            ring of 1 MiB, or of a longer one if the run has longer sums and a long ring does not take too long.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    sum_s_per_byte: float
    native_latency_s: float
    native_s_per_byte: float
    long_s_per_byte: float
    longest_s_per_byte: float | None = None
    slowdown: float = 1.0

    def native_s(self, num_bytes: float) -> float:
        """Seconds of the library's all-reduce of that many bytes."""
        if self.longest_s_per_byte is not None and num_bytes >= LONGEST_BYTES:
            return num_bytes * self.longest_s_per_byte
        short = min(num_bytes, LARGE_BYTES)
        return self.native_latency_s + short * self.native_s_per_byte + (num_bytes - short) * self.long_s_per_byte


def measure_link(
    transport: Transport, deadline: Callable[[str], Deadline], num_bytes: float = LONG_BYTES
) -> MeasuredLink | None:
    """Measure the link. All ranks must call it. None for one rank.

    For a message, the fastest of several rounds counts. For a sum of 1 MiB or more, it is the median, because a
    library's own times vary by a factor of two: the fastest promises what a training does not get. The slowest rank
    counts.

    Args:
        num_bytes: of the longest sum of the run: much longer ones are not measured.
    """
    if transport.num_workers == 1:
        return None
    quickest, usual = (
        partial(way, waits=partial(deadline, "the network to be measured")) for way in (_shortest_s, _usual)
    )
    short, long = (torch.ones(size // 4, device=transport.device) for size in (SMALL_BYTES, LARGE_BYTES))
    span = LARGE_BYTES - SMALL_BYTES
    hop = quickest(ROUNDS, lambda waits: _hop(transport, short, waits))
    long_hop = quickest(LARGE_ROUNDS, lambda waits: _hop(transport, long, waits))
    own = quickest(ROUNDS, lambda waits: transport.all_reduce(short, waits))
    long_own = usual(lambda waits: transport.all_reduce(long, waits), LARGE_WARM, LARGE_ROUNDS)
    long_ring = usual(lambda waits: _ring(transport, long, waits), 0, RING_ROUNDS)
    gamma = quickest(ROUNDS, lambda _: long.add_(long)) / LARGE_BYTES
    mine = (hop, max(long_hop - hop, 1e-9) / span, gamma, own, max(long_own - own, 0.0) / span, long_ring)
    latency, beta, gamma, native, native_beta, large_s = _slowest(transport, mine, deadline)
    link = MeasuredLink(
        latency_s=latency,
        bandwidth_bytes_per_s=1.0 / beta,
        sum_s_per_byte=gamma,
        native_latency_s=native,
        native_s_per_byte=native_beta,
        long_s_per_byte=native_beta,
    )
    link = replace(link, slowdown=large_s / Ring().seconds(LARGE_BYTES, transport.num_workers, link))
    ring_s = Ring().seconds(LONG_BYTES, transport.num_workers, link)
    if num_bytes <= LARGE_BYTES or max(link.slowdown * ring_s, link.native_s(LONG_BYTES)) > LONG_LIMIT_S:
        return link
    longer = torch.ones(LONG_BYTES // 4, device=transport.device)
    long_s = (
        usual(lambda waits: transport.all_reduce(longer, waits)),
        usual(lambda waits: _ring(transport, longer, waits)),
    )
    own_s, found_s = _slowest(transport, long_s, deadline)
    long_beta = max(own_s - link.native_s(LARGE_BYTES), 0.0) / (LONG_BYTES - LARGE_BYTES)
    link = replace(link, long_s_per_byte=long_beta, slowdown=found_s / ring_s)
    if num_bytes < LONGEST_BYTES or link.native_s(LONGEST_BYTES) > LONG_LIMIT_S:
        return link
    longest = torch.ones(LONGEST_BYTES // 4, device=transport.device)
    own = usual(lambda waits: transport.all_reduce(longest, waits), LONGEST_WARM, LONGEST_ROUNDS)
    return replace(link, longest_s_per_byte=_slowest(transport, (own,), deadline)[0] / LONGEST_BYTES)


def _slowest(transport: Transport, mine: tuple[float, ...], deadline: Callable[[str], Deadline]) -> list[float]:
    """The largest of all ranks' numbers, element by element; equal on all ranks."""
    texts = require_all(
        transport.gather_texts(" ".join(map(repr, mine)), deadline("all ranks to measure the network")), "a measurement"
    )
    return [max(column) for column in zip(*(map(float, text.split()) for text in texts), strict=True)]


def _shortest_s(rounds: int, work: Callable[[Deadline], object], waits: Callable[[], Deadline]) -> float:
    return min(_seconds(rounds, work, waits))


def _usual(
    work: Callable[[Deadline], object],
    warm: int = LONG_WARM,
    rounds: int = LONG_ROUNDS,
    *,
    waits: Callable[[], Deadline],
) -> float:
    """Return the median seconds of long sums, after a warm-up."""
    return median(_seconds(warm + rounds, work, waits)[warm:])


def _seconds(rounds: int, work: Callable[[Deadline], object], waits: Callable[[], Deadline]) -> list[float]:
    """Return the seconds of each round. Each round has its own time-out."""
    found = []
    for _ in range(rounds):
        deadline = waits()
        begin = time.perf_counter()
        work(deadline)
        found.append(time.perf_counter() - begin)
    return found


def _hop(transport: Transport, message: Tensor, deadline: Deadline) -> None:
    """Send to the next rank and receive from the previous one, at once."""
    rank, p = transport.rank, transport.num_workers
    coming = transport.start_recv((rank - 1) % p, torch.empty_like(message), CLOCK_TAG)
    going = transport.start_send((rank + 1) % p, message, CLOCK_TAG)
    coming.wait(deadline)
    going.wait(deadline)


def _ring(transport: Transport, flat: Tensor, deadline: Deadline) -> None:
    """A ring, one message after the other, in blocks of one length: the remainder is not summed."""
    rank, p = transport.rank, transport.num_workers
    blocks = flat[: flat.numel() // p * p].view(p, -1)
    for hop in range(2 * (p - 1)):
        coming = torch.empty_like(blocks[0])
        into = transport.start_recv((rank - 1) % p, coming, CLOCK_TAG)
        out = transport.start_send((rank + 1) % p, blocks[(rank - hop - 1) % p], CLOCK_TAG)
        into.wait(deadline)
        out.wait(deadline)
        if hop < p - 1:
            blocks[(rank - hop - 2) % p].add_(coming)
        else:
            blocks[(rank - hop - 2) % p].copy_(coming)
