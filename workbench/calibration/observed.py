"""Extract observations for the fit from a record of steps: seconds of compute and of communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.overlap import measure_before, step_windows, union
from workbench.analysis.summary import num_warm_up
from workbench.errors import ConfigError
from workbench.trace.kinds import COMMUNICATION_KINDS, PHASES
from workbench.trace.run import Run
from workbench.trace.spans import Spans

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MIN_STEPS = 5
OVERLAP = 0.25  # part of a message's time: a shorter overlap with the message before is jitter
COLLECTIVES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # passes over the ring


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compute:
    """Seconds of each rank (row) in each step (column); NaN if nothing was recorded.

    Attributes:
        forward_s, backward_s, update_s: time in these phases.
        other_s: time of the step that was not recorded: fetching the minibatch, bookkeeping.
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    other_s: Floats


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Periods:
    """Times in which the network was busy; all arrays have the same length.

    A collective begins when the last rank has called it and the previous collective has ended. Before that, ranks only
    wait for other ranks. The end is the mean over the ranks' ends. Collectives that overlap and do not end in the order
    in which they begin are one period.

    Attributes:
        step: the step in which the period began.
        seconds: the period's length.
        num_messages: messages that a rank sent in the period, one after another.
        wire_bytes: bytes that a rank sent in the period.
        shortest_s: the shortest time of one message of the period; of the library's sums the mean.
        waiting_s: sum over the period's collectives of the time from the first rank's call to the last rank's call.
    """

    step: Ints
    seconds: Floats
    num_messages: Floats
    wire_bytes: Floats
    shortest_s: Floats
    waiting_s: Floats

    def __len__(self) -> int:
        return len(self.step)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """The input of the fit.

    Attributes:
        compute: by rank and step, after the warm-up.
        periods: periods of the library's own sums, or of messages if the algorithm sends them itself (`messages`).
        messages: whether the periods are messages.
        local: seconds of each piece of local work for a byte of float32 values, by kind ("sum", "encode", "decode").
        ready: for a run by buckets: (number of the bucket, part of backward after which it was final), of every step.
    """

    compute: Compute
    periods: Periods
    messages: bool
    local: dict[str, Floats]
    ready: tuple[tuple[int, float], ...] = ()


def observe(run: Run) -> Observed:
    """Return the observations of a run on real or simulated ranks.

    Raises:
        ConfigError: the run has no trace, or too few steps in its trace.
    """
    spans = run.spans
    if not len(spans.table):
        raise ConfigError(f"run {run.id} has no trace: run it without --trace-steps 0")
    return observe_spans(spans, int(run.info.get("num_workers") or len(run.metrics)), f"run {run.id}")


def observe_spans(spans: Spans, num_workers: int, name: str) -> Observed:
    """Return the observations in spans, without the warm-up, and without the last step, whose end is unknown.

    Args:
        num_workers: number of ranks of the run; spans of some ranks are enough.
        name: name of the record, for errors.
    """
    steps = np.unique(spans.select(kinds=["forward"]).table["step"]).astype(np.int64)
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"{name} has {len(steps)} steps in its trace: at least {MIN_STEPS} are needed, 20 or more for a good fit"
        )
    steps = steps[num_warm_up(len(steps)) : -1]
    compute, local = _compute(spans, steps), _local(spans, steps)
    sums = spans.select(steps=slice(int(steps[0]), int(steps[-1]) + 1), kinds=COLLECTIVES)
    if len(sums.table):
        return Observed(
            compute=compute, periods=_sums(sums, num_workers), messages=False, local=local, ready=_ready(spans, steps)
        )
    received = spans.select(kinds=("send", "recv"))
    return Observed(compute=compute, periods=_messages(received, steps), messages=True, local=local)


