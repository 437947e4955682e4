"""Queues of a simulated network in which messages and receives wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, final

PostedSend = tuple[int, int, Any, Callable[[Any], None], Any, int, int]
"""A message that can be sent: sender, bytes, value, callback and its argument, number, priority. The callback runs on arrival. Offers
and receives are plain tuples, because a simulation makes a hundred thousand of them in a second."""

PostedRecv = tuple[Callable[[Any, int, Any], None], Any]
"""A receive: callback and its first argument. On arrival it is called with this argument, the sender and the value."""


@final
class AnySourceQueue:
    """Offers and receives of a receiver and tag with receives from any rank, the oldest first."""

    __slots__ = ("asked", "offers")

    def __init__(self) -> None:
        self.offers: deque[PostedSend] = deque()
        self.asked: list[tuple[int, PostedRecv]] = []  # (source, or -1 for any; receive)

    def take(self, source: int) -> PostedSend | None:
        """Remove and return the oldest offer of a rank (-1: of any)."""
        if source < 0:
            return self.offers.popleft()
        for position, offer in enumerate(self.offers):
            if offer[0] == source:
                del self.offers[position]
                return offer
        return None

    def ask(self, sender: int) -> PostedRecv | None:
        """Remove and return the oldest receive from this rank, or else the oldest from any rank."""
        if len(self.asked) == 1:  # nearly always
            return self.asked.pop()[1] if self.asked[0][0] in (sender, -1) else None
        for wanted in (sender, -1):
            for position, (source, asked) in enumerate(self.asked):
                if source == wanted:
                    del self.asked[position]
                    return asked
        return None


# A box has the waiting offers or receives of one route: a single item itself, or several in a deque.


def put(boxes: dict[Any, Any], box: Any, item: Any) -> None:
    """Add an item to a box."""
    there = boxes.setdefault(box, item)
    if there is item:
        return
    if there.__class__ is deque:
        there.append(item)
    else:
        boxes[box] = deque((there, item))


def take(boxes: dict[Any, Any], box: Any) -> Any:
    """Remove and return the oldest item; None if there is none."""
    there = boxes.pop(box, None)
    if there.__class__ is deque:
        first = there.popleft()
        boxes[box] = there if len(there) > 1 else there[0]
        return first
    return there


def every(box: Any) -> Any:
    """Return all items of a box."""
    return box if box.__class__ is deque else (box,)
