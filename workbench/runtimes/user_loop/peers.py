"""Failure detection for user-written training loops, which have no run folder. Works for ranks on one machine."""

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


def watch_peers(
    owner: Any, transport: Transport, timeout_s: float | None, *, announces: bool
) -> FailureDetector | None:
    """Start this rank's failure detector, in a temporary folder that rank 0 names.

    Every rank must call it. None for one process. A loop has no record, so peers know the step of a dead rank only from
    its last heartbeat.

    Args:
        owner: the rank leaves when this object is collected, or when the process ends in an orderly way.
        announces: announce a dead rank to all ranks as soon as it is detected; else only when a rank asks. On MPI the
            launcher ends all ranks anyway.
    """
    if transport.num_workers == 1:
        return None
    name = tempfile.mkdtemp(prefix="workbench-ranks-") if transport.rank == 0 else ""
    folder = Path(transport.gather_texts(name, Deadline("all ranks to begin", transport.peer_failure, timeout_s))[0])
    folder.mkdir(parents=True, exist_ok=True)  # on another machine this folder is private
    tells = announces and transport.library.startswith("torch")
    detector = FailureDetector(
        folder, transport.rank, transport.num_workers, transport.announce_failure if tells else None
    )
    weakref.finalize(owner, stop_watching, detector)  # else an orderly end would look like a kill
    return detector.__enter__()


def stop_watching(detector: FailureDetector | None, reason: str = "") -> None:
    """Leave in an orderly way; `reason` says why if it is before the end. The last rank removes the folder."""
    if detector is None:
        return
    detector.leave(reason)
    rows = [read_heartbeat(detector.folder, rank) for rank in range(detector.num_ranks)]
    if all(row is None or state_of(row) == "gone" for row in rows):
        shutil.rmtree(detector.folder, ignore_errors=True)


@contextmanager
def translated_errors(fail: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """If the block raises, raise the error that `fail` returns for it."""
    try:
        yield
    except BaseException as error:
        cause = fail(error)
        if cause is error:
            raise
        raise cause from error
