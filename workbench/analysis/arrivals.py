"""When a server's gradients arrive: the k-th of each update."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigError
from workbench.trace.run import Run


def arrivals(run: Run, bucket: int = 0) -> NDArray[np.float64]:
    """(updates, gradients) seconds until a server has heard the k-th gradient, k ascending, from the moment the iteration began.

    It begins when the last of the servers has made the update before, since a worker needs the parameters of all of them.

    Of a server on a rank of its own, whose every gradient is a message, and of the updates whose messages are in the trace. In a
    run that waits for all workers a row is an iteration; where some are not waited for, those of a row that came are counted.

    Args:
        bucket: which of the servers, by the part of the gradient that it serves.

    Raises:
        ConfigError: the run has no such server, or its trace has no updates with as many messages as gradients.
    """
    updates = [row for row in run.updates() if row["bucket"] == bucket]
    if not updates:
        raise ConfigError(f"bucket={bucket}: no server of this run says when it updated: give a run of a method with servers")
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
        raise ConfigError("no update has as many messages as gradients: trace all steps, with dedicated=True")
    return np.array(whole)


def late_together(workers: int, backups: int, share: float) -> float:
    """How often all but b of p independent workers are there by the moment that has all of them in a `share` of the iterations.

    F(T)^p = share;   P = sum_{j<=b} C(p, j) (1 - F)^j F^(p-j):   no law of lateness is left in it. Derived here.

    >>> round(late_together(100, 2, 0.3), 2)
    0.88
    """
    from scipy.stats import binom

    return float(binom.cdf(backups, workers, 1 - share ** (1 / workers)))
