"""MPI's ranks that outlive one of them (User-Level Failure Mitigation of the MPI Forum, in Open MPI 5)."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from workbench.errors import PeerFailed
from workbench.runtimes.liveness.deadline import Deadline, on_a_thread
from workbench.runtimes.liveness.membership import ENDS_ALONE

FAULT_TOLERANCE = ("OMPI_MCA_mpi_ft_enable", f"OMPI_MCA_{ENDS_ALONE}")  # set by Open MPI's launcher where it was asked for both


def is_fault_tolerant() -> bool:
    """Whether this process's MPI goes on, and comes to its end, when one of its ranks is killed: Open MPI's, asked by its mpiexec's

    `FAULT_TOLERANT` (and not by the first half of it: the fence in MPI_Finalize may wait for the rank that is gone, open-mpi/ompi#9434).
    """
    return all(os.environ.get(name, "") in ("1", "true") for name in FAULT_TOLERANCE) and hasattr(MPI.Comm, "Shrink")


def shrunk(communicator: Any, number: int, size: int, deadline: Deadline) -> list[Any]:
    """So many communicators of those that remain of one; all of them call it.

    Args:
        size: how many they are, as they have agreed.

    Raises:
        PeerFailed: another has left meanwhile; all that remain are told so.
    """

    def check() -> None:
        with suppress(PeerFailed):  # one more has left: the library finds it out by itself, and all that remain come to the same end
            deadline.check()

    made = on_a_thread(lambda: [communicator.Shrink() for _ in range(number)], check)
    if any(each.Get_size() != size for each in made):
        raise PeerFailed("another rank has left while those that remain met")
    for each in made:
        each.Set_errhandler(MPI.ERRORS_RETURN)
    return made
