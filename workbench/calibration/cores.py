"""Cores that ranks share: by what each kind of work is slower where threads want more cores than there are.

At each moment of a simulated run some threads want a core: those that compute, those that sum, encode or decode, and what carries
a rank's bytes, which wants a part of one. The cores are shared as a scheduler shares them: nobody gets more than it wants, and who
wants more than its share gets as much as any other (max-min fair). How much slower each kind of work is for that, on average over
the moments at which it goes on, changes when it goes on; so the run is simulated again until both agree.
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
    """By what something takes longer than where it has the cores it wants; 1 where it has.

    Attributes:
        compute: forward, backward, update.
        local: summing, encoding, decoding.
        wire: bytes on their way.
        hop: what a message's end takes of a core: system calls, a thread that is woken.
    """

    compute: float = 1.0
    local: float = 1.0
    wire: float = 1.0
    hop: float = 1.0

    def nearer(self, other: Slowness) -> Slowness:
        """Half way to another, in proportion."""
        return Slowness(*(float(np.sqrt(mine * its)) for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def is_like(self, other: Slowness, tolerance: float) -> bool:
        """Whether no number differs by more than this part."""
        return all(abs(its / mine - 1) <= tolerance for mine, its in zip(astuple(self), astuple(other), strict=True))


def fair_share(wanted: tuple[tuple[int, float], ...], cores: float) -> float:
    """What a thread gets at most, of (number of threads, cores that each of them wants); infinite where all get what they want.

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
    """How much slower each kind of work would be, on average, in this simulated run.

    Args:
        cores: that all its ranks share.
        threads: of a rank's compute.
        wire_part: of a core that carrying a rank's bytes wants while they are on their way.
        s_per_byte: of the wire in this run: of a span of communication, its last bytes' time is when they went, before it waited.
    """
    num_seconds, counts = _moments(run, s_per_byte)
    spent, done = np.zeros(4), np.zeros(4)
    for seconds, (compute, local, wire) in zip(num_seconds.tolist(), counts.tolist(), strict=True):
        others = ((compute * threads, 1.0), (local, 1.0))
        share = fair_share((*others, (wire, wire_part)), cores)
        ending = fair_share((*others, (wire - 1, wire_part), (1, 1.0)), cores) if wire else share
        speeds = (min(1.0, share), min(1.0, share), min(1.0, share / wire_part) if wire_part > 0 else 1.0, min(1.0, ending))
        weights = np.array([compute, local, wire, wire]) * seconds
        spent += weights
        done += weights * speeds
    return Slowness(*(float(time / work) if work > 0 else 1.0 for time, work in zip(spent, done, strict=True)))


def _moments(run: Run, s_per_byte: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(M,) seconds, after the warm-up, in which (M, 3) ranks computed, pieces of local work went on, and ranks' bytes were on their way."""
    table, kinds = run.spans.table, run.spans.kind_names
    forward = table[kinds == "forward"]
    usual = forward["start_s"][forward["step"] >= num_warm_up(len(run.metrics[0]))]
    if not len(usual):
        return np.zeros(0), np.zeros((0, 3), np.int64)
    events: list[tuple[Any, int]] = []
    for column, chosen in enumerate((np.isin(kinds, COMPUTE_KINDS), np.isin(kinds, LOCAL), np.isin(kinds, WIRE) & (table["bytes"] > 0))):
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
    changes[np.arange(len(times)), np.concatenate([np.full(pairs.size, column) for pairs, column in events])] = np.concatenate(
        [np.repeat((1, -1), pairs.shape[1]) for pairs, _ in events]
    )
    order = np.argsort(times, kind="stable")
    counts, seconds = np.cumsum(changes[order], 0)[:-1], np.diff(times[order])
    distinct, which = np.unique(counts, axis=0, return_inverse=True)
    return np.bincount(which.reshape(-1), seconds, minlength=len(distinct)).astype(np.float64), distinct
