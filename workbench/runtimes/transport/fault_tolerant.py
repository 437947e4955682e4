"""Messages in a run with peers that may leave: one behaviour for all libraries when the other process is gone.

gloo's behaviour, found by experiment: a send to a dead peer raises. A receive raises if the dead peer had begun to send
its message. A receive from any rank stays valid if no rank had begun to send. If the peer had announced a message
before it died, every later receive from any rank with that tag raises. Then one receive is posted for each remaining
rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from workbench.errors import PeerFailed
from workbench.runtimes.liveness.membership import Membership
from workbench.runtimes.transport.base import Deadline, Handle

GRACE_S = 5.0  # from a library's error until a departure must explain it


@final
class PeerHandle(Handle):
    """A message to or from one rank.

    It completes without a message if that rank has left and the run continues without it.

    Args:
        begin: begins the operation; may raise.
    """

    def __init__(self, members: Membership, peer: int, begin: Callable[[], Handle]) -> None:
        self.started_s = time.perf_counter()
        self.source = peer
        self._members = members
        self._inner: Handle | None = None
        self._error: RuntimeError | None = None
        self._failed_s = 0.0
        try:
            self._inner = begin()
        except RuntimeError as error:
            self._fail(error)

    @property
    def num_bytes(self) -> int | None:
        """Length of the received message, where the library reports it."""
        return getattr(self._inner, "num_bytes", None)

    def _fail(self, error: RuntimeError) -> None:
        self._inner, self._error, self._failed_s = None, error, time.monotonic()

    def poll(self) -> bool:
        if self.finished_s is not None:
            return True
        try:
            done = self._inner is not None and self._inner.poll()
        except RuntimeError as error:
            self._fail(error)
            done = False
        if not done and not self._is_gone():
            return False
        self.finished_s = time.perf_counter()
        return True

    def _is_gone(self) -> bool:
        """Return True if that rank has left.

        Raises:
            PeerFailed: it has left, and the run cannot continue without it.
        """
        check_departure(self._members, self._error, self._failed_s, self.source)
        if not self._members.has_left(self.source):
            return False
        reason = self._members.failure()
        if reason is not None:
            raise PeerFailed(reason)
        if self._inner is not None:
            self._inner.abandon()
        return True

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            event = getattr(self._inner, "event", None)
            if event is None:
                deadline.pause()
            elif not event.wait(0.1):
                deadline.check()


@final
class AnyHandle(Handle):
    """A receive from any rank. If a rank has begun to send and then leaves, the receive is posted again.

    Args:
        begin: (source, memory) -> a receive; source -1 is any rank.
        fan: rank -> a receive from that rank, and its memory. Posted where a receive from any rank fails; shared with
            later receives.
    """

    def __init__(
        self,
        members: Membership,
        flat: Tensor,
        begin: Callable[[int, Tensor], Handle],
        fan: dict[int, tuple[Handle, Tensor]],
    ) -> None:
        self.started_s = time.perf_counter()
        self.source = -1
        self._members, self._flat, self._begin, self._fan = members, flat, begin, fan
        self._inner: Handle | None = None
        self._error: RuntimeError | None = None
        self._failed_s = 0.0
        self.poll()

    def poll(self) -> bool:
        if self.finished_s is None and (self._poll_fan() if self._fan else self._poll_any()):
            self.finished_s = time.perf_counter()
        return self.finished_s is not None

    def _poll_any(self) -> bool:
        try:
            if self._inner is None:
                self._inner = self._begin(-1, self._flat)
            done, self.source = self._inner.poll(), self._inner.source  # type: ignore[attr-defined]  # a receive's handle has one
        except RuntimeError as error:
            posted, self._inner = self._inner is not None, None
            self._note(error)
            return not posted and self._poll_fan()
        return bool(done)

    def _poll_fan(self) -> bool:
        for peer in range(self._members.num_ranks):
            if peer == self._members.rank or self._members.has_left(peer):
                self._fan.pop(peer, None)
                continue
            try:
                if peer not in self._fan:
                    memory = torch.empty_like(self._flat)
                    self._fan[peer] = (self._begin(peer, memory), memory)
                handle, memory = self._fan[peer]
                if handle.poll():
                    del self._fan[peer]
                    self._flat.copy_(memory)
                    self.source = peer
                    return True
            except RuntimeError as error:
                self._fan.pop(peer, None)
                self._note(error, peer)
        return False

    def _note(self, error: RuntimeError, peer: int | None = None) -> None:
        if self._error is None:
            self._error, self._failed_s = error, time.monotonic()
        check_departure(self._members, error, self._failed_s, peer)

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            deadline.pause()


def check_departure(members: Membership, error: RuntimeError | None, since_s: float, peer: int | None) -> None:
    """Raise if the run cannot continue, or if no departure explains the library's error within `GRACE_S`.

    Args:
        since_s: when the error came, on `time.monotonic`.
        peer: the rank at the other end; None if the library does not tell.
    """
    if error is None:
        return
    reason = members.failure()
    if reason is not None:
        raise PeerFailed(reason) from error
    explained = bool(members.departures()) if peer is None else members.has_left(peer)
    if not explained and time.monotonic() - since_s > GRACE_S:
        raise error
