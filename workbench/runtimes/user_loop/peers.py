"""Ranks of a loop of the user's own, which has no run's folder, know of each other all the same, where they share a machine."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.liveness.failure_detector import FailureDetector, read_heartbeat, state_of
from workbench.runtimes.transport.base import Transport


def watch_peers(owner: Any, transport: Transport, timeout_s: float | None, *, announces: bool) -> FailureDetector | None:
    """This rank's presence, in a temporary folder of rank 0's name; every rank calls it. None for one process on its own.

    Which step a rank was at that is gone, its peers know to a second, for it keeps no record.

    Args:
        owner: with whose end, or the process's in order, the rank leaves.
        announces: whether a rank that is gone is told to all as soon as it is seen (an MPI's launcher ends all); else who asks is told.
    """
    if transport.num_workers == 1:
        return None
    name = tempfile.mkdtemp(prefix="workbench-ranks-") if transport.rank == 0 else ""
    folder = Path(transport.gather_texts(name, Deadline("all ranks to begin", transport.peer_failure, timeout_s))[0])
    folder.mkdir(parents=True, exist_ok=True)  # on another machine, one that nobody else sees
    tells = announces and transport.library.startswith("torch")
    detector = FailureDetector(folder, transport.rank, transport.num_workers, transport.announce_failure if tells else None)
    weakref.finalize(owner, stop_watching, detector)  # else who ends without a word would be taken for one that was killed
    return detector.__enter__()


def stop_watching(detector: FailureDetector | None, words: str = "") -> None:
    """Leave in order, if one is there, and say why if that is before the end; the last takes the folder away."""
    if detector is None:
        return
    detector.leave(words)
    rows = [read_heartbeat(detector.folder, rank) for rank in range(detector.num_ranks)]
    if all(row is None or state_of(row) == "gone" for row in rows):
        shutil.rmtree(detector.folder, ignore_errors=True)


@contextmanager
def translated_errors(fail: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Where the block fails, raise what `fail` makes of it."""
    try:
        yield
    except BaseException as error:
        cause = fail(error)
        if cause is error:
            raise
        raise cause from error
