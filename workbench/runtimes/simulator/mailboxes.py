"""Where messages and receives of a simulated network wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, final

Offer = tuple[int, int, Any, Callable[[Any], None], Any, int, int]
"""A message that can be sent: sender, bytes, value, what to call with which argument when it has arrived, number, priority. A plain tuple,
as `Asked` is: they are made a hundred thousand times a second."""

Asked = tuple[Callable[[Any, int, Any], None], Any]
"""A receive: what to call with which argument, and the sender and the value, when its message has arrived."""


@final
class AnySourceQueue:
    """What waits where a receive from any rank was asked for: offers and receives, the oldest first."""

    __slots__ = ("asked", "offers")

    def __init__(self) -> None:
        self.offers: deque[Offer] = deque()
        self.asked: list[tuple[int, Asked]] = []  # from whom (-1: any), what

    def take(self, source: int) -> Offer | None:
        """The oldest offer of a rank (-1: of any)."""
        if source < 0:
            return self.offers.popleft()
        for position, offer in enumerate(self.offers):
            if offer[0] == source:
                del self.offers[position]
                return offer
        return None

    def ask(self, sender: int) -> Asked | None:
        """The oldest receive for a rank's offer: of those from that rank, or else of those from any."""
        for wanted in (sender, -1):
            for position, (source, asked) in enumerate(self.asked):
                if source == wanted:
                    del self.asked[position]
                    return asked
        return None


# A box of waiting offers or receives: the one that there is, nearly always, or a queue of them.


def put(boxes: dict[Any, Any], box: Any, item: Any) -> None:
    """Leave one more there."""
    there = boxes.setdefault(box, item)
    if there is item:
        return
    if there.__class__ is deque:
        there.append(item)
    else:
        boxes[box] = deque((there, item))


def take(boxes: dict[Any, Any], box: Any) -> Any:
    """The oldest; None where there is none."""
    there = boxes.pop(box, None)
    if there.__class__ is deque:
        first = there.popleft()
        boxes[box] = there if len(there) > 1 else there[0]
        return first
    return there


def every(box: Any) -> Any:
    """All that is in a box."""
    return box if box.__class__ is deque else (box,)
