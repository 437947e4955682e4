"""Ranks come to a run: until all are there, nobody has joined a library's group, which would wait for who is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from workbench.runtimes.liveness.deadline import Patience
from workbench.runtimes.liveness.failure_detector import MOST_NAMED, Presence, presence_name

WHAT = "all ranks to join the run"


def wait_for_all(presence: Presence, timeout_s: float, failure: Callable[[], str | None] = lambda: None) -> None:
    """Until every rank has left word in the run's folder that it is there.

    Args:
        failure: words of a rank that ended before it could leave any.

    Raises:
        PeerFailed: one that had come is gone again.
        Stalled: not all have come in time; names those that have not.
    """
    patience = Patience(WHAT, lambda: failure() or presence.who_is_gone(), timeout_s, lookout=_Missing(presence))
    while missing(presence):
        patience.pause()


def missing(presence: Presence) -> list[int]:
    """Ranks that have left no word of theirs."""
    others = [rank for rank in range(presence.num_ranks) if rank != presence.rank]
    return [rank for rank in others if not (presence.folder / presence_name(rank)).exists()]


@final
@dataclass(frozen=True, slots=True)
class _Missing:
    """Knows who has not come at all."""

    presence: Presence

    def waits(self, what: str) -> None:
        """The calling thread waits for that."""
        self.presence.waits(what)

    def absent(self, what: str | None) -> str:
        """`: rank 2 has not come`."""
        late = missing(self.presence)
        words = ", ".join(f"rank {rank} has not come" for rank in late[:MOST_NAMED])
        return f": {words}, and {len(late) - MOST_NAMED} others" if len(late) > MOST_NAMED else f": {words}"
