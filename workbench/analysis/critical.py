"""The critical path of a step: the chain of spans, over ranks and messages, that determines its end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from workbench.analysis.overlap import Floats, Steps, step_windows
from workbench.analysis.table import Column, Table, percent, seconds, slept_words
from workbench.trace.kinds import CODES, COMPUTE_KINDS, KINDS
from workbench.trace.links import COLLECTIVES, collective_numbers
from workbench.trace.spans import Spans, step_bounds

UNRECORDED = "nothing"  # kind of a piece without a recorded span
MAX_GAP_SHARE = 0.01  # share of a step: spans with a smaller gap follow each other
TOLERANCE_SHARE = 1e-4  # share of a step: tolerance for overlaps and gaps
_PREFERRED = {CODES["send"]: 0, CODES["recv"]: 2}  # of spans that end together, a receive comes before a send
_COMPUTE = frozenset(CODES[kind] for kind in COMPUTE_KINDS)


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CriticalPath:
    """Pieces of each step's critical path, in order of time; all arrays have the same length.

    A step ends on the rank that ends it last. On that rank, the step lasts from its first forward to the first forward
    of the next step. The pieces fill that time, without evaluations. The path is followed backwards from the end. The
    predecessor of a span is the last span to end on its lane, or the last receive or sum of its rank. The predecessor
    of a span that begins within a backward pass is that pass. A message or a collective begins when its last
    participant arrives, and the path continues on that rank. Collectives of one lane run one after another, however
    early they were called.

    Attributes:
        step: the step's number.
        rank: the rank of the piece.
        kind: what runs there, an index into `KINDS`; -1 if nothing was recorded.
        start_s, end_s: begin and end of the piece, on rank 0's clock.
        span: index in the table of spans; -1 if nothing was recorded.
        slept: whether the ranks slept for their compute.
    """

    step: Steps
    rank: Steps
    kind: Steps
    start_s: Floats
    end_s: Floats
    span: Steps
    slept: bool = False

    @property
    def steps(self) -> list[int]:
        """The steps, ascending."""
        return [int(step) for step in np.unique(self.step)]

    @property
    def kind_names(self) -> list[str]:
        """The name of each piece's kind."""
        return [KINDS[kind] if kind >= 0 else UNRECORDED for kind in self.kind.tolist()]

    @property
    def compute_share(self) -> float | None:
        """The share of computation in the paths of all steps; None without steps."""
        total_s = float((self.end_s - self.start_s).sum())
        chosen = np.isin(self.kind, list(_COMPUTE))
        return float((self.end_s - self.start_s)[chosen].sum()) / total_s if total_s > 0 else None

    def of_steps(self, steps: slice) -> CriticalPath:
        """Return the pieces of some steps."""
        first, last = step_bounds(steps)
        keep = (self.step >= first) & (self.step < last)
        return CriticalPath(**{name: getattr(self, name)[keep] for name in ARRAYS}, slept=self.slept)

    def per_step(self) -> dict[int, dict[str, float]]:
        """Return step -> kind -> seconds of that kind in the step's path."""
        found: dict[int, dict[str, float]] = {step: {} for step in self.steps}
        for step, kind, length_s in zip(
            self.step.tolist(), self.kind_names, (self.end_s - self.start_s).tolist(), strict=True
        ):
            found[step][kind] = found[step].get(kind, 0.0) + length_s
        return found

    def per_rank(self) -> dict[int, float]:
        """Return rank -> share of the rank's pieces in all paths, 0 to 1."""
        lengths_s = self.end_s - self.start_s
        total_s = float(lengths_s.sum()) or 1.0
        return {int(rank): float(lengths_s[self.rank == rank].sum()) / total_s for rank in np.unique(self.rank)}

    def table(self) -> Table:
        """Return means over steps, one row for each kind, the largest first."""
        total: dict[tuple[str, int], float] = {}
        for kind, rank, length_s in zip(
            self.kind_names, self.rank.tolist(), (self.end_s - self.start_s).tolist(), strict=True
        ):
            total[kind, rank] = total.get((kind, rank), 0.0) + length_s
        num_steps, whole_s = max(len(self.steps), 1), sum(total.values()) or 1.0
        rows = list[dict[str, Any]]()
        for kind in dict.fromkeys(kind for kind, _ in total):
            of_rank = {rank: length_s for (name, rank), length_s in total.items() if name == kind}
            most = max(of_rank, key=lambda rank: of_rank[rank])
            length_s = sum(of_rank.values())
            share = of_rank[most] / length_s if length_s else 0.0
            rows.append(
                {
                    "kind": kind,
                    "step_s": length_s / num_steps,
                    "share": length_s / whole_s,
                    "rank": most,
                    "of_rank": share,
                }
            )
        rows.sort(key=lambda row: -row["step_s"])
        caption = f"Critical path of {num_steps if self.steps else 0} steps{self._range()} (mean)"
        return Table(rows, COLUMNS, caption=caption + slept_words(slept=self.slept))

    def _range(self) -> str:
        steps = self.steps
        return f", {steps[0]} to {steps[-1]}" if steps else ""

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__


