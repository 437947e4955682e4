"""The critical path in plain lists and dictionaries, span by span: the slow twin of `workbench.analysis.critical`."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from workbench.trace.kinds import CODES, COMPUTE_KINDS, KINDS

TOUCHING, CROSSING = 0.01, 1e-4
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
PREFERENCE = {"send": 0, "recv": 2}
Piece = tuple[int, int, float, float, int]


class Walk:
    """Asked for the path of one step, back from its end; `pairs` are the places of sends and receives that belong together."""

    def __init__(self, rows: list[dict[str, Any]], pairs: list[tuple[int, int]]) -> None:
        self.rows = rows
        self.other = {**dict(pairs), **{received: sent for sent, received in pairs}}
        self.slack_s = 0.0

    def kind(self, span: int) -> str:
        return KINDS[self.rows[span]["kind"]]

    def back(self, rank: int, begin_s: float, end_s: float) -> list[Piece]:
        near_s, self.slack_s = TOUCHING * (end_s - begin_s), CROSSING * (end_s - begin_s)
        now_s, pieces, seen, span = end_s, list[Piece](), set[int](), -1
        while now_s > begin_s:
            before = self.before(rank, now_s, span, near_s, seen)
            if before < 0 or min(self.rows[before]["end_s"], now_s) <= begin_s:
                pieces.append((rank, -1, begin_s, now_s, -1))
                break
            seen.add(before)
            if self.rows[before]["end_s"] < now_s - self.slack_s:
                pieces.append((rank, -1, self.rows[before]["end_s"], now_s, -1))
                now_s = self.rows[before]["end_s"]
            span, since_s = self.origin(before, now_s)
            pieces.append((rank, self.rows[before]["kind"], max(since_s, begin_s), now_s, before))
            seen.add(span)
            rank, now_s = self.rows[span]["rank"], since_s
        return [piece for piece in reversed(pieces) if piece[3] > piece[2] and piece[1] != CODES["evaluate"]]

    def before(self, rank: int, now_s: float, span: int, near_s: float, seen: set[int]) -> int:
        latest = self.ended(rank, None, now_s, seen)
        if span < 0:
            return latest
        computes = self.kind(span) in COMPUTE_KINDS
        own = self.ended(rank, self.rows[span]["lane"], now_s, seen) if computes else -1
        if own >= 0 and now_s - self.rows[own]["end_s"] <= near_s:
            return own
        if computes or (latest >= 0 and now_s - self.rows[latest]["end_s"] <= near_s):
            return latest
        mine = [
            place for place, row in enumerate(self.rows) if row["rank"] == rank and self.kind(place) in COMPUTE_KINDS
        ]
        mine.sort(key=lambda place: self.rows[place]["start_s"])
        begun = bisect_right([self.rows[place]["start_s"] for place in mine], now_s) - 1
        running = mine[begun] if begun >= 0 else -1
        return running if running >= 0 and running not in seen and self.rows[running]["end_s"] > now_s else latest

    def ended(self, rank: int, lane: int | None, now_s: float, seen: set[int]) -> int:
        def order(place: int) -> tuple[float, int, float]:
            return self.rows[place]["end_s"], PREFERENCE.get(self.kind(place), 1), self.rows[place]["start_s"]

        chosen = [place for place, row in enumerate(self.rows) if row["rank"] == rank and lane in (None, row["lane"])]
        chosen = sorted((place for place in chosen if self.kind(place) != "wait"), key=order)
        late = [place for place in chosen if self.rows[place]["end_s"] <= now_s + self.slack_s]
        return next(
            (place for place in reversed(late) if place not in seen and self.rows[place]["start_s"] <= now_s), -1
        )

    def origin(self, span: int, now_s: float) -> tuple[int, float]:
        other, free_s = self.other.get(span, self.last_to_come(span)), self.free_since(span)
        if free_s < self.rows[other]["start_s"] <= min(self.rows[span]["end_s"], now_s):
            return other, self.rows[other]["start_s"]
        return span, min(free_s, now_s)

    def calls(self, rank: int, span: int) -> list[int]:
        """Calls on a rank among which this span's collective is: all of them, in order, if all ranks call the same.

        Otherwise those of its kind, step and bucket.
        """
        of_rank: dict[int, list[int]] = {}
        for place, row in enumerate(self.rows):
            if self.kind(place) in COLLECTIVES:
                of_rank.setdefault(row["rank"], []).append(place)
        for found in of_rank.values():
            found.sort(key=lambda place: (self.rows[place]["lane"], self.rows[place]["start_s"]))
        called = {
            tuple((self.rows[place]["lane"], self.kind(place), self.rows[place]["bucket"]) for place in found)
            for found in of_rank.values()
        }
        if len(called) == 1:
            return of_rank.get(rank, [])
        names = ("kind", "step", "bucket")
        wanted = [self.rows[span][name] for name in names]
        chosen = [place for place in of_rank.get(rank, []) if [self.rows[place][name] for name in names] == wanted]
        return sorted(chosen, key=lambda place: self.rows[place]["start_s"])

    def last_to_come(self, span: int) -> int:
        if self.kind(span) not in COLLECTIVES:
            return span
        number = self.calls(self.rows[span]["rank"], span).index(span)
        ranks = sorted({row["rank"] for row in self.rows})
        met = [calls[number] for calls in (self.calls(rank, span) for rank in ranks) if len(calls) > number]
        latest_s = max(self.rows[place]["start_s"] for place in met)
        return max(place for place in met if self.rows[place]["start_s"] == latest_s)

    def free_since(self, span: int) -> float:
        row = self.rows[span]
        if self.kind(span) not in COLLECTIVES:
            return float(row["start_s"])
        places = [
            place
            for place, other in enumerate(self.rows)
            if (other["rank"], other["lane"]) == (row["rank"], row["lane"]) and self.kind(place) in COLLECTIVES
        ]
        places.sort(key=lambda place: (self.rows[place]["start_s"], self.rows[place]["end_s"]))
        at = places.index(span)
        if at:
            before_s = self.rows[places[at - 1]]["end_s"]
            if row["start_s"] < before_s <= row["end_s"]:
                return float(before_s)
        return float(row["start_s"])
