"""Rendezvous: no rank joins a library's group before all have started, because the group would wait forever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.liveness.failure_detector import MAX_NAMED, FailureDetector, heartbeat_name

WAITED_FOR = "all ranks to join the run"


def wait_for_all(detector: FailureDetector, timeout_s: float, failure: Callable[[], str | None] = lambda: None) -> None:
    """Wait until every rank has a heartbeat file in the run's folder.

    Args:
        failure: the error of a rank that ended before it wrote a heartbeat.

    Raises:
        PeerFailed: a rank that had started has ended.
        Stalled: not all ranks have started in time; names those that have not.
    """
    deadline = Deadline(
        WAITED_FOR, lambda: failure() or detector.find_gone(), timeout_s, peer_status=_Missing(detector)
    )
    while missing(detector):
        deadline.pause()


def missing(detector: FailureDetector) -> list[int]:
    """Ranks without a heartbeat file."""
    others = [rank for rank in range(detector.num_ranks) if rank != detector.rank]
    return [rank for rank in others if not (detector.folder / heartbeat_name(rank)).exists()]


@final
@dataclass(frozen=True, slots=True)
class _Missing:
    """Names the ranks that have not started."""

    detector: FailureDetector

    def note_wait(self, what: str) -> None:
        """Note that the calling thread waits for `what`."""
        self.detector.note_wait(what)

    def describe_absent(self, what: str | None) -> str:
        """`: rank 2 has not arrived`."""
        late = missing(self.detector)
        words = ", ".join(f"rank {rank} has not arrived" for rank in late[:MAX_NAMED])
        return f": {words}, and {len(late) - MAX_NAMED} others" if len(late) > MAX_NAMED else f": {words}"
