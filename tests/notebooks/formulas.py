"""Rows of runs, and formulas written out by NumPy and SciPy, of which `recomputed` makes what notebooks must show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import betaincinv

Names = dict[str, Any]
Array = Any

# -- rows of runs ------------------------------------------------------------------------------------------------------


def ends_of(run: Any) -> Array:
    """When the last rank ended each step."""
    ends: dict[int, float] = {}
    for rows in run.metrics.values():
        for row in rows:
            if "evaluation" not in row:
                ends[row["step"]] = max(row["seconds"], ends.get(row["step"], 0.0))
    return np.array([ends[step] for step in sorted(ends)])


def evaluations_of(run: Any) -> list[dict[str, float]]:
    """step, seconds, loss and accuracy of each evaluation; where every rank judged a share, of all shares."""
    shares: dict[int, list[dict[str, Any]]] = {}
    for rows in run.metrics.values():
        for row in rows:
            if "evaluation" in row:
                shares.setdefault(row["step"], []).append(row)
    found = []
    for step in sorted(shares):
        total = {key: sum(row["evaluation"][key] for row in shares[step]) for key in ("loss_sum", "count", "correct", "judged")}
        seconds = max(row["seconds"] for row in shares[step])
        loss, accuracy = total["loss_sum"] / total["count"], total["correct"] / total["judged"]
        found.append({"step": step, "seconds": seconds, "loss": loss, "accuracy": accuracy})
    return found


def first_at(run: Any, what: str, key: str, goal: float) -> float:
    """Steps taken (`step`) or seconds until an evaluation first shows that loss or accuracy; infinity if none does."""
    good = [row for row in evaluations_of(run) if (row[key] >= goal if key == "accuracy" else row[key] <= goal)]
    return min((row[what] + (what == "step") for row in good), default=math.inf)


def updates_of(run: Any) -> list[dict[str, Any]]:
    """A server's updates, as they came."""
    rows = [row for rows in run.events.values() for row in rows if "update" in row]
    return sorted(rows, key=lambda row: row["seconds"])


