"""Messages with stamps, messages to the rank itself, and receives from any rank, the same on every library."""

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

STAMP_BYTES = HEADER_BYTES  # the stamp is in the header; nothing else precedes the values


def with_header(flat: Tensor, word: int) -> Tensor:
    """A message of bytes, (8 + values,) uint8: a header, then the values. A copy."""
    body = flat.contiguous().view(torch.uint8)
    message = torch.empty(HEADER_BYTES + body.numel(), dtype=torch.uint8, device=flat.device)
    message[:HEADER_BYTES].view(torch.int64).fill_(word)
    message[HEADER_BYTES:].copy_(body)
    return message


def header_of(message: Tensor) -> int:
    """The header that `with_header` wrote."""
    return int(message[:HEADER_BYTES].view(torch.int64))


def without_header(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, as a view of the message."""
    return message[HEADER_BYTES:].view(dtype)


@final
class Mailbox:
    """One rank's messages to itself, and its posted receives from any rank.

    A message to the rank itself never reaches the library (gloo refuses it). A receive from any rank polls the mailbox
    and the library. If the mailbox is first, the library's receive stays posted, because it cannot be cancelled, and
    serves the next such receive. At the end of a run, `parked` lists the receives that are still posted, so that a peer
    can send a message for each.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._messages: dict[int, deque[tuple[Tensor, float]]] = defaultdict(deque)
        self._posted: dict[tuple[int, int], deque[tuple[Handle, Tensor]]] = defaultdict(deque)
        self._lock = Lock()
        self._told: dict[int, int] = {}  # tag -> number of departures that its receives have reported
        self._outgoing: dict[tuple[int, int], Channel] = {}  # (receiver, tag) of messages with stamps
        self._incoming: dict[tuple[int, int], Channel] = {}  # (sender, tag)

    def put(self, flat: Tensor, tag: int) -> Handle:
        """Send a copy to this rank; complete at once."""
        copy = flat.clone()
        with self._lock:
            self._messages[tag].append((copy, time.perf_counter()))
        return Delivered()

    def take(self, tag: int) -> tuple[Tensor, float] | None:
        """The oldest message of that tag to this rank, and when it was sent; None if there is none."""
        with self._lock:
            return self._messages[tag].popleft() if self._messages[tag] else None

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
            RankMismatch: its length or dtype is not the one that this rank expects.
        """
        channel = self._incoming.get((source, tag))
        if channel is None:
            channel = self._incoming[source, tag] = Channel(source, self._transport.rank, tag)
        return channel.accept(header_of(message), message.nbytes, dtype, getattr(handle, "num_bytes", None))

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        """A receive of a message with a header from one other rank."""
        if self._transport.members is not None:
            flat[:HEADER_BYTES].zero_()  # nothing comes after a departure; old memory must not look like a message
        return self._transport.start_recv(source, flat, tag)

    def has_left(self, rank: int) -> bool:
        """Return True if that rank has left."""
        members = self._transport.members
        return members is not None and members.has_left(rank)

    def post_any(self, flat: Tensor, tag: int) -> tuple[Handle, Tensor]:
        """A receive from any other rank: a parked one, or a new one into `flat`."""
        with self._lock:
            left = self._posted[tag, flat.numel() * flat.element_size()]
            return left.popleft() if left else (self._transport.start_recv(-1, flat, tag), flat)

    def next_departure(self, tag: int) -> int | None:
        """A rank that has left and that the receives of this tag have not reported; None if there is none."""
        members = self._transport.members
        if members is None or len(gone := members.departures()) <= self._told.get(tag, 0):
            return None
        self._told[tag] = self._told.get(tag, 0) + 1
        return gone[self._told[tag] - 1].rank

    def forget_departures(self) -> None:
        """Report every departure again: another program begins, and its receives must learn of them."""
        self._told.clear()

    def is_reported(self, tag: int, rank: int) -> bool:
        """Return True if the receives of this tag have reported that `rank` has left."""
        members = self._transport.members
        return members is not None and any(row.rank == rank for row in members.gone[: self._told.get(tag, 0)])

    def park(self, handle: Handle, flat: Tensor, tag: int) -> None:
        """Keep a posted receive for the next one of its tag and size."""
        with self._lock:
            self._posted[tag, flat.numel() * flat.element_size()].append((handle, flat))

    def parked(self) -> list[tuple[int, int]]:
        """(tag, bytes) of each parked receive that is not complete."""
        return [key for key, left in self._posted.items() for handle, _ in left if not handle.poll()]

    def finish(self, deadline: Deadline) -> None:
        """Wait for the messages that a peer sends to complete parked receives."""
        for left in self._posted.values():
            for handle, _ in left:
                handle.wait(deadline)
        self._posted.clear()


@final
class Delivered(Handle):
    """A message to the rank itself."""

    def __init__(self) -> None:
        self.started_s = self.finished_s = time.perf_counter()

    def poll(self) -> bool:
        return True

    def wait(self, deadline: Deadline) -> None:
        """It is complete."""


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
    """A receive of a message with a stamp from one other rank.

    Args:
        flat: memory for the message, with its header.
        dtype: of the values.
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
            stamp = 0  # nothing came, because the sender has left: the next check of the members reports it
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
    """A receive from this rank or from any other.

    Args:
        others: whether other ranks may send.
        departures: whether it also completes when a rank leaves.
        dtype: of the values of a message with a stamp; None for a message without a stamp.
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
        self.left: int | None = None  # the rank that has left, in place of a message
        self._departures = departures and others
        self.flat = flat
        self._mailbox, self._tag = mailbox, tag
        self._remote: tuple[Handle, Tensor] | None = mailbox.post_any(flat, tag) if others else None

    def poll(self) -> bool:
        if self.finished_s is not None:
            return True
        if self._remote is not None and self._remote[0].poll():
            if self._departures and self._mailbox.is_reported(self._tag, self._remote[0].source):  # type: ignore[attr-defined]  # as below
                # Its sender's departure was reported before.
                self._remote = self._mailbox.post_any(torch.empty_like(self.flat), self._tag)
                return False
            handle, flat = self._remote
            source = handle.source  # type: ignore[attr-defined]  # a receive's handle has one
            stamp = 0 if self._dtype is None else self._mailbox.accept(handle, flat, self._dtype, source, self._tag)
            if stamp is None:
                self._remote = self._mailbox.post_any(flat, self._tag)
                return False
            self.source, self.flat, self.stamp = source, flat, stamp
            # The library's receive may have been posted, and completed, before this one began.
            self.finished_s = max(handle.finished_s or time.perf_counter(), self.started_s)
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
    """Complete parked receives at the end of a run: each rank sends a message for each one of the previous rank."""
    mine = ";".join(f"{tag}:{size}" for tag, size in mailbox.parked())
    texts = transport.gather_texts(mine, deadline("all ranks to leave the run"))
    if LEFT_TEXT in texts:
        return  # parked receives may wait for a rank that has left
    neighbour = texts[(transport.rank + 1) % transport.num_workers]
    sends = []
    for item in filter(None, neighbour.split(";")):
        tag, size = map(int, item.split(":"))
        nothing = torch.zeros(size, dtype=torch.uint8, device=transport.device)
        sends.append(transport.start_send((transport.rank + 1) % transport.num_workers, nothing, tag))
    mailbox.finish(deadline("messages for the receives that are still posted"))
    for handle in sends:
        handle.wait(deadline("the next rank to receive"))
