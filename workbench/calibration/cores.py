"""Shared cores: the slowdown of each kind of work if threads need more cores than there are.

At each moment of a simulated run some threads need a core: threads that compute, and threads that sum, encode or
decode. A rank that sends needs a part of a core. Cores are shared as a scheduler shares them (max-min fair). No
thread gets more than it needs. Threads that need more than their share all get the same. The slowdown of each kind of
work is the mean over the moments at which that work runs. The slowdown changes the times of the run, so the run is
simulated again until run and slowdown agree.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.overlap import union
from workbench.analysis.summary import num_warm_up
from workbench.trace.kinds import COMPUTE_KINDS
from workbench.trace.run import Run

LOCAL = ("sum", "encode", "decode")
WIRE = ("send", "all_reduce", "reduce_scatter", "all_gather", "broadcast")


@final
@dataclass(frozen=True, slots=True)
class Slowness:
    """Factors by which work takes longer than with enough cores; 1 if there are enough.

    Attributes:
        compute: forward, backward, update.
        local: summing, encoding, decoding.
        wire: bytes on the wire.
        hop: the core time at a message's end: system calls, waking a thread.
    """

    compute: float = 1.0
    local: float = 1.0
    wire: float = 1.0
    hop: float = 1.0

    def geometric_mean(self, other: Slowness) -> Slowness:
        """Return the geometric mean with another."""
        return Slowness(*(float(np.sqrt(mine * its)) for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def is_like(self, other: Slowness, tolerance: float) -> bool:
        """Return whether all numbers differ by at most this relative tolerance."""
        return all(abs(its / mine - 1) <= tolerance for mine, its in zip(astuple(self), astuple(other), strict=True))


def fair_share(wanted: tuple[tuple[int, float], ...], cores: float) -> float:
    """Return the largest share of a thread, for pairs (number of threads, cores that each needs).

    It is infinite if all threads get what they need.

    >>> fair_share(((2, 1.0), (2, 0.25)), 2.0), fair_share(((1, 1.0),), 2.0)
    (0.75, inf)
    """
    left, num = cores, sum(count for count, _ in wanted)
    for count, each in sorted(wanted, key=lambda item: item[1]):
        if each * num > left:
            return left / num
        left, num = left - count * each, num - count
    return float("inf")


def slowness_in(run: Run, *, cores: float, threads: int, wire_part: float, s_per_byte: float) -> Slowness:
    """Return the mean slowdown of each kind of work in this simulated run.

    Args:
        cores: number of cores that all ranks share.
        threads: compute threads of a rank.
        wire_part: the part of a core that a rank needs while it sends.
        s_per_byte: seconds of a byte on the wire in this run. The bytes of a communication span are sent at its end,
            after its wait.
    """
    num_seconds, counts = _moments(run, s_per_byte)
    spent, done = np.zeros(4), np.zeros(4)
    for seconds, (compute, local, wire) in zip(num_seconds.tolist(), counts.tolist(), strict=True):
        others = ((compute * threads, 1.0), (local, 1.0))
        share = fair_share((*others, (wire, wire_part)), cores)
        ending = fair_share((*others, (wire - 1, wire_part), (1, 1.0)), cores) if wire else share
        speeds = (
            min(1.0, share),
            min(1.0, share),
            min(1.0, share / wire_part) if wire_part > 0 else 1.0,
            min(1.0, ending),
        )
        weights = np.array([compute, local, wire, wire]) * seconds
        spent += weights
        done += weights * speeds
    return Slowness(*(float(time / work) if work > 0 else 1.0 for time, work in zip(spent, done, strict=True)))


def _moments(run: Run, s_per_byte: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the seconds after the warm-up, (M,), and (computing ranks, local works, sending ranks) in each, (M, 3)."""
    table, kinds = run.spans.table, run.spans.kind_names
    forward = table[kinds == "forward"]
    usual = forward["start_s"][forward["step"] >= num_warm_up(len(run.metrics[0]))]
    if not len(usual):
        return np.zeros(0), np.zeros((0, 3), np.int64)
    events: list[tuple[Any, int]] = []
    for column, chosen in enumerate(
        (np.isin(kinds, COMPUTE_KINDS), np.isin(kinds, LOCAL), np.isin(kinds, WIRE) & (table["bytes"] > 0))
    ):
        rows = table[chosen]
        begin, end = rows["start_s"], rows["end_s"]
        if column == 2:
            begin = np.maximum(begin, end - rows["bytes"] * s_per_byte)
        for rank in np.unique(rows["rank"]):
            mine = rows["rank"] == rank
            pairs = (begin[mine], end[mine]) if column == 1 else union(begin[mine], end[mine])
            events.append((np.clip(np.stack(pairs), usual.min(), usual.max()), column))
    times = np.concatenate([pairs.ravel() for pairs, _ in events])
    changes = np.zeros((len(times), 3), np.int64)
    changes[np.arange(len(times)), np.concatenate([np.full(pairs.size, column) for pairs, column in events])] = (
        np.concatenate([np.repeat((1, -1), pairs.shape[1]) for pairs, _ in events])
    )
    order = np.argsort(times, kind="stable")
    counts, seconds = np.cumsum(changes[order], 0)[:-1], np.diff(times[order])
    distinct, which = np.unique(counts, axis=0, return_inverse=True)
    return np.bincount(which.reshape(-1), seconds, minlength=len(distinct)).astype(np.float64), distinct
