"""Fault-tolerant MPI: ranks that survive a killed one (User-Level Failure Mitigation, in Open MPI 5)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import torch
from mpi4py import MPI
from torch import Tensor

from workbench.errors import PeerFailed
from workbench.runtimes.liveness.deadline import Deadline, on_a_thread
from workbench.runtimes.liveness.membership import ENDS_ALONE, Membership
from workbench.runtimes.transport.base import Handle
from workbench.runtimes.transport.fault_tolerant import check_departure
from workbench.runtimes.transport.mpi_requests import MpiHandle

# Set by Open MPI's launcher if both options were given.
FAULT_TOLERANCE = ("OMPI_MCA_mpi_ft_enable", f"OMPI_MCA_{ENDS_ALONE}")


def is_fault_tolerant() -> bool:
    """Return True if this process's MPI continues, and can end, after a rank was killed.

    True for Open MPI 5 under `mpiexec` with all of `FAULT_TOLERANT`. Without its second half the fence in MPI_Finalize
    may wait for the dead rank (open-mpi/ompi#9434).
    """
    return all(os.environ.get(name, "") in ("1", "true") for name in FAULT_TOLERANCE) and hasattr(MPI.Comm, "Shrink")


def shrunk(communicator: Any, number: int, size: int, deadline: Deadline) -> list[Any]:
    """Make new communicators of a communicator's remaining ranks. All remaining ranks call it.

    Args:
        number: how many communicators.
        size: number of remaining ranks, as they have agreed.

    Raises:
        PeerFailed: another rank has left meanwhile. All remaining ranks raise it.
    """

    def check() -> None:
        with suppress(PeerFailed):  # the library notices one more departure by itself, on all remaining ranks
            deadline.check()

    made = on_a_thread(lambda: [communicator.Shrink() for _ in range(number)], check)
    if any(each.Get_size() != size for each in made):
        raise PeerFailed("another rank left while the remaining ranks met")
    for each in made:
        each.Set_errhandler(MPI.ERRORS_RETURN)
    return made


def matched(communicator: Any, tag: int, status: MPI.Status) -> Any:
    """Match a message of any rank, for its `Irecv` or `Recv`; None if there is none. `status` gets its sender."""
    try:
        return communicator.Improbe(MPI.ANY_SOURCE, tag, status)
    except MPI.Exception as error:
        if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            raise
        communicator.Ack_failed()  # before a death is acknowledged, a probe of any rank fails
        return None


@final
class MatchedReceive(Handle):
    """A receive from any rank that may leave. A message is matched before its receive begins, so its sender is known.

    A posted receive from any rank would never complete if it took a message whose sender was killed before the end of
    the message: Open MPI then reports no error.

    Args:
        receive: (memory, buffer -> request) -> a receive into the memory.
    """

    def __init__(
        self,
        members: Membership,
        communicator: Any,
        tag: int,
        flat: Tensor,
        receive: Callable[[Tensor, Callable[[list[Any]], Any]], MpiHandle],
    ) -> None:
        self.started_s = time.perf_counter()
        self.source = -1
        self._members, self._communicator, self._tag = members, communicator, tag
        self._flat, self._memory, self._receive = flat, flat, receive
        self._inner: MpiHandle | None = None
        self._error: RuntimeError | None = None
        self._failed_s = 0.0

    @property
    def num_bytes(self) -> int | None:
        """Length of the received message."""
        return None if self._inner is None else self._inner.num_bytes

    def poll(self) -> bool:
        if self.finished_s is not None:
            return True
        if self._inner is None:
            self._match()
        if self._inner is None or not self._has_come(self._inner):
            return False
        if self._memory is not self._flat:
            self._flat.copy_(self._memory)
        self.finished_s = time.perf_counter()
        return True

    def _match(self) -> None:
        check_departure(self._members, self._error, self._failed_s, None)
        message = matched(self._communicator, self._tag, status := MPI.Status())
        if message is not None:
            self.source = status.Get_source()
            self._inner = self._receive(self._memory, message.Irecv)

    def _has_come(self, inner: MpiHandle) -> bool:
        """Return True if the message is complete. If its sender has left before its end, wait for another one."""
        has_left = self._members.has_left(self.source)
        try:
            if inner.poll():
                return True
        except RuntimeError as error:
            self._error, self._failed_s = self._error or error, time.monotonic()
        else:
            if not has_left:
                return False
            inner.abandon()
        self._inner, self._memory = None, torch.empty_like(self._flat)
        return False

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            deadline.pause()
