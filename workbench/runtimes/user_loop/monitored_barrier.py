"""A monitored barrier: compares what each rank calls, because ranks may call step, save or finish differently.

Collectives that do not match must never meet: gloo then ends the process (`EnforceNotMet`), and MPI hangs or truncates.
So before the first collective of `save`, `load` or `finish`, a rank reports out of band what it calls and after how
many steps. It waits until all ranks have reported the same. A step reports nothing and costs nothing. A rank that waits
in a step checks, as often as for failed peers, whether another rank has reached the next barrier after fewer steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from workbench.errors import RankMismatch
from workbench.runtimes.transport.base import Deadline, Transport

FIRST_PAUSE_S, LAST_PAUSE_S = 1e-4, 5e-3  # between two polls of the barrier
LEFT_EARLY = "end"  # reported by a rank that leaves without `finish`
MESSAGES = {
    "save": "calls save()",
    "load": "calls load()",
    "finish": "calls finish()",
    "evaluating": "enters evaluating()",
    "stop_requested": "calls stop_requested()",
    LEFT_EARLY: "has ended without finish()",
}
AFTER_THE_LOOP = "What an algorithm does after its loop begins when all ranks have called finish(), unless it declares `asynchronous`"
FIXES = {
    LEFT_EARLY: "leave the `with` block, or call finish(), on every rank after the same number of steps",
    "save": "call save() on every rank after the same step, and not under `if rank == 0`",
    "load": "call load() on every rank, before its first step",
    "evaluating": "enter evaluating() on every rank after the same step, and not under `if rank == 0`",
    "stop_requested": "call stop_requested() on every rank after the same step, and not under `if rank == 0`",
    "finish": (
        "give every rank the same number of batches (DistributedSampler(drop_last=True)), or call step(None) on a rank "
        f"that has no more. {AFTER_THE_LOOP}"
    ),
}


@final
class MonitoredBarrier:
    """One rank's end of the barriers of a training.

    Attributes:
        steps: how many this rank has begun.

    Args:
        in_step: ranks take their steps together. Otherwise a rank may be ahead, and no call but the end is reported.
    """

    def __init__(self, transport: Transport, *, in_step: bool = True) -> None:
        self.steps = 0
        self._in_step = in_step
        self._transport = transport
        # The number of the next barrier, and what this rank has reported at it. One value, replaced as a whole: threads
        # that drive collectives call `num_arrived` meanwhile.
        self._reported = (0, "")

    def wait(self, what: str, deadline: Deadline, tick: Callable[[], bool], *, counted: bool = True) -> None:
        """Wait until all ranks have made the same call, after the same number of steps.

        Args:
            what: "save", "load", "evaluating", "stop_requested" or "finish".
            tick: makes progress with operations if no thread does; returns whether anything moved.
            counted: whether the number of steps must be equal.

        Raises:
            RankMismatch: another rank makes another call.
        """
        if self._transport.num_workers == 1:
            return
        self._announce(what, counted=counted)
        pause_s = FIRST_PAUSE_S
        while self.num_arrived() < self._transport.num_workers:
            if not tick():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            deadline.check()
        self._reported = (self._reported[0] + 1, "")

    def leave(self) -> None:
        """Report that this rank takes no more steps and has not called `finish`. Does not wait."""
        if self._transport.num_workers > 1 and not self._reported[1]:
            self._announce(LEFT_EARLY)

    def num_arrived(self) -> int:
        """Number of ranks that have reported the same as this one.

        Raises:
            RankMismatch: a rank has reported another call, or a call after fewer steps than this rank has begun.
        """
        number, own = self._reported
        same, other = self._transport.arrivals(number, own)
        if other is None:
            return same
        rank, text = other
        what, _, steps = text.partition(" ")
        ahead = bool(steps) and int(steps) >= self.steps if self._in_step else what != LEFT_EARLY
        if ahead and not own:
            return same
        here, _, steps_here = own.partition(" ")
        mine = _format_arrival(here, steps_here) if own else f"has begun {_count(self.steps)}"
        fix = next(words for call, words in FIXES.items() if call in (what, here))
        raise RankMismatch(f"rank {rank} {_format_arrival(what, steps)}, but rank {self._transport.rank} {mine}: {fix}")

    def _announce(self, what: str, *, counted: bool = True) -> None:
        number, text = self._reported[0], f"{what} {self.steps}" if counted else what
        self._reported = (number, text)
        self._transport.arrive(number, text)


def _format_arrival(what: str, steps: str) -> str:
    return MESSAGES[what] + (f" after {_count(int(steps))}" if steps else "")


def _count(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"