def _compute(spans: Spans, steps: Ints) -> Compute:
    ranks = [rank for rank in spans.ranks if len(spans.of_rank(rank).select(kinds=["forward"]).table)]
    tables = {name: np.full((len(ranks), len(steps)), np.nan) for name in ("forward", "backward", "apply", "other")}
    for row, rank in enumerate(ranks):
        mine = spans.of_rank(rank)
        for kind in PHASES:
            chosen = mine.select(kinds=[kind]).table
            column = np.searchsorted(steps, chosen["step"])
            known = (column < len(steps)) & (steps[np.minimum(column, len(steps) - 1)] == chosen["step"])
            total = np.zeros(len(steps))
            np.add.at(total, column[known], (chosen["end_s"] - chosen["start_s"])[known])
            tables[kind][row] = np.where(total > 0, total, np.nan)
        windows, bounds = step_windows(mine)
        chosen = mine.select(kinds=[*PHASES, *COMMUNICATION_KINDS, "wait", "barrier", "evaluate"]).table
        gaps = np.diff(bounds) - np.diff(measure_before(bounds, *union(chosen["start_s"], chosen["end_s"])))
        tables["other"][row] = [
            dict(zip(windows.tolist(), gaps.tolist(), strict=True)).get(step, np.nan) for step in steps.tolist()
        ]
    return Compute(
        forward_s=tables["forward"], backward_s=tables["backward"], update_s=tables["apply"], other_s=tables["other"]
    )


def _local(spans: Spans, steps: Ints) -> dict[str, Floats]:
    """Return the seconds per byte of each piece of local work that is long enough to be measured, by kind."""
    found = {}
    for kind in ("sum", "encode", "decode"):
        table = spans.select(kinds=[kind], steps=slice(int(steps[0]), None)).table
        table = table[table["bytes"] > 0]
        if len(table):
            found[kind] = (table["end_s"] - table["start_s"]) / table["bytes"]
    return found


