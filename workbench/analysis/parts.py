"""The parts of a collective's time: waiting for the sender, wire, decoding, summing, encoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from workbench.analysis.overlap import Floats, Steps, union
from workbench.analysis.table import Column, Table, seconds, slept_words
from workbench.trace.spans import Spans, step_bounds

WORK = ("decode", "sum", "encode")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Parts:
    """Seconds of each rank's messages and of the work on them, one entry for each rank, in arrays of the same length.

    A receive is in the part "wait" until its sender begins to send, and in the part "wire" from then to its end. Each
    entry is the time in which at least one span was in that part. Parts that run at the same time (a chunk is summed
    while the next is on the wire) each count in full. Sends are not counted, because their receives are. A library's
    own all-reduce is one span without parts and is not counted here. A real rank decodes a hop's message into the sum in
    one pass, which is in the part "decode".

    Attributes:
        rank: the entry's rank.
        wait_s: receives from a rank that has not yet begun to send.
        wire_s: receives from a rank that sends; also a receive whose send was not recorded.
        decode_s, sum_s, encode_s: local work.
        note: why all entries are 0, if the trace holds no message and no work on one. The table shows the note.
        slept: whether the ranks slept for their compute.
    """

    rank: Steps
    wait_s: Floats
    wire_s: Floats
    decode_s: Floats
    sum_s: Floats
    encode_s: Floats
    note: str = ""
    slept: bool = False

    def total(self) -> dict[str, float]:
        """Return each part's seconds, summed over ranks."""
        return {name: float(getattr(self, name).sum()) for name in PART_NAMES}

    def of_rank(self, rank: int) -> dict[str, float]:
        """Return one rank's seconds of each part; 0 if it has no spans."""
        return {name: float(getattr(self, name)[self.rank == rank].sum()) for name in PART_NAMES}

    def table(self) -> Table:
        """Return one row for each rank and, if there are rows, the mean over ranks."""
        rows: list[dict[str, Any]] = [{"rank": rank, **self.of_rank(rank)} for rank in self.rank.tolist()]
        if rows:
            rows.append({"rank": "mean", **{name: value / len(self.rank) for name, value in self.total().items()}})
        caption = self.note or f"Seconds of communication by part{slept_words(slept=self.slept)}"
        return Table(rows, PART_COLUMNS, caption=caption)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__


PART_NAMES = ("wait_s", "wire_s", "decode_s", "sum_s", "encode_s")
NO_MESSAGES = (
    "This trace has no messages: its collectives are the library's own, or it is a torch profile, which shows "
    "each collective as one piece (see overlap). Use a run with a collective of workbench.collectives, such as Ring()"
)
PART_COLUMNS = (Column("rank", "rank"), *(Column(name, name.removesuffix("_s"), seconds) for name in PART_NAMES))


def parts(spans: Spans, steps: slice | None = None, ranks: Iterable[int] | None = None) -> Parts:
    """Return seconds of waiting, wire, decoding, summing and encoding of each rank.

    Args:
        spans: the spans of a run.
        steps: which steps, as slice(first, one after the last); None for all.
        ranks: which ranks; None for all.

    Example:
        >>> sender = Spans.from_rows(0, [("send", "comm", 3.0, 5.0, 0, -1, 800, 1)])
        >>> receiver = Spans.from_rows(1, [("recv", "comm", 1.0, 5.0, 0, -1, 800, 0), ("sum", "comm", 5.0, 6.0, 0, -1, 800, -1)])
        >>> parts(Spans.concatenate([sender, receiver])).of_rank(1)
        {'wait_s': 2.0, 'wire_s': 2.0, 'decode_s': 0.0, 'sum_s': 1.0, 'encode_s': 0.0}
    """
    first, last = step_bounds(steps or slice(None))
    received = spans.table[spans.is_kind(["recv"])]
    begins = np.clip(_sending_since(spans), received["start_s"], received["end_s"])
    chosen = list(spans.ranks if ranks is None else ranks)
    columns: dict[str, list[float]] = {name: [] for name in PART_NAMES}
    for rank in chosen:
        mine = slice(*np.searchsorted(received["rank"], [rank, rank + 1]))
        table, since_s = received[mine], begins[mine]
        keep = (table["step"] >= first) & (table["step"] < last)
        columns["wait_s"].append(_covered(table["start_s"][keep], since_s[keep]))
        columns["wire_s"].append(_covered(since_s[keep], table["end_s"][keep]))
        for kind in WORK:
            table = spans.of_rank(rank).select(steps=steps, kinds=[kind]).table
            columns[f"{kind}_s"].append(_covered(table["start_s"], table["end_s"]))
    found = {name: np.array(column, float) for name, column in columns.items()}
    note = "" if spans.is_kind(["recv", *WORK]).any() else NO_MESSAGES
    return Parts(rank=np.array(chosen, np.int64), **found, note=note, slept=spans.slept)


def _sending_since(spans: Spans) -> Floats:
    """Return when the sender of each receive began to send, shape (N,); -inf if no send was recorded."""
    table = spans.table
    begins = np.full(len(table), -np.inf)
    sent, received = spans.messages
    begins[received] = table["start_s"][sent]
    return begins[spans.is_kind(["recv"])]


def _covered(start_s: Floats, end_s: Floats) -> float:
    starts, ends = union(start_s, end_s)
    return float((ends - starts).sum())