def usual_step_s(run: Any) -> float:
    """The median over ranks and steps, but for a tenth of the steps, at most ten, at the beginning."""
    gaps = []
    for rows in run.metrics.values():
        ends = [row["seconds"] for row in rows if "evaluation" not in row]
        first = min(max(1, len(ends) // 10), 10)
        gaps += [after - before for before, after in pairwise(ends[first - 1 :])]
    return float(np.median(gaps))


def num_values(problem: Any) -> int:
    return sum(weight.numel() for weight in problem.model().parameters())


# -- waiting for some of many --------------------------------------------------------------------------------------------


def fresh_s(quantile: Callable[[Array], Array], which: int, of: int) -> float:
    """Mean of the k-th of n independent draws: U_(k) is Beta(k, n - k + 1), whose quantiles are taken in equal steps."""
    share = (np.arange(20_000) + 0.5) / 20_000
    return float(np.mean(quantile(betaincinv(which, of - which + 1, share))))


def carried_s(seconds: Array, numbers: Sequence[int]) -> Array:
    """(len(numbers), steps) of N = each of the numbers: on a clock, with the moment at which each machine is free.

    Args:
        seconds: (steps, machines) of a gradient; rounded, so that sums are exact and equal moments are equal.
    """
    seconds = np.round(seconds * 2**30) / 2**30
    wanted, lines = np.array(numbers) - 1, np.arange(len(numbers))
    now, free = np.zeros((len(numbers), 1)), np.zeros((len(numbers), seconds.shape[1]))
    moments = [now[:, 0]]
    for drawn in seconds:
        begins = np.maximum(now, free)
        done = begins + drawn
        now = np.sort(done, axis=1)[lines, wanted][:, None]
        free = np.where(begins > now, begins, done)  # who is at an older gradient still ends that one first
        moments.append(now[:, 0])
    return np.diff(np.array(moments), axis=0).T


# -- messages ------------------------------------------------------------------------------------------------------------


def ring_s(num_bytes: float, p: int, link: Any) -> float:
    """Of a library's all-reduce where summing costs nothing: a ring; on hosts the quicker of a ring over all and of two levels."""
    block = num_bytes / p
    if not hasattr(link, "between"):
        return 2 * (p - 1) * (link.latency_s + block / link.bandwidth_bytes_per_s)
    group, (outside, inside) = link.ranks_per_host, (link.between, link.inside)
    hop_s = outside.latency_s + block / outside.bandwidth_bytes_per_s if p > group else 0.0
    flat_s = 2 * (p - 1) * max(hop_s, inside.latency_s + block / inside.bandwidth_bytes_per_s)
    if p <= group or p % group:
        return flat_s
    busy_s = group / link.nics_per_host * block / outside.bandwidth_bytes_per_s
    within_s = 2 * (group - 1) * (inside.latency_s + num_bytes / group / inside.bandwidth_bytes_per_s)
    hops = 2 * (p // group - 1)
    between_s = (hops - 1) * max(hop_s, busy_s) + outside.latency_s + busy_s
    return min(flat_s, within_s + between_s)


def coded_ring_s(num_bytes: float, p: int, link: Any, smaller: float) -> float:
    """Of a ring that encodes every hop: p blocks are encoded and p decoded, and while it spreads what decoding is longer than the wire."""
    block_s = num_bytes / p / smaller / link.bandwidth_bytes_per_s
    encode_s, decode_s = (num_bytes / p * each for each in (link.encode_s_per_byte, link.decode_s_per_byte))
    codec_s = p * (encode_s + decode_s) + (p - 1) * max(0.0, decode_s - link.latency_s - block_s)
    return 2 * (p - 1) * (link.latency_s + block_s) + codec_s


def halving_s(num_bytes: float, p: int, link: Any) -> float:
    """2 log2 q messages, of half, a quarter, ... and back; the p - q ranks beyond a power of two send and get all of it besides."""
    rounds = p.bit_length() - 1
    sizes = [num_bytes / 2 ** (level + 1) for level in range(rounds)] * 2 + [num_bytes] * (2 if p > 2**rounds else 0)
    return float(sum(link.latency_s + size / link.bandwidth_bytes_per_s for size in sizes))


def server_s(num_bytes: float, p: int, link: Any) -> float:
    """One server: p gradients come one after the other, and p replies leave."""
    wire_s = num_bytes / link.bandwidth_bytes_per_s
    return float(p * (link.latency_s + wire_s) + link.latency_s + p * wire_s)


def hidden_share(run: Any, first: int) -> float:
    """Of the seconds in which a rank communicates from the first forward of that step on, the part in which it computes too."""
    hidden = total = 0.0
    table, kinds = run.spans.table, run.spans.kind_names
    for rank in set(table["rank"].tolist()):
        rows = [(kind, row["start_s"], row["end_s"], row["step"]) for kind, row in zip(kinds, table, strict=True) if row["rank"] == rank]
        begin_s = min(start for kind, start, _, step in rows if kind == "forward" and step == first)
        busy: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        for kind, start, end, _ in rows:
            if kind not in ("wait", "barrier", "evaluate") and end > begin_s:
                busy[kind in ("forward", "backward", "apply")] += [(max(start, begin_s), 1), (end, -1)]
        moments = sorted({moment for events in busy.values() for moment, _ in events})
        counts = [dict.fromkeys(moments, 0) for _ in busy]
        for found, events in zip(counts, busy.values(), strict=True):
            for moment, change in events:
                found[moment] += change
        computing = sending = 0
        for moment, after in pairwise(moments):
            computing, sending = computing + counts[0][moment], sending + counts[1][moment]
            total += (after - moment) * (sending > 0)
            hidden += (after - moment) * (sending > 0 and computing > 0)
    return hidden / total if total else math.nan


# -- values over seeds -----------------------------------------------------------------------------------------------------


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its interval of 95 %."""
    found = np.array([*values], float)
    half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found)
    return float(found.mean()), float(found.mean() - half), float(found.mean() + half)


def with_interval(values: Sequence[float]) -> list[float]:
    """As "1.20 (95 %: 1.10 to 1.30)" has them."""
    mean, low, high = student(values)
    return [mean, 0.95, low, high]
