"""Messages with stamps, from a rank to itself, and from any rank: what libraries refuse or do each in its own way."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from threading import Lock
from typing import Any, final

import torch
from torch import Tensor

from workbench.runtimes.transport import Handle, Patience, Transport

STAMP_BYTES = 8


def with_stamp(flat: Tensor, stamp: int) -> Tensor:
    """A message of bytes: the stamp, then the values. A copy."""
    body = flat.contiguous().view(torch.uint8)
    message = torch.empty(STAMP_BYTES + body.numel(), dtype=torch.uint8, device=flat.device)
    message[:STAMP_BYTES].view(torch.int64).fill_(stamp)
    message[STAMP_BYTES:].copy_(body)
    return message


def without_stamp(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """The values, in the message's memory, and the stamp."""
    return message[STAMP_BYTES:].view(dtype), int(message[:STAMP_BYTES].view(torch.int64))


@final
class Post:
    """One rank's letter box, and its receives from any rank that were posted and not used.

    A message to oneself never reaches the library (gloo refuses it). A receive from any rank looks into the box and at
    the library; where the box was first, the library's receive stays posted, since it cannot be taken back, and serves the
    next such receive. `parked` says at the end of a run what is still posted, so that a peer can send something for it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._box: dict[int, deque[tuple[Tensor, float]]] = defaultdict(deque)
        self._posted: dict[tuple[int, int], deque[tuple[Handle, Tensor]]] = defaultdict(deque)
        self._lock = Lock()

    def put(self, flat: Tensor, tag: int) -> Handle:
        """Send to oneself: done at once, with a copy."""
        self._box[tag].append((flat.clone(), time.perf_counter()))
        return Delivered()

    def take(self, tag: int) -> tuple[Tensor, float] | None:
        """The oldest message to oneself of that tag, and when it was sent."""
        with self._lock:
            return self._box[tag].popleft() if self._box[tag] else None

    def post_any(self, flat: Tensor, tag: int) -> tuple[Handle, Tensor]:
        """A receive from any other rank: one that was left, or a new one into `flat`."""
        with self._lock:
            left = self._posted[tag, flat.numel() * flat.element_size()]
            return left.popleft() if left else (self._transport.start_recv(-1, flat, tag), flat)

    def park(self, handle: Handle, flat: Tensor, tag: int) -> None:
        """Leave a posted receive to the next one of its tag and size."""
        with self._lock:
            self._posted[tag, flat.numel() * flat.element_size()].append((handle, flat))

    def parked(self) -> list[tuple[int, int]]:
        """(tag, bytes) of each receive that is still posted."""
        return [key for key, left in self._posted.items() for handle, _ in left if not handle.poll()]

    def finish(self, patience: Patience) -> None:
        """Wait for the messages that a peer sent to get rid of what is posted."""
        for left in self._posted.values():
            for handle, _ in left:
                handle.wait(patience)
        self._posted.clear()


@final
class Delivered(Handle):
    """A message to oneself."""

    def __init__(self) -> None:
        self.started_s = self.finished_s = time.perf_counter()

    def poll(self) -> bool:
        return True

    def wait(self, patience: Patience) -> None:
        """At once."""


@final
class BoxHandle(Handle):
    """A receive from oneself, or from any rank."""

    def __init__(self, post: Post, rank: int, flat: Tensor, tag: int, *, others: bool) -> None:
        self.started_s = time.perf_counter()
        self.source = rank
        self.flat = flat
        self._post, self._tag = post, tag
        self._remote: tuple[Handle, Tensor] | None = post.post_any(flat, tag) if others else None

    def poll(self) -> bool:
        if self.finished_s is not None:
            return True
        if self._remote is not None and self._remote[0].poll():
            handle, self.flat = self._remote
            self.source = handle.source  # type: ignore[attr-defined]  # a receive's handle has one
            self.finished_s = max(handle.finished_s or time.perf_counter(), self.started_s)  # it may have been posted for an earlier one
            return True
        found = self._post.take(self._tag)
        if found is None:
            return False
        self.flat = found[0].view(self.flat.dtype)
        if self._remote is not None:
            self._post.park(*self._remote, self._tag)
        self.finished_s = time.perf_counter()
        return True

    def wait(self, patience: Patience) -> None:
        while not self.poll():
            patience.pause()


def flush(post: Post, transport: Transport, patience: Any) -> None:
    """At the end of a run, on every rank: the next rank sends something for each receive that is still posted."""
    mine = ";".join(f"{tag}:{size}" for tag, size in post.parked())
    texts = transport.gather_texts(mine, patience("all ranks to leave the run"))
    neighbour = texts[(transport.rank + 1) % transport.num_workers]
    sends = []
    for item in filter(None, neighbour.split(";")):
        tag, size = map(int, item.split(":"))
        nothing = torch.zeros(size, dtype=torch.uint8, device=transport.device)
        sends.append(transport.start_send((transport.rank + 1) % transport.num_workers, nothing, tag))
    post.finish(patience("a message for what is still posted"))
    for handle in sends:
        handle.wait(patience("the next rank to receive"))
