"""A barrier for ranks on one host: each counts its arrivals in memory that all of them can read.

A short sum spends more time in a barrier of messages than in the sum. Here a rank writes one number and reads those of
the others. A rank that gives up takes its arrival back, which a posted `Ibarrier` cannot. Two ranks that give up within
the same microsecond may still disagree on whether all had arrived.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from typing import Any, final

from mpi4py import MPI

from workbench.errors import PeerFailed, Stalled
from workbench.runtimes.transport.base import Deadline

FOLDER = "/dev/shm"
LINE = 8  # numbers of 8 bytes in a cache line: each rank writes to its own line
PATH_BYTES = 256
NUM_READS = 20  # of another rank's counter, before the core is given to another thread


@final
class ArrivalCounters:
    """The counters of one communicator.

    Args:
        memory: the shared numbers (int64), a cache line for each rank.
    """

    def __init__(self, memory: memoryview, rank: int, num_ranks: int) -> None:
        self._counts = memory
        self._mine = rank * LINE
        self._others = tuple(other * LINE for other in range(num_ranks) if other != rank)
        self._number = 0

    def wait(self, deadline: Deadline) -> None:
        """Wait until all ranks have called it."""
        self._number = number = self._number + 1
        counts = self._counts
        counts[self._mine] = number
        try:
            missing = True
            while missing:
                for other in self._others:
                    if counts[other] < number and not self._comes_soon(other):
                        self._poll(other, deadline)
                # A rank may have taken its arrival back while this one waited for another.
                missing = any(counts[other] < number for other in self._others)
        except BaseException as error:
            if not self._give_up(number) and isinstance(error, PeerFailed | Stalled):
                return
            raise

    def _comes_soon(self, other: int) -> bool:
        """Return True if the rank arrives within a few reads."""
        return any(self._counts[other] >= self._number for _ in range(NUM_READS))

    def _poll(self, other: int, deadline: Deadline) -> None:
        while self._counts[other] < self._number:
            MPI.COMM_SELF.Iprobe()  # the rank may wait for a message of this one, which moves only inside MPI
            deadline.pause()

    def _give_up(self, number: int) -> bool:
        """Take the arrival back. Return False if all ranks have arrived: some may have passed the barrier."""
        self._counts[self._mine] = number - 1
        if any(self._counts[other] < number for other in self._others):
            self._number = number - 1
            return True
        self._counts[self._mine] = number
        return False


def shared_counters(communicator: Any, num: int) -> list[ArrivalCounters]:
    """Return the counters of `num` communicators of the same ranks; none if the ranks have no common memory.

    All ranks must call it at the same time.
    """
    rank, num_ranks = communicator.Get_rank(), communicator.Get_size()
    here = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    on_one_host = here.Get_size() == num_ranks
    here.Free()
    if not on_one_host:  # the same answer on all ranks
        return []
    num_bytes = num * num_ranks * LINE * 8
    path = bytearray(PATH_BYTES)
    memory = None
    if rank == 0:
        with suppress(OSError):
            memory, path = _create(num_bytes)
    communicator.Bcast([path, MPI.BYTE], 0)
    if rank != 0:
        with suppress(OSError):
            memory = _open(path, num_bytes)
    opened = bytearray([memory is not None])
    communicator.Allreduce(MPI.IN_PLACE, [opened, MPI.BYTE], MPI.BAND)
    if rank == 0:
        with suppress(OSError):
            os.unlink(_text(path))
    if not opened[0] or memory is None:
        return []
    numbers, size = memoryview(memory).cast("q"), num_ranks * LINE
    return [ArrivalCounters(numbers[start * size : (start + 1) * size], rank, num_ranks) for start in range(num)]


def _create(num_bytes: int) -> tuple[mmap.mmap, bytearray]:
    """Make the file, full of zeros; return its memory and its padded path."""
    handle, path = tempfile.mkstemp(prefix="workbench-", dir=FOLDER)
    try:
        os.posix_fallocate(handle, 0, num_bytes)  # `ftruncate` promises memory that a full file system lacks
        return mmap.mmap(handle, num_bytes), bytearray(path.encode().ljust(PATH_BYTES, b"\0"))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(handle)


def _open(path: bytearray, num_bytes: int) -> mmap.mmap:
    handle = os.open(_text(path), os.O_RDWR)
    try:
        return mmap.mmap(handle, num_bytes)
    finally:
        os.close(handle)


def _text(path: bytearray) -> str:
    return bytes(path).rstrip(b"\0").decode()
