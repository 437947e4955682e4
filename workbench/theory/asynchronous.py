"""Asynchronous SGD on parameter servers: how often the parameters change, and how stale gradients are.

A worker's cycle is the time between two of its pushes: compute, push, the server's update, reply.
"""

from __future__ import annotations

from workbench.collectives import Link
from workbench.errors import ConfigError


def service_s(num_bytes: float, update_s: float, link: Link, shards: int = 1) -> float:
    """Return the service time of one gradient at a server that is never idle: alpha + m beta + u / M, m = n/M.

    The server asks for the next push after its update; replies are sent in the meantime. Derived here.
    """
    return link.latency_s + num_bytes / shards / link.bandwidth_bytes_per_s + update_s / shards


def cycle_s(compute_s: float, num_bytes: float, update_s: float, link: Link) -> float:
    """Return the cycle of a worker that never waits for others, with one server: c + u + 2 (alpha + n beta).

    Derived here.

    `compute_s` is E[X], for forward and backward.
    """
    return compute_s + update_s + 2 * (link.latency_s + num_bytes / link.bandwidth_bytes_per_s)


def update_interval_s(cycle_s: float, num_workers: int, service_s: float = 0.0) -> float:
    """Return the seconds between updates: max(cycle / p, service).

    With compute E[X] and a server that takes no time it is E[X] / p, for any distribution of X. At a server that is
    always busy it is `service_s`. It is exact for equal workers with constant speed. With random speeds pushes queue,
    and it is a lower bound, reached in these two cases. Derived here.

    >>> update_interval_s(1.0, 4), update_interval_s(1.0, 4, service_s=0.5)
    (0.25, 0.5)

    Raises:
        ConfigError: there are no workers.
    """
    _check(num_workers)
    return max(cycle_s / num_workers, service_s)


def busiest_workers(cycle_s: float, service_s: float) -> float:
    """Return the number of workers above which a server is the bottleneck: cycle / service.

    It is infinite for a server that takes no time.

    >>> busiest_workers(1.0, 0.125)
    8.0
    """
    return cycle_s / service_s if service_s else float("inf")


def mean_staleness(num_workers: int) -> int:
    """Return the mean staleness p - 1, in updates, over all gradients in the long run.

    It holds for all distributions, with a busy and with an idle server. For each worker, every update of another worker
    falls between exactly one of its reads and its following update. So each update makes the gradients of the p - 1
    others one update staler. A slow worker's gradients are staler than a quick worker's; the mean is p - 1. Derived
    here (chen2016revisiting reports about N - 1 for equal workers).

    >>> mean_staleness(4)
    3
    """
    _check(num_workers)
    return num_workers - 1


def _check(num_workers: int) -> None:
    if not isinstance(num_workers, int) or num_workers < 1:
        raise ConfigError(f"num_workers={num_workers}: give a whole number, 1 or more")
