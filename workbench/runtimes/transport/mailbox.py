"""Messages with stamps, from a rank to itself, and from any rank: what libraries refuse or do each in its own way."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from threading import Lock
from typing import Any, final

import torch
from torch import Tensor

from workbench.errors import RankMismatch
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.runtimes.transport.base import Deadline, Handle, Transport
from workbench.runtimes.transport.framing import HEADER_BYTES, Channel, header, stamp_in

STAMP_BYTES = HEADER_BYTES  # the stamp is in the header, and nothing else goes before the values


def with_header(flat: Tensor, word: int) -> Tensor:
    """A message of bytes: the header, then the values. A copy."""
    body = flat.contiguous().view(torch.uint8)
    message = torch.empty(HEADER_BYTES + body.numel(), dtype=torch.uint8, device=flat.device)
    message[:HEADER_BYTES].view(torch.int64).fill_(word)
    message[HEADER_BYTES:].copy_(body)
    return message


def header_of(message: Tensor) -> int:
    """What `with_header` put there."""
    return int(message[:HEADER_BYTES].view(torch.int64))


def without_header(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, in the message's memory."""
    return message[HEADER_BYTES:].view(dtype)


@final
class Mailbox:
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
        self._told: dict[int, int] = {}  # tag -> of how many departures its receives have been told
        self._outgoing: dict[tuple[int, int], Channel] = {}  # (receiver, tag) of messages with stamps
        self._incoming: dict[tuple[int, int], Channel] = {}  # (sender, tag)

    def put(self, flat: Tensor, tag: int) -> Handle:
        """Send to oneself: done at once, with a copy."""
        copy = flat.clone()
        with self._lock:
            self._box[tag].append((copy, time.perf_counter()))
        return Delivered()

    def take(self, tag: int) -> tuple[Tensor, float] | None:
        """The oldest message to oneself of that tag, and when it was sent."""
        with self._lock:
            return self._box[tag].popleft() if self._box[tag] else None

    def send(self, to: int, flat: Tensor, tag: int, stamp: int) -> Handle:
        """Send with a stamp; announce the length first where it is new on this channel."""
        message = with_header(flat, header(stamp))
        if to == self._transport.rank:
            return self.put(message, tag)
        channel = self._outgoing.get((to, tag))
        if channel is None:
            channel = self._outgoing[to, tag] = Channel(self._transport.rank, to, tag)
        announcement = channel.announcement(message.nbytes, flat.dtype)
        if announcement is None:
            return self._transport.start_send(to, message, tag)
        first = self._transport.start_send(to, with_header(flat[:0], announcement), tag)
        return AnnouncedSend(first, self._transport.start_send(to, message, tag))

    def accept(self, handle: Handle, message: Tensor, dtype: torch.dtype, source: int, tag: int) -> int | None:
        """The stamp of a message that arrived; None for an announcement: wait for the next message.

        Raises:
            RankMismatch: it has another length or dtype than this rank expects.
        """
        channel = self._incoming.get((source, tag))
        if channel is None:
            channel = self._incoming[source, tag] = Channel(source, self._transport.rank, tag)
        return channel.accept(header_of(message), message.nbytes, dtype, getattr(handle, "num_bytes", None))

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        """A receive of a message with a header from one other rank."""
        if self._transport.members is not None:
            flat[:HEADER_BYTES].zero_()  # one that has left sends nothing, and what was here before must not pass for it
        return self._transport.start_recv(source, flat, tag)

    def has_left(self, rank: int) -> bool:
        """Whether that rank has left."""
        members = self._transport.members
        return members is not None and members.has_left(rank)

    def post_any(self, flat: Tensor, tag: int) -> tuple[Handle, Tensor]:
        """A receive from any other rank: one that was left, or a new one into `flat`."""
        with self._lock:
            left = self._posted[tag, flat.numel() * flat.element_size()]
            return left.popleft() if left else (self._transport.start_recv(-1, flat, tag), flat)

    def next_departure(self, tag: int) -> int | None:
        """A rank that has left, of which the receives of this tag have not been told; None where there is none."""
        members = self._transport.members
        if members is None or len(gone := members.departures()) <= self._told.get(tag, 0):
            return None
        self._told[tag] = self._told.get(tag, 0) + 1
        return gone[self._told[tag] - 1].rank

    def forget_departures(self) -> None:
        """Another program begins, which knows of no departure."""
        self._told.clear()

    def is_reported(self, tag: int, rank: int) -> bool:
        """Whether they have been told that this rank has left."""
        members = self._transport.members
        return members is not None and any(row.rank == rank for row in members.gone[: self._told.get(tag, 0)])

    def park(self, handle: Handle, flat: Tensor, tag: int) -> None:
        """Leave a posted receive to the next one of its tag and size."""
        with self._lock:
            self._posted[tag, flat.numel() * flat.element_size()].append((handle, flat))

    def parked(self) -> list[tuple[int, int]]:
        """(tag, bytes) of each receive that is still posted."""
        return [key for key, left in self._posted.items() for handle, _ in left if not handle.poll()]

    def finish(self, deadline: Deadline) -> None:
        """Wait for the messages that a peer sent to get rid of what is posted."""
        for left in self._posted.values():
            for handle, _ in left:
                handle.wait(deadline)
        self._posted.clear()


