"""Asynchronous SGD on parameter servers: how often the parameters change, and how late gradients are.

A worker's cycle is all that is between two of its pushes: compute, the push, the server's update, the reply.
"""

from __future__ import annotations

from workbench.collectives import Link
from workbench.errors import ConfigError


def service_s(num_bytes: float, update_s: float, link: Link, shards: int = 1) -> float:
    """What one gradient takes of a server that is never idle: alpha + m beta + u / M, m = n/M.

    It asks for the next push when it has made its update; replies go out meanwhile. Derived here.
    """
    return link.latency_s + num_bytes / shards / link.bandwidth_bytes_per_s + update_s / shards


def cycle_s(compute_s: float, num_bytes: float, update_s: float, link: Link) -> float:
    """A worker's cycle where it never waits for others, one server: c + u + 2 (alpha + n beta). Derived here.

    `compute_s` is E[X]: forward and backward.
    """
    return compute_s + update_s + 2 * (link.latency_s + num_bytes / link.bandwidth_bytes_per_s)


def update_interval_s(cycle_s: float, num_workers: int, service_s: float = 0.0) -> float:
    """Seconds between updates: max(cycle / p, service).

    With E[X] of compute and a server that costs nothing it is E[X] / p, whatever the law of X. A server that is busy all the time makes
    it `service_s`. Exact for equal workers of constant speed; with random ones a bound from below that is met at both ends,
    since pushes queue. Derived here.

    >>> update_interval_s(1.0, 4), update_interval_s(1.0, 4, service_s=0.5)
    (0.25, 0.5)

    Raises:
        ConfigError: nobody works.
    """
    _check(num_workers)
    return max(cycle_s / num_workers, service_s)


def busiest_workers(cycle_s: float, service_s: float) -> float:
    """The number of workers above which a server is the bottleneck: cycle / service; infinite for one that costs nothing.

    >>> busiest_workers(1.0, 0.125)
    8.0
    """
    return cycle_s / service_s if service_s else float("inf")


def mean_staleness(num_workers: int) -> int:
    """p - 1, in updates, over all gradients in the long run, whatever the laws and whether or not the server is busy.

    For each worker, every update of another falls between exactly one of its reads and the update that follows: so each update
    makes the gradients of the p - 1 others one update staler. Who is slow is staler than who is quick; the mean is p - 1. Derived
    here (chen2016revisiting reports about N - 1 for equal workers).

    >>> mean_staleness(4)
    3
    """
    _check(num_workers)
    return num_workers - 1


def _check(num_workers: int) -> None:
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigError(f"num_workers={num_workers}: a whole number, 1 or more")