ARRAYS = ("step", "rank", "kind", "start_s", "end_s", "span")
COLUMNS = (
    Column("kind", "what", lambda kind: str(kind).replace("_", "-")),
    Column("step_s", "a step", seconds),
    Column("share", "share", percent),
    Column("rank", "mostly on rank"),
    Column("of_rank", "of which there", percent),
)


def critical_path(spans: Spans, steps: slice | None = None, ranks: Iterable[int] | None = None) -> CriticalPath:
    """Return the critical path of each step.

    Args:
        spans: the spans of a run.
        steps: which steps, as slice(first, one after the last); None for all.
        ranks: which ranks; None for all.

    Example:
        >>> rows = [("forward", "compute", 0.0, 4.0, 0, -1, 0, -1), ("all_reduce", "comm", 4.0, 6.0, 0, -1, 800, -1)]
        >>> late = [("forward", "compute", 0.0, 5.0, 0, -1, 0, -1), ("all_reduce", "comm", 5.0, 6.0, 0, -1, 800, -1)]
        >>> critical_path(Spans.concatenate([Spans.from_rows(0, rows), Spans.from_rows(1, late)])).per_step()
        {0: {'forward': 5.0, 'all_reduce': 1.0}}
    """
    spans = spans if ranks is None else spans.select(ranks=ranks)
    first, last = step_bounds(steps or slice(None))
    ends = _last_ends(spans)
    walk = _SpanLookup(spans)
    pieces = [(step, *piece) for step in sorted(ends) if first <= step < last for piece in walk.back(*ends[step])]
    columns = np.array([(step, *piece) for step, *piece in pieces], float).reshape(-1, 6).T
    step, rank, kind, start_s, end_s, span = columns
    whole = (column.astype(np.int64) for column in (step, rank, kind, span))
    names = ("step", "rank", "kind", "span")
    return CriticalPath(start_s=start_s, end_s=end_s, **dict(zip(names, whole, strict=True)), slept=spans.slept)


