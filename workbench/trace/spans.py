"""Spans: what each rank did and when, as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from workbench.trace.kinds import CODES, KINDS, SLEPT_LANE, SPAN
from workbench.trace.links import messages as links_of_messages


@final
@dataclass(frozen=True, eq=False)
class Spans:
    """Spans of any number of ranks, sorted by (rank, start).

    Attributes:
        table: (N,) structured array of dtype `SPAN`: seconds on rank 0's clock, `kind` an index into `KINDS`,
            `lane` an index into `lanes`, `bucket` -1 for the whole gradient or none, `peer` -1 for none.
        lanes: names of the lanes.

    Example:
        >>> spans = Spans.from_rows(0, [("forward", "compute", 0.0, 0.2, 0, -1, 0, -1), ("send", "comm", 0.1, 0.4, 0, 3, 800, 1)])
        >>> spans.select(kinds=["send"]).table["bytes"].tolist(), spans.lanes
        ([800], ('compute', 'comm'))
    """

    table: NDArray[Any]
    lanes: tuple[str, ...] = ()

    @classmethod
    def from_rows(cls, rank: int, rows: Sequence[Sequence[Any]]) -> Spans:
        """Make spans of one rank from rows (kind, lane, start_s, end_s, step, bucket, bytes, peer).

        Raises:
            KeyError: a kind that is not in `KINDS`.
        """
        table = np.zeros(len(rows), SPAN)
        if not rows:
            return cls(table)
        kinds, lanes, *numbers = zip(*rows, strict=True)
        names = tuple(dict.fromkeys(lanes))
        positions = {name: position for position, name in enumerate(names)}
        table["rank"] = rank
        table["kind"] = [CODES[kind] for kind in kinds]
        table["lane"] = [positions[lane] for lane in lanes]
        for column, values in zip(("start_s", "end_s", "step", "bucket", "bytes", "peer"), numbers, strict=True):
            table[column] = values
        return cls(table[np.argsort(table["start_s"], kind="stable")], names)

    @classmethod
    def concatenate(cls, parts: Iterable[Spans]) -> Spans:
        """Join spans of several parts; lanes of one name become one."""
        parts = list(parts)
        names = tuple(dict.fromkeys(name for part in parts for name in part.lanes))
        positions = {name: position for position, name in enumerate(names)}
        tables = []
        for part in parts:
            table = part.table.copy()
            if len(table) and part.lanes != names[: len(part.lanes)]:
                table["lane"] = np.array([positions[name] for name in part.lanes], "i4")[table["lane"]]
            tables.append(table)
        table = np.concatenate(tables) if tables else np.zeros(0, SPAN)
        ranks, starts_s = table["rank"], table["start_s"]
        if np.all((ranks[1:] > ranks[:-1]) | ((ranks[1:] == ranks[:-1]) & (starts_s[1:] >= starts_s[:-1]))):
            return cls(table, names)  # already in order, as the traces of ranks are
        return cls(table[np.lexsort((starts_s, ranks))], names)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have spans, ascending."""
        return list(self._places)

    @cached_property
    def _places(self) -> dict[int, slice]:
        """rank -> the slice of the table with the rank's spans."""
        ranks = self.table["rank"]
        begins = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1])[: len(ranks)]).tolist()
        return {
            int(ranks[begin]): slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(ranks)], strict=False)
        }

    @property
    def slept(self) -> bool:
        """Whether ranks slept for their compute (`Settings.compute`)."""
        return SLEPT_LANE in self.lanes

    @cached_property
    def messages(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Places of sends and of their receives, two arrays of shape (M,) (see `trace.links`)."""
        return links_of_messages(self.table)

    @property
    def kind_names(self) -> NDArray[np.str_]:
        """Name of each span's kind, shape (N,)."""
        return np.take(np.array(KINDS), self.table["kind"])

    @property
    def lane_names(self) -> NDArray[np.str_]:
        """Name of each span's lane, shape (N,)."""
        return np.take(np.array(self.lanes or ("",)), self.table["lane"])

    def is_kind(self, kinds: Iterable[str]) -> NDArray[np.bool_]:
        """Return whether each span has one of these kinds, shape (N,)."""
        wanted = np.zeros(len(KINDS), bool)
        wanted[[CODES[kind] for kind in kinds]] = True
        return np.asarray(wanted[self.table["kind"]], np.bool_)

    def of_rank(self, rank: int) -> Spans:
        """Return one rank's spans, without a copy."""
        return Spans(self.table[self._places.get(rank, slice(0))], self.lanes)

    def select(
        self,
        *,
        ranks: Iterable[int] | None = None,
        steps: slice | None = None,
        kinds: Iterable[str] | None = None,
    ) -> Spans:
        """Return the spans of these ranks, steps (a slice without its end) and kinds; None selects all."""
        keep = np.ones(len(self.table), bool)
        if ranks is not None:
            keep &= np.isin(self.table["rank"], list(ranks))
        if steps is not None:
            first, last = step_bounds(steps)
            keep &= (self.table["step"] >= first) & (self.table["step"] < last)
        if kinds is not None:
            keep &= self.is_kind(kinds)
        return Spans(self.table[keep], self.lanes)


def step_bounds(steps: slice) -> tuple[int, int]:
    """Return the first step of a slice and the step after its last.

    >>> step_bounds(slice(20, 25))
    (20, 25)

    Raises:
        ValueError: the slice has a stride, or a negative end.
    """
    first = steps.start if steps.start is not None else np.iinfo("i4").min
    last = steps.stop if steps.stop is not None else np.iinfo("i4").max
    if steps.step not in (None, 1) or (steps.start or 0) < 0 or (steps.stop or 0) < 0:
        raise ValueError(f"steps={steps}: give a range of step numbers such as slice(20, 25)")
    return int(first), int(last)
