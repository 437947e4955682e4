"""How long a rank waits for others, and what it reports during the wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from workbench import units
from workbench.errors import PeerFailed, Stalled
from workbench.logs import LOG

T = TypeVar("T")
SPINS = 200  # polls after which a waiting thread sleeps; before, it only yields its core
CHECK_S = 0.25  # between two checks for a failed peer


class PeerStatus(Protocol):
    """Reports what the other ranks do."""

    def note_wait(self, what: str) -> None:
        """Note that the calling thread waits for `what`."""

    def describe_absent(self, what: str | None) -> str:
        """Return which ranks have not reached it, and what they do instead; "" if that is unknown."""


class Deadline:
    """A wait with an end: it checks for failed peers, reports what it waits for, and gives up at the deadline.

    Args:
        what: what is waited for, for the message.
        failure: returns the failure that a peer announced, or None.
        timeout_s: None: no deadline.
        spins: polls that only yield the core before the thread sleeps. Give 0 to a thread next to one that computes.
        pause_seconds: seconds that the run has been paused until now; they do not count.
        step: the step of what is waited for. It is a separate argument because the message is rarely needed.
        peer_status: reports what the other ranks do.
    """

    def __init__(
        self,
        what: str,
        failure: Callable[[], str | None],
        timeout_s: float | None,
        spins: int = SPINS,
        pause_seconds: Callable[[], float] = float,
        step: int | None = None,
        peer_status: PeerStatus | None = None,
    ) -> None:
        self._what, self._step = what, step
        self._peer_status = peer_status
        self._report_after_s = units.WAIT_REPORT_S
        self._failure = failure
        self._timeout_s = timeout_s
        self._held = pause_seconds
        self._looked = time.perf_counter()
        self._begin = self._looked - pause_seconds()
        self._spins = spins
        self._pauses = 0

    def check(self) -> None:
        """Raise `PeerFailed` if a peer has failed, and `Stalled` if the deadline has passed."""
        now = time.perf_counter()
        if now - self._looked >= CHECK_S:
            self._looked = now
            reason = self._failure()
            if reason is not None:
                raise PeerFailed(reason)
            self._report_wait(now - self._held() - self._begin)
        waited = now - self._held() - self._begin
        if self._timeout_s is not None and waited > self._timeout_s:
            raise Stalled(
                f"waited {waited:.0f} s for {self._whole}{self._absent()}: a rank has ended, is much slower, or makes "
                "another call. If it is only slow, raise timeout_s"
            )

    @property
    def _whole(self) -> str:
        return self._what if self._step is None else f"{self._what} of step {self._step}"

    def _absent(self) -> str:
        return self._peer_status.describe_absent(self._whole) if self._peer_status is not None else ""

    def _report_wait(self, waited_s: float) -> None:
        """Report the wait in this rank's heartbeat and, after a while, on standard error."""
        if not self._what:  # a check for failed peers, not a wait
            return
        if self._peer_status is not None:
            self._peer_status.note_wait(self._whole)
        if waited_s >= self._report_after_s:
            while self._report_after_s <= waited_s:
                self._report_after_s *= 2
            LOG.warning("waiting %.0f s for %s%s", waited_s, self._whole, self._absent())

    def pause(self) -> None:
        """Pause between two polls: first yield the core, then sleep, longer as time passes."""
        self._pauses += 1
        if self._pauses <= self._spins:
            os.sched_yield()
            return
        polls = self._pauses - self._spins
        time.sleep(5e-5 if polls < 1000 else 5e-4 if polls < 1200 else 2e-3)
        if polls % 64 == 0 or polls >= 1200:
            self.check()


def on_a_thread(work: Callable[[], T], check: Callable[[], object]) -> T:
    """Run `work`, a library call that cannot be interrupted, on a thread. Return or raise what it does.

    Args:
        check: called meanwhile. It may raise to end the wait; the call itself continues.
    """
    made: list[T] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            made.append(work())
        except BaseException as error:  # noqa: BLE001 - raised on the calling thread
            failed.append(error)

    thread = threading.Thread(target=make, name="workbench-call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        check()
    if failed:
        raise failed[0]
    return made[0]
