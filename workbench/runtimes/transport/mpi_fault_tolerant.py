"""Fault-tolerant MPI: ranks that survive a killed one (User-Level Failure Mitigation, in Open MPI 5)."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from workbench.errors import PeerFailed
from workbench.runtimes.liveness.deadline import Deadline, on_a_thread
from workbench.runtimes.liveness.membership import ENDS_ALONE

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
