"""Merges the ranks' outputs: a line that several ranks print is shown once, after their numbers."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from workbench.kernel.cells import format_ranks

HOLD_S = 0.3  # how long a line waits for the same line of other ranks
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@final
@dataclass(frozen=True, slots=True)
class Item:
    """A complete line of text, or a displayed object, of one rank.

    Attributes:
        kind: "stdout", "stderr", "display", "result", "update" (of a display) or "clear" (of the cell's output).
        content: the line without its end; for displays and results, the MIME bundle {"data": ..., "metadata": ...},
            with "transient" if it has a display id; for "clear", {"wait": ...}.
        arrived_s: time of arrival, by the caller's clock.
    """

    kind: str
    content: Any
    arrived_s: float

    @property
    def key(self) -> str:
        """A text that is equal for items that look the same. Addresses of objects are ignored."""
        if isinstance(self.content, str):
            text = self.content
        else:
            seen = {name: self.content.get(name) for name in ("data", "transient", "wait")}  # no numbers of cells
            text = json.dumps(seen, sort_keys=True, default=str)
        return self.kind + ADDRESS.sub("0x", text)


@final
@dataclass(slots=True)
class PendingOutput:
    """Output of one rank that is not shown yet: complete items, and the incomplete line of each stream."""

    items: deque[Item] = field(default_factory=deque)
    incomplete: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})


@final
class Merger:
    """Shows the outputs of ranks in groups, and keeps each rank's order.

    Args:
        ranks: the ranks that run the cell.
        show: called with the ranks, the kind, and the content.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        show: Callable[[list[int], str, Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending = {rank: PendingOutput() for rank in ranks}
        self._show, self._clock = show, clock
        self._ended: set[int] = set()  # ranks without further output

    def text(self, rank: int, stream: str, text: str) -> None:
        """Add text that a rank wrote. An incomplete line waits for its end. A carriage return restarts the line."""
        pending = self._pending[rank]
        *whole, rest = (pending.incomplete[stream] + text).split("\n")
        for line in whole:
            pending.items.append(Item(stream, _visible(line), self._clock()))
        end = "\r" if rest.endswith("\r") else ""
        pending.incomplete[stream] = _visible(rest) + end  # not all that a progress bar has written

    def display(self, rank: int, kind: str, bundle: dict[str, Any]) -> None:
        """Add an object that a rank displayed or changed, the value of its last expression, or a "clear"."""
        self._end_lines(rank)
        self._pending[rank].items.append(Item(kind, bundle, self._clock()))

    def incomplete(self) -> dict[int, str]:
        """Return the incomplete line of each rank that has one: rank -> text."""
        lines = {
            rank: " ".join(filter(None, map(_visible, pending.incomplete.values())))
            for rank, pending in self._pending.items()
        }
        return {rank: line for rank, line in lines.items() if line}

    def ended(self, rank: int) -> None:
        """Note that a rank has no further output."""
        self._end_lines(rank)
        self._ended.add(rank)

    def _end_lines(self, rank: int) -> None:
        pending = self._pending[rank]
        for stream, rest in pending.incomplete.items():
            if rest:
                pending.items.append(Item(stream, _visible(rest), self._clock()))
                pending.incomplete[stream] = ""

    def flush(self, final: bool = False) -> None:
        """Show the items that all ranks have, and items that have waited HOLD_S for other ranks.

        Args:
            final: show all items.
        """
        now = self._clock()
        while heads := {rank: pending.items[0] for rank, pending in self._pending.items() if pending.items}:
            if final or all(rank in heads or rank in self._ended for rank in self._pending):
                first = sorted(heads)  # every rank has an item: in order of rank
            else:
                waited = [rank for rank, item in heads.items() if now - item.arrived_s >= HOLD_S]
                first = sorted(waited, key=lambda rank: (heads[rank].arrived_s, rank))[:1]
            if not first:
                return
            shown: set[str] = set()
            for rank in first:
                key = heads[rank].key
                if key not in shown:
                    shown.add(key)
                    self._take(sorted(other for other, item in heads.items() if item.key == key))

    def _take(self, group: list[int]) -> None:
        """Show the next item of some ranks, which is equal for all of them."""
        items = [self._pending[rank].items.popleft() for rank in group]
        self._show(group, items[0].kind, items[0].content)


def _visible(line: str) -> str:
    """Return what is seen of a line that was rewritten after each carriage return."""
    return line.rstrip("\r").rpartition("\r")[2]


def label(group: list[int], num_ranks: int) -> str:
    """Return the prefix of a line that these ranks printed; empty if there is only one rank in all."""
    return "" if num_ranks == 1 else f"[{format_ranks(group)}] "
