"""What went wrong on a rank, as one error that the notebook can raise."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ipyparallel import error as ipp_error

from workbench import errors
from workbench.clusters.spawn import RankFailed
from workbench.errors import WorkbenchError

CONNECTION = re.compile(r"Connection (reset|closed) by peer|Connection refused")  # gloo's words, on ranks whose peer died
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def first_cause(failed: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """The rank that failed by itself, and its error; those that only left because of it come last, lost processes before them."""

    def order(rank: int) -> tuple[int, int]:
        return consequence(failed[rank]), rank

    rank = min(failed, key=order)
    return rank, failed[rank]


def consequence(error: BaseException) -> int:
    """0 for a rank's own failure; 1 for a process that is gone; 2 for a rank that was told of another's end, or saw its connection end."""
    kind = getattr(error, "ename", "")
    if kind == "RuntimeError" and CONNECTION.search(str(getattr(error, "evalue", ""))):
        return 2
    return {"PeerFailed": 2, "EngineError": 1}.get(kind, 0)


def local_error(rank: int, error: BaseException, last_words: str) -> WorkbenchError:
    """The rank's error in words for the caller, of the same class if it is one of `workbench.errors`.

    The remote traceback is a note on it: shown with a traceback, absent from the message.

    Args:
        last_words: what the engines wrote last, for a process that is gone.
    """
    if not isinstance(error, ipp_error.RemoteError):
        return RankFailed(f"rank {rank}: {type(error).__name__}: {error}")
    if error.ename == "EngineError":
        return RankFailed(
            f"rank {rank}'s process is gone: killed (out of memory?), or crashed in native code. "
            f"Its world cannot train on without it: heal() the cluster, or start a new one.{last_words}"
        )
    if error.ename == "KeyboardInterrupt":
        return RankFailed(f"rank {rank} was interrupted, and the run ended with it; the ranks can train again")
    kind = getattr(errors, error.ename, None)
    if isinstance(kind, type) and issubclass(kind, WorkbenchError):
        found = kind(f"rank {rank}: {error.evalue}")
    else:
        found = RankFailed(f"rank {rank} failed: {error.ename}: {error.evalue}")
    found.add_note(f"Traceback on rank {rank}:\n{COLOURS.sub('', error.traceback or 'none was sent')}")
    return found