def _last_ends(spans: Spans) -> dict[int, tuple[int, float, float]]:
    """Return step -> (rank, begin, end) on the rank that ends the step last.

    Ranks without forward (servers) count only if no rank has a forward.
    """
    parts = [spans.of_rank(rank) for rank in spans.ranks]
    forward = [part for part in parts if part.is_kind(["forward"]).any()]
    found: dict[int, tuple[int, float, float]] = {}
    for part in forward or parts:
        steps, bounds = step_windows(part)
        for step, begin_s, end_s in zip(steps.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if step not in found or end_s > found[step][2]:
                found[step] = (int(part.table["rank"][0]), begin_s, end_s)
    return found


class _Piece(NamedTuple):
    rank: int
    kind: int
    start_s: float
    end_s: float
    span: int


@final
class _SpanLookup:
    """Lookups for the backward walk: the last span of a rank or lane to end before a time."""

    def __init__(self, spans: Spans) -> None:
        table = spans.table
        self.kind, self.rank, self.lane, self.start, self.end = (
            np.ascontiguousarray(table[name]) for name in ("kind", "rank", "lane", "start_s", "end_s")
        )
        self.slack_s = 0.0  # tolerance in the present step
        self.other_side = _last_arrival(table)  # the last participant of each collective and message
        sent, received = spans.messages
        self.other_side[received], self.other_side[sent] = sent, received
        self.free = _free_since(table)
        followed = np.flatnonzero(~spans.is_kind(["wait"]))
        preferred = np.array([_PREFERRED.get(kind, 1) for kind in range(len(KINDS))], np.int8)[self.kind]
        followed = followed[np.argsort(preferred[followed], kind="stable")]
        # by end, then by preference, then by start
        followed = followed[np.argsort(self.end[followed], kind="stable")]
        self.num_lanes = len(spans.lanes) + 1
        self.of_lane = _Groups(followed, self.rank.astype(np.int64) * self.num_lanes + self.lane, self.end)
        self.of_rank = _Groups(followed, self.rank, self.end)
        self.begun = _Groups(np.flatnonzero(spans.is_kind(COMPUTE_KINDS)), self.rank, self.start)

    def back(self, rank: int, begin_s: float, end_s: float) -> list[_Piece]:
        """Return the pieces from `end_s` back to `begin_s`, in order of time, without evaluations."""
        near_s, self.slack_s = MAX_GAP_SHARE * (end_s - begin_s), TOLERANCE_SHARE * (end_s - begin_s)
        now_s, pieces, seen, span = end_s, list[_Piece](), set[int](), -1
        while now_s > begin_s:
            before = self._before(rank, now_s, span, near_s, seen)
            if before < 0 or min(self.end[before], now_s) <= begin_s:
                pieces.append(_Piece(rank, -1, begin_s, now_s, -1))
                break
            seen.add(before)
            if self.end[before] < now_s - self.slack_s:
                pieces.append(_Piece(rank, -1, self.end[before], now_s, -1))
                now_s = self.end[before]
            span, since_s = self._origin(before, now_s)
            pieces.append(_Piece(rank, self.kind[before], max(since_s, begin_s), now_s, before))
            seen.add(span)
            rank, now_s = self.rank[span], since_s
        evaluate = CODES["evaluate"]
        return [piece for piece in reversed(pieces) if piece.end_s > piece.start_s and piece.kind != evaluate]

    def _before(self, rank: int, now_s: float, span: int, near_s: float, seen: set[int]) -> int:
        """Return the predecessor, on a rank, of `span` (-1: the step's end) that begins at `now_s`; -1: none."""
        latest = self._ended(self.of_rank.get(rank), now_s, seen)
        if span < 0:
            return latest
        computes = self.kind[span] in _COMPUTE
        own = self._ended(self.of_lane.get(rank * self.num_lanes + self.lane[span]), now_s, seen) if computes else -1
        if own >= 0 and now_s - self.end[own] <= near_s:
            return own
        if computes or (latest >= 0 and now_s - self.end[latest] <= near_s):
            return latest
        times, begun = self.begun.get(rank)
        place = bisect_right(times, now_s) - 1
        running = begun[place] if place >= 0 else -1  # a running backward pass that made a bucket ready
        return running if running >= 0 and running not in seen and self.end[running] > now_s else latest

    def _ended(self, ordered: tuple[Floats, Steps], now_s: float, seen: set[int]) -> int:
        """Return the last span to end by `now_s` that was not visited; -1: none."""
        times, spans = ordered
        place = bisect_right(times, now_s + self.slack_s) - 1
        while place >= 0 and (spans[place] in seen or self.start[spans[place]] > now_s):
            place -= 1
        return spans[place] if place >= 0 else -1

    def _origin(self, span: int, now_s: float) -> tuple[int, float]:
        """Return the rank that arrived last at a span, and when; for local work, its own rank and begin."""
        other = self.other_side[span]
        if self.free[span] < self.start[other] <= min(self.end[span], now_s):
            return other, self.start[other]
        return span, min(self.free[span], now_s)


@final
class _Groups:
    """Spans by group, each group in the given order, with ascending times."""

    def __init__(self, spans: Steps, group: NDArray[Any], times: Floats) -> None:
        groups = group[spans]
        order = np.argsort(groups.astype(np.int16) if len(groups) and groups.max() < 1 << 15 else groups, kind="stable")
        self._spans = spans[order]
        self._groups = groups[order]
        self._times = times[self._spans]

    def get(self, group: int) -> tuple[Floats, Steps]:
        """Return a group's times and its spans."""
        first, last = np.searchsorted(self._groups, np.array([group, group + 1], self._groups.dtype))
        return self._times[first:last], self._spans[first:last]


def _last_arrival(table: NDArray[Any]) -> Steps:
    """Return for each call of a collective the call of the last rank to arrive, shape (N,).

    For other spans it is the span itself.
    """
    places = np.arange(len(table))
    groups = collective_numbers(table)
    calls = np.flatnonzero(groups >= 0)
    groups = groups[calls]
    order = np.lexsort((table["start_s"][calls], groups))
    last = np.append(groups[order][1:] != groups[order][:-1], True)[: len(order)]
    of_group = np.zeros(int(groups.max()) + 1 if len(groups) else 0, np.int64)
    of_group[groups[order[last]]] = calls[order[last]]
    places[calls] = of_group[groups]
    return places


def _free_since(table: NDArray[Any]) -> Floats:
    """Return when each span began to work, shape (N,).

    It is the span's start. For a collective it is the end of the previous collective on its lane, if that is later.
    """
    free_s = table["start_s"].astype(np.float64)
    calls = np.flatnonzero(np.isin(table["kind"], [CODES[kind] for kind in COLLECTIVES]))
    calls = calls[
        np.lexsort((table["end_s"][calls], table["start_s"][calls], table["lane"][calls], table["rank"][calls]))
    ]
    before, after = calls[:-1], calls[1:]
    behind = (table["rank"][before] == table["rank"][after]) & (table["lane"][before] == table["lane"][after])
    behind &= (table["start_s"][after] < table["end_s"][before]) & (table["end_s"][before] <= table["end_s"][after])
    free_s[after[behind]] = table["end_s"][before[behind]]
    return free_s
