"""What ranks say, put together: what is the same on several is shown once, with their numbers."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from workbench.kernel.cells import spoken_ranks

HOLD_S = 0.3  # a line waits so long for the same line of other ranks
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@final
@dataclass(frozen=True, slots=True)
class Item:
    """A whole line of text, or something displayed, of one rank.

    Attributes:
        kind: "stdout", "stderr", "display" or "result".
        content: the line without its end; for the others the MIME bundle {"data": ..., "metadata": ...}.
        said_s: when, by the caller's clock.
    """

    kind: str
    content: Any
    said_s: float

    @property
    def key(self) -> str:
        """Equal for what looks the same; an object's address does not count."""
        text = self.content if isinstance(self.content, str) else json.dumps(self.content["data"], sort_keys=True, default=str)
        return self.kind + ADDRESS.sub("0x", text)


@final
@dataclass(slots=True)
class Said:
    """What one rank has said and nobody has shown yet."""

    items: deque[Item] = field(default_factory=deque)
    part: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})


@final
class Merger:
    """Takes what ranks say, in each one's order, and shows it in groups.

    Args:
        ranks: whose words are awaited.
        show: called with the ranks, the kind, and the content.
        clock: seconds.
    """

    def __init__(
        self, ranks: Sequence[int], show: Callable[[list[int], str, Any], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._said = {rank: Said() for rank in ranks}
        self._show, self._clock = show, clock
        self._silent: set[int] = set()  # ranks that will say no more

    def text(self, rank: int, stream: str, text: str) -> None:
        """A piece of what a rank wrote; what has no line end yet waits for it. A carriage return begins the line anew."""
        said = self._said[rank]
        *whole, said.part[stream] = (said.part[stream] + text).split("\n")
        for line in whole:
            said.items.append(Item(stream, line.rstrip("\r").rpartition("\r")[2], self._clock()))

    def display(self, rank: int, kind: str, bundle: dict[str, Any]) -> None:
        """Something a rank displayed, or its last expression's value."""
        self._end_lines(rank)
        self._said[rank].items.append(Item(kind, bundle, self._clock()))

    def ended(self, rank: int) -> None:
        """That rank says no more."""
        self._end_lines(rank)
        self._silent.add(rank)

    def _end_lines(self, rank: int) -> None:
        said = self._said[rank]
        for stream, rest in said.part.items():
            if rest:
                said.items.append(Item(stream, rest, self._clock()))
                said.part[stream] = ""

    def flush(self, final: bool = False) -> None:
        """Show what is ready: the same of all ranks at once, and what has waited long enough for the others, or all of it."""
        now = self._clock()
        while heads := {rank: said.items[0] for rank, said in self._said.items() if said.items}:
            if final or all(rank in heads or rank in self._silent for rank in self._said):
                first = sorted(heads)  # all have something to say: in order of rank
            else:
                first = sorted(
                    (rank for rank, item in heads.items() if now - item.said_s >= HOLD_S), key=lambda rank: (heads[rank].said_s, rank)
                )[:1]
            if not first:
                return
            shown: set[str] = set()
            for rank in first:
                key = heads[rank].key
                if key not in shown:
                    shown.add(key)
                    self._take(sorted(other for other, item in heads.items() if item.key == key))

    def _take(self, group: list[int]) -> None:
        """Show what is next of some ranks, the same of all of them."""
        items = [self._said[rank].items.popleft() for rank in group]
        self._show(group, items[0].kind, items[0].content)


def label(group: list[int], num_ranks: int) -> str:
    """What stands before the words of some ranks; nothing where there is only one rank at all."""
    return "" if num_ranks == 1 else f"[{spoken_ranks(group)}] "
