"""How long a rank waits for others, and what it says meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from workbench import units
from workbench.errors import PeerFailed, Stalled

T = TypeVar("T")
SPINS = 200  # polls between which a waiting thread only gives its core away; then it sleeps
CHECK_S = 0.25  # how often a waiting rank looks whether a peer has failed


class Lookout(Protocol):
    """Who knows where the ranks are."""

    def note_wait(self, what: str) -> None:
        """The calling thread waits for that."""

    def describe_absent(self, what: str | None) -> str:
        """Who has not come to it, and what they do instead; "" if nobody knows."""


class Deadline:
    """How long a rank waits: looks for failed peers now and then, says after a while what it waits for, and gives up at a deadline.

    Args:
        what: what is waited for, for the message.
        failure: returns a peer's last words, or None.
        timeout_s: None waits for ever.
        spins: how often to give the core away before sleeping; a thread beside one that computes should not spin.
        held: seconds that the run has been held until now, which do not count.
        step: of what is waited for, for the message; told apart, since a message is hardly ever made.
        lookout: knows where the other ranks are.
    """

    def __init__(
        self,
        what: str,
        failure: Callable[[], str | None],
        timeout_s: float | None,
        spins: int = SPINS,
        held: Callable[[], float] = float,
        step: int | None = None,
        lookout: Lookout | None = None,
    ) -> None:
        self._what, self._step = what, step
        self._lookout = lookout
        self._says_after_s = units.SAYS_S
        self._failure = failure
        self._timeout_s = timeout_s
        self._held = held
        self._looked = time.perf_counter()
        self._begin = self._looked - held()
        self._spins = spins
        self._pauses = 0

    def check(self) -> None:
        """Raise if a peer has failed, or the deadline has passed."""
        now = time.perf_counter()
        if now - self._looked >= CHECK_S:
            self._looked = now
            words = self._failure()
            if words is not None:
                raise PeerFailed(words)
            self._tell(now - self._held() - self._begin)
        waited = now - self._held() - self._begin
        if self._timeout_s is not None and waited > self._timeout_s:
            raise Stalled(
                f"waited {waited:.0f} s for {self._whole}{self._absent()}: a rank is gone, much slower, or asks for something else. "
                "Raise timeout_s if it is only slow"
            )

    @property
    def _whole(self) -> str:
        return self._what if self._step is None else f"{self._what} of step {self._step}"

    def _absent(self) -> str:
        return self._lookout.describe_absent(self._whole) if self._lookout is not None else ""

    def _tell(self, waited_s: float) -> None:
        """Let the others know, and after a while whoever reads what this rank prints."""
        if not self._what:  # nothing is waited for: peers are asked whether they have failed
            return
        if self._lookout is not None:
            self._lookout.note_wait(self._whole)
        if waited_s >= self._says_after_s:
            while self._says_after_s <= waited_s:
                self._says_after_s *= 2
            print(f"waiting {waited_s:.0f} s for {self._whole}{self._absent()}", file=sys.stderr, flush=True)

    def pause(self) -> None:
        """Between two polls: first give the core away, then sleep, longer as time passes."""
        self._pauses += 1
        if self._pauses <= self._spins:
            os.sched_yield()
            return
        time.sleep(5e-5 if self._pauses < self._spins + 1000 else 5e-4)
        if self._pauses % 64 == 0 or self._pauses > 2000:
            self.check()


def on_a_thread(work: Callable[[], T], check: Callable[[], object]) -> T:
    """What `work` returns or raises, a library's call that nothing interrupts; `check` may end the wait for it, though not the call."""
    made: list[T] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            made.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
            failed.append(error)

    thread = threading.Thread(target=make, name="workbench-call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        check()
    if failed:
        raise failed[0]
    return made[0]