def _sums(sums: Spans, num_workers: int) -> Periods:
    table = sums.table
    num_ranks = len(np.unique(table["rank"]))
    key = np.stack([table["step"], table["bucket"], table["kind"], _repetition(table)], 1)
    _, first, group, count = np.unique(key, axis=0, return_index=True, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    begin, early = np.full(len(first), -np.inf), np.full(len(first), np.inf)
    np.maximum.at(begin, group, table["start_s"])
    np.minimum.at(early, group, table["start_s"])
    end = np.bincount(group, table["end_s"]) / count
    kinds = sums.kind_names[first]
    passes = np.array([COLLECTIVES[kind] for kind in kinds.tolist()], float)
    keep = count == num_ranks
    return _merged(
        step=table["step"][first][keep],
        begin_s=begin[keep],
        end_s=np.maximum(end, begin)[keep],
        num_messages=passes[keep] * (num_workers - 1),
        wire_bytes=table["bytes"][first][keep].astype(float),
        waiting_s=(begin - early)[keep],
    )


def _repetition(table: Any) -> Ints:
    """Return how many spans of the same rank, step, bucket and kind began before each span."""
    order = np.lexsort((table["start_s"], table["kind"], table["bucket"], table["step"], table["rank"]))
    key = np.stack([table[name][order] for name in ("rank", "step", "bucket", "kind")], 1)
    new = np.append(True, (np.diff(key, axis=0) != 0).any(1))[: len(order)]
    position = np.arange(len(order))
    found = np.zeros(len(order), np.int64)
    found[order] = position - np.maximum.accumulate(np.where(new, position, 0))
    return found


def _messages(spans: Spans, steps: Ints) -> Periods:
    """Return the messages of the run as periods. A message begins when both its ends are ready.

    Messages that wait for each other at an interface, or share it, are one period. The interface is the sender's or the
    receiver's, whichever has more such messages.
    """
    from workbench.analysis.parts import _sending_since

    received = spans.table[spans.is_kind(["recv"])]
    since = _sending_since(spans)
    keep = (
        (received["bytes"] > 0) & (received["step"] >= steps[0]) & (received["step"] <= steps[-1]) & np.isfinite(since)
    )
    received, since = received[keep], since[keep]
    begin_s = np.maximum(received["start_s"], since)
    end_s = np.maximum(received["end_s"], begin_s)
    sharing = [_shared_periods(received[interface], begin_s, end_s) for interface in ("peer", "rank")]
    number = min(sharing, key=lambda numbers: len(np.unique(numbers)))
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    begins_s, ends_s, shortest_s = (
        np.full(len(first), np.inf),
        np.full(len(first), -np.inf),
        np.full(len(first), np.inf),
    )
    np.minimum.at(begins_s, number, begin_s)
    np.maximum.at(ends_s, number, end_s)
    np.minimum.at(shortest_s, number, end_s - begin_s)
    return Periods(
        step=received["step"][first].astype(np.int64),
        seconds=ends_s - begins_s,
        num_messages=np.ones(len(first)),
        wire_bytes=np.bincount(number, received["bytes"]).astype(float),
        shortest_s=shortest_s,
        waiting_s=np.bincount(number, begin_s - received["start_s"]).astype(float),
    )


def _shared_periods(interface: Ints, begin_s: Floats, end_s: Floats) -> Ints:
    """Return the number of each message's period: messages of one interface that overlap by `OVERLAP` are in one."""
    numbers = np.zeros(len(interface), np.int64)
    number = -1
    for one in np.unique(interface):
        latest_s = -np.inf
        mine = np.flatnonzero(interface == one)
        for message in mine[np.lexsort((end_s[mine], begin_s[mine]))].tolist():
            if latest_s - begin_s[message] <= OVERLAP * (end_s[message] - begin_s[message]):
                number += 1
            numbers[message] = number
            latest_s = max(latest_s, end_s[message])
    return numbers


def _merged(
    *, step: Ints, begin_s: Floats, end_s: Floats, num_messages: Floats, wire_bytes: Floats, waiting_s: Floats
) -> Periods:
    """Merge overlapping intervals into periods.

    Overlapping intervals that end in the order in which they begin stay separate: each counts from the end of the
    previous one.
    """
    order = np.lexsort((end_s, begin_s))
    starts, ends = begin_s[order], end_s[order]
    latest = np.maximum.accumulate(ends) if len(ends) else ends
    new = np.append(True, starts[1:] >= latest[:-1])[: len(order)]
    number = np.cumsum(new) - 1
    crossed = (
        np.bincount(number, np.append(0.0, np.diff(ends) < 0)[: len(order)]) > 0 if len(order) else np.zeros(0, bool)
    )
    first = new | ~crossed[number]
    starts = np.where(new | crossed[number], starts, np.maximum(starts, np.append(0.0, latest[:-1])[: len(order)]))
    number = np.cumsum(first) - 1
    last = np.append(np.flatnonzero(first)[1:] - 1, len(order) - 1)[: int(first.sum())]
    seconds = latest[last] - starts[first]
    messages = np.bincount(number, num_messages[order]).astype(float)
    return Periods(
        step=step[order][first].astype(np.int64),
        seconds=seconds,
        num_messages=messages,
        wire_bytes=np.bincount(number, wire_bytes[order]).astype(float),
        shortest_s=seconds / np.maximum(messages, 1.0),
        waiting_s=np.bincount(number, waiting_s[order]).astype(float),
    )


def _ready(spans: Spans, steps: Ints) -> tuple[tuple[int, float], ...]:
    """Return (bucket, part of backward after which its sum was called), if the algorithm sums layer by layer."""
    found = []
    for rank in spans.ranks:
        mine = spans.of_rank(rank).select(steps=slice(int(steps[0]), int(steps[-1]) + 1))
        backward = {int(row["step"]): row for row in mine.select(kinds=["backward"]).table}
        for row in mine.select(kinds=COLLECTIVES).table:
            span = backward.get(int(row["step"]))
            if row["bucket"] >= 0 and span is not None and span["start_s"] <= row["start_s"] <= span["end_s"] + 1e-3:
                part = (row["start_s"] - span["start_s"]) / (span["end_s"] - span["start_s"])
                found.append((int(row["bucket"]), min(1.0, float(part))))
    return tuple(found)
