"""Arrival times of a server's gradients: the k-th gradient of each update."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.trace.run import Run


def arrivals(run: Run, bucket: int = 0) -> NDArray[np.float64]:
    """Return the seconds until the k-th gradient of each iteration arrives, shape (updates, gradients), k ascending.

    An iteration begins when the last server has made the previous update, because a worker needs the parameters of all
    servers.

    The server must have its own rank, so that every gradient is a message. Only updates whose messages are in the
    trace are used. In a run that waits for all workers, a row is an iteration. With backup workers, a row holds the
    gradients that were used.

    Args:
        bucket: the server, by its shard of the gradient.

    Raises:
        ConfigError: the run has no such server, or no update in its trace has as many messages as gradients.
    """
    updates = [row for row in run.updates() if row["bucket"] == bucket]
    if not updates:
        raise ConfigError(
            f"bucket={bucket}: no such server recorded an update: give a run of an algorithm with servers"
        )
    spans = run.spans.of_rank(updates[0]["rank"])
    heard = np.sort(spans.table[spans.is_kind(["recv"])]["end_s"])
    begins = {0: 0.0}
    for row in run.updates():
        begins[row["update"]] = max(row["seconds"], begins.get(row["update"], 0.0))
    most = min(len(row["sources"]) for row in updates)
    ends = [(begins[row["update"] - 1], row["seconds"]) for row in updates]
    rows = [heard[(heard > begin) & (heard <= end)][:most] - begin for begin, end in ends]
    whole = [row for row in rows if len(row) == most]
    if not whole:
        raise ConfigError(
            "the trace lacks messages of gradients: use trace_steps=None, and an algorithm with dedicated=True"
        )
    return np.array(whole)


def share_in_time(times: NDArray[np.float64], missing: int, share: float) -> float:
    """Return the share of iterations in which all but `missing` gradients arrive by a deadline.

    The deadline is the time by which all gradients arrive in a `share` of the iterations.

    Args:
        times: (iterations, gradients) seconds, ascending in each row.
        missing: number of gradients that may be late.
        share: share of the iterations, 0 to 1.
    """
    return float(np.mean(times[:, -1 - missing] <= np.quantile(times[:, -1], share)))


def tail_growth(times: NDArray[np.float64], tail: float = 0.03) -> float:
    """Return how much longer the wait for one more gradient is among the last gradients than before.

    It is the mean wait for each of the last gradients (a share `tail`), divided by the mean wait for each gradient from
    the middle to there.

    >>> tail_growth(np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 9.0]]), tail=0.2)
    2.5
    """
    count, mean = times.shape[1], times.mean(axis=0)
    middle, high = count // 2, math.floor((1 - tail) * count)
    late = (mean[-1] - mean[high - 1]) / (count - high)
    return float(late / ((mean[high - 1] - mean[middle - 1]) / (high - middle)))


def tail_s(times: NDArray[np.float64], share: float = 0.9) -> float:
    """Return the mean seconds from a `share` of the gradients to all of them."""
    return float((times[:, -1] - times[:, math.ceil(share * times.shape[1]) - 1]).mean())


def share_of_updates_in_time(workers: int, backups: int, share: float) -> float:
    """Return the share of iterations in which all but b of p independent workers are in time.

    All p workers are in time in a `share` of the iterations:

        F(T)^p = share;   P = sum_{j<=b} C(p, j) (1 - F)^j F^(p-j)

    P does not depend on the distribution of arrival times. Derived here.

    >>> round(share_of_updates_in_time(100, 2, 0.3), 2)
    0.88
    """
    from scipy.stats import binom

    return float(binom.cdf(backups, workers, 1 - share ** (1 / workers)))
