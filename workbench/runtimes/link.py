"""What the network between this run's ranks costs, measured before the run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from workbench.costs import Network
from workbench.runtimes.transport import CLOCK_TAG, Patience, Transport

SMALL_BYTES, LARGE_BYTES = 8, 1 << 20
ROUNDS = 8


def measure_link(transport: Transport, patience: Callable[[str], Patience]) -> Network | None:
    """Latency, bandwidth and cost of summing, equal on all ranks; None for one rank.

    Pairs of neighbouring ranks (0 and 1, 2 and 3, ...) exchange messages; the quickest of some rounds is the link's, and
    the slowest pair's counts.
    """
    if transport.num_workers == 1:
        return None
    peer = transport.rank ^ 1
    found = (0.0, 0.0)
    if peer < transport.num_workers:
        small, large = (_one_way(transport, peer, torch.zeros(size, dtype=torch.uint8), patience) for size in (SMALL_BYTES, LARGE_BYTES))
        found = (small, max(large - small, 1e-9) / (LARGE_BYTES - SMALL_BYTES))
    values = torch.ones(LARGE_BYTES // 4)
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        values.add_(values)
    gamma = (time.perf_counter() - begin) / ROUNDS / LARGE_BYTES
    texts = transport.gather_texts(" ".join(map(repr, (*found, gamma))), patience("all ranks to measure the network"))
    latency, beta, gamma = (max(column) for column in zip(*(map(float, text.split()) for text in texts), strict=True))
    return Network(latency_s=latency, bandwidth_bytes_per_s=1.0 / beta, sum_s_per_byte=gamma, name="measured")


def _one_way(transport: Transport, peer: int, message: Tensor, patience: Callable[[str], Patience]) -> float:
    """Seconds from a send to its receipt: half the quickest round trip."""
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for sending in (transport.rank < peer, transport.rank > peer):
            start = transport.start_send if sending else transport.start_recv
            start(peer, message, CLOCK_TAG).wait(patience("the network to be measured"))
        best = min(best, time.perf_counter() - begin)
    return best / 2
