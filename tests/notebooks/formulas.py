"""Rows of runs, and formulas in NumPy and SciPy, from which `recomputed` computes the numbers that notebooks must show."""

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
COMPUTES = ("forward", "backward", "apply", "compute")
COMMUNICATES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "send",
    "recv",
    "encode",
    "decode",
    "sum",
    "communicate",
)

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
        parts = [row["evaluation"] for row in shares[step]]
        total = {key: sum(part[key] for part in parts) for key in ("loss_sum", "correct", "judged")}
        weight = sum(part.get("loss_weight", part["count"]) for part in parts)  # older runs have no weight
        seconds = max(row["seconds"] for row in shares[step])
        loss, accuracy = total["loss_sum"] / weight, total["correct"] / total["judged"]
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
        free = np.where(begins > now, begins, done)  # a machine at an older gradient ends that one first
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


# -- spans of runs -------------------------------------------------------------------------------------------------------


def hidden_share(run: Any, first: int) -> float:
    """Of the seconds in which a rank communicates from the first forward of that step on, the part in which it computes too."""
    found = times_of(run, first)
    return found["hidden"] / (found["hidden"] + found["exposed"]) if found["hidden"] + found["exposed"] else math.nan


def times_of(run: Any, first: int, last: int | None = None) -> dict[str, float]:
    """Seconds a step and rank (step, compute, hidden and exposed communication) from the first forward of `first` to that of `last`."""
    table, kinds = run.spans.table, run.spans.kind_names
    total, count = dict.fromkeys(("step", "compute", "hidden", "exposed"), 0.0), 0
    for rank in set(table["rank"].tolist()):
        rows, names = table[table["rank"] == rank], kinds[table["rank"] == rank]
        forward, steps = names == "forward", set(rows["step"][names == "forward"].tolist())
        bounds = [min(rows["start_s"][forward & (rows["step"] == step)]) for step in (first, last) if step in steps]
        if not bounds:
            continue
        begin, end = (
            bounds[0],
            bounds[1] if last in steps else max(rows["end_s"][(rows["step"] >= 0) & (names != "evaluate")]),
        )
        moments = np.unique(np.clip([*rows["start_s"], *rows["end_s"]], begin, end))
        middle, lengths = (moments[1:] + moments[:-1]) / 2, np.diff(moments)

        def busy(of: tuple[str, ...], rows: Array = rows, names: Array = names, middle: Array = middle) -> Array:
            begins, ends = (np.sort(rows[key][np.isin(names, of)]) for key in ("start_s", "end_s"))
            return np.searchsorted(begins, middle) > np.searchsorted(ends, middle)

        computes, sends = (busy(of) & ~busy(("evaluate",)) for of in (COMPUTES, COMMUNICATES))
        for key, counts in (("compute", computes), ("hidden", sends & computes), ("exposed", sends & ~computes)):
            total[key] += float(lengths[counts].sum())
        total["step"] += float(lengths[~busy(("evaluate",))].sum())
        count += sum(first <= step and (last is None or step < last) for step in steps)
    return {key: value / count for key, value in total.items()}


def parts_of(run: Any, first: int = 0, last: float = math.inf) -> dict[str, float]:
    """Seconds a rank waits for senders, is on the wire, sums, encodes and decodes in these steps, all ranks together."""
    table, kinds = run.spans.table, run.spans.kind_names
    sent, received = run.spans.messages
    since = np.full(len(table), -np.inf)
    since[received] = table["start_s"][sent]
    found = dict.fromkeys(("wait", "wire", "sum", "encode", "decode", "none"), 0.0)
    counts = (table["step"] >= first) & (table["step"] < last)
    for rank in set(table["rank"].tolist()):
        mine = counts & (table["rank"] == rank)
        heard = mine & (kinds == "recv")
        middle = np.clip(since[heard], table["start_s"][heard], table["end_s"][heard])
        found["wait"] += covered(table["start_s"][heard], middle)
        found["wire"] += covered(middle, table["end_s"][heard])
        for kind in ("sum", "encode", "decode"):
            found[kind] += covered(*(table[key][mine & (kinds == kind)] for key in ("start_s", "end_s")))
    return found


def covered(begins: Array, ends: Array) -> float:
    """Seconds in which at least one of these intervals runs."""
    moments = np.unique([*begins, *ends])
    middle = (moments[1:] + moments[:-1]) / 2
    runs = np.searchsorted(np.sort(begins), middle) > np.searchsorted(np.sort(ends), middle)
    return float(np.diff(moments)[runs].sum())


# -- values over seeds -----------------------------------------------------------------------------------------------------


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its interval of 95 %."""
    found = np.array([*values], float)
    half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found)
    return float(found.mean()), float(found.mean() - half), float(found.mean() + half)


def with_ends(values: Sequence[float]) -> list[float]:
    """As "1.20 [1.10, 1.30]" has them; the mean alone if the interval has no width."""
    mean, low, high = student(values) if len(values) > 1 else (values[0],) * 3
    return [float(mean)] if low == high else [mean, low, high]


def with_interval(values: Sequence[float]) -> list[float]:
    """As "1.20 (95 %: 1.10 to 1.30)" has them."""
    mean, low, high = student(values)
    return [mean, 0.95, low, high]