@final
class Delivered(Handle):
    """A message to oneself."""

    def __init__(self) -> None:
        self.started_s = self.finished_s = time.perf_counter()

    def poll(self) -> bool:
        return True

    def wait(self, deadline: Deadline) -> None:
        """At once."""


@final
class AnnouncedSend(Handle):
    """An announcement and the message that follows it."""

    def __init__(self, before: Handle, handle: Handle) -> None:
        self.started_s = before.started_s
        self._before, self._handle = before, handle

    def poll(self) -> bool:
        if self.finished_s is None and self._before.poll() and self._handle.poll():
            self.finished_s = self._handle.finished_s
        return self.finished_s is not None

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            self._before.wait(deadline)
            self._handle.wait(deadline)


@final
class StampedHandle(Handle):
    """A receive of a message with a stamp from one other rank: of what comes, the next that is to be used.

    Args:
        flat: where it comes, header and all.
        dtype: of its values.
    """

    def __init__(self, mailbox: Mailbox, source: int, flat: Tensor, tag: int, dtype: torch.dtype) -> None:
        self.started_s = time.perf_counter()
        self.source, self.flat, self.stamp = source, flat, 0
        self._mailbox, self._tag, self._dtype = mailbox, tag, dtype
        self._inner = mailbox.start_recv(source, flat, tag)

    def poll(self) -> bool:
        if self.finished_s is not None:
            return True
        if not self._inner.poll():
            return False
        try:
            stamp = self._mailbox.accept(self._inner, self.flat, self._dtype, self.source, self._tag)
        except RankMismatch:
            if not self._mailbox.has_left(self.source):
                raise
            stamp = 0  # nothing came: whoever waits for a rank that has left hears of it by its next look
        if stamp is None:
            self._inner = self._mailbox.start_recv(self.source, self.flat, self._tag)
            return False
        self.stamp, self.finished_s = stamp, self._inner.finished_s or time.perf_counter()
        return True

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            self._inner.wait(deadline)


@final
class AnySourceRecv(Handle):
    """A receive from oneself, or from any rank.

    Args:
        dtype: of the values of a message with a stamp; None for one without.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        rank: int,
        flat: Tensor,
        tag: int,
        *,
        others: bool,
        departures: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.started_s = time.perf_counter()
        self.stamp = 0
        self._dtype = dtype
        self.source = rank
        self.left: int | None = None  # in place of a message: who has left
        self._departures = departures and others
        self.flat = flat
        self._mailbox, self._tag = mailbox, tag
        self._remote: tuple[Handle, Tensor] | None = mailbox.post_any(flat, tag) if others else None

    def poll(self) -> bool:
        if self.finished_s is not None:
            return True
        if self._remote is not None and self._remote[0].poll():
            if self._departures and self._mailbox.is_reported(self._tag, self._remote[0].source):  # type: ignore[attr-defined]  # as below
                self._remote = self._mailbox.post_any(torch.empty_like(self.flat), self._tag)  # it came after the news of its sender's end
                return False
            handle, flat = self._remote
            source = handle.source  # type: ignore[attr-defined]  # a receive's handle has one
            stamp = 0 if self._dtype is None else self._mailbox.accept(handle, flat, self._dtype, source, self._tag)
            if stamp is None:
                self._remote = self._mailbox.post_any(flat, self._tag)
                return False
            self.source, self.flat, self.stamp = source, flat, stamp
            self.finished_s = max(handle.finished_s or time.perf_counter(), self.started_s)  # it may have been posted for an earlier one
            return True
        found = self._mailbox.take(self._tag)
        if found is not None:
            self.flat = found[0].view(self.flat.dtype)
            self.stamp = 0 if self._dtype is None else stamp_in(header_of(self.flat))
        elif self._departures:
            self.left = self._mailbox.next_departure(self._tag)
        if found is None and self.left is None:
            return False
        if self._remote is not None:
            self._mailbox.park(*self._remote, self._tag)
        self.finished_s = time.perf_counter()
        return True

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            deadline.pause()


def flush(mailbox: Mailbox, transport: Transport, deadline: Any) -> None:
    """At the end of a run, on every rank: the next rank sends something for each receive that is still posted."""
    mine = ";".join(f"{tag}:{size}" for tag, size in mailbox.parked())
    texts = transport.gather_texts(mine, deadline("all ranks to leave the run"))
    if LEFT_TEXT in texts:
        return  # the library stays as it is: what was posted may wait for one that has left
    neighbour = texts[(transport.rank + 1) % transport.num_workers]
    sends = []
    for item in filter(None, neighbour.split(";")):
        tag, size = map(int, item.split(":"))
        nothing = torch.zeros(size, dtype=torch.uint8, device=transport.device)
        sends.append(transport.start_send((transport.rank + 1) % transport.num_workers, nothing, tag))
    mailbox.finish(deadline("a message for what is still posted"))
    for handle in sends:
        handle.wait(deadline("the next rank to receive"))
