"""The ranks of an MPI run admit a spare process in the place of a rank that left.

A process that is started later has no connection to an MPI world. So the spare processes are started with the ranks,
by the same `mpiexec`, and wait (`rank.spare`). While all processes are alive they make communicators of the ranks and
the first spares: one spare, two spares, and so on. `Shrink` of such a communicator gives one of the remaining ranks and
the spare that joins, also if some of them die meanwhile (User-Level Failure Mitigation).

The lowest rank decides whether the spare is there, and then all call `Shrink`: no call can be left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from mpi4py import MPI

from workbench.errors import PeerFailed, Stalled
from workbench.runtimes.liveness.deadline import Deadline, on_a_thread
from workbench.runtimes.liveness.membership import Membership, num_spares
from workbench.runtimes.transport import mpi
from workbench.runtimes.transport.mpi_fault_tolerant import shrunk
from workbench.runtimes.transport.mpi_requests import MpiHandle

NONE = "none"  # the lowest rank's decision if the spare is not there
FAILURES = (PeerFailed, Stalled, MPI.Exception)


def number_of_spare() -> int:
    """Return this process's number among the spare processes, from 1; 0 for a rank."""
    return max(0, 1 + MPI.COMM_WORLD.Get_rank() - (MPI.COMM_WORLD.Get_size() - num_spares()))


@cache
def communicators() -> list[Any]:
    """Return the communicator of all ranks, that of them and the first spare, that of them and two spares, and so on.

    All processes of the world call it first at the same time. Where this process is not a member, it is `COMM_NULL`.
    """
    world, spares = MPI.COMM_WORLD, num_spares()
    rank, size = world.Get_rank(), world.Get_size()
    sizes = range(size - spares, size + 1)
    return [world.Split(0 if rank < members else MPI.UNDEFINED, rank) for members in sizes]


def ranks_of_run(failure: Callable[[], str | None], timeout_s: float | None) -> Any:
    """Return the communicator of the ranks without the spare processes; `COMM_NULL` on a spare. All call it.

    Raises:
        PeerFailed: a process failed before it joined.
        Stalled: not all processes joined in time.
    """
    deadline = Deadline("all ranks and spare processes to join the run", failure, timeout_s)
    MpiHandle(MPI.COMM_WORLD.Ibarrier()).wait(deadline)  # Split has no time-out
    return communicators()[0]


def spare_transport(rank: int, timeout_s: float | None) -> mpi.MpiTransport:
    """Return the transport of a spare process that takes the place of `rank`: alone until `admit`."""
    transport = mpi.MpiTransport(MPI.COMM_SELF, timeout_s=timeout_s)
    transport._ranks = [rank]
    return transport


def admit(
    transport: mpi.MpiTransport,
    joining: int,
    place: str,
    ranks: list[int],
    deadline: Deadline,
    agreed: Callable[[bool], bool],
) -> bool:
    """Continue among these ranks, one of which is new, if all agree. Return whether they did.

    As `Transport.admit`, which `MpiTransport` does not have.

    Args:
        joining: the new rank.
        place: a name for this meeting alone.
        agreed: called with whether this rank has met the others; returns the decision of all.

    Raises:
        PeerFailed: the lowest rank left before it had decided.
    """
    members = transport.members
    assert members is not None
    number = _spare_that_comes(members, joining, place, ranks, deadline)
    me = transport._ranks[transport.rank]
    try:
        met = _meet(communicators()[number], me, len(ranks), deadline) if number else None
    except FAILURES:
        met = None
    if not agreed(met is not None) or met is None:
        return False
    _adopt(transport, met, me, ranks)
    return True


def _spare_that_comes(members: Membership, joining: int, place: str, ranks: list[int], deadline: Deadline) -> int:
    """Return the number of the spare process that all meet, as the lowest rank decides; 0 if none is there."""
    lowest = min(rank for rank in ranks if rank != joining)
    if members.rank == joining:
        members.put(f"{place}-spare", str(number_of_spare()))
    if members.rank == lowest:
        try:
            while (comes := members.text(f"{place}-spare", joining)) is None:
                deadline.pause()
        except (PeerFailed, Stalled):
            comes = NONE
        members.put(f"{place}-comes", comes)
    said = _text_of_lowest(members, f"{place}-comes", lowest)
    return 0 if said == NONE else int(said)


def _text_of_lowest(members: Membership, what: str, lowest: int) -> str:
    """Wait for a text of the lowest rank. Only its own end stops the wait: all ranks must follow what it decides."""

    def failure() -> str | None:
        return f"rank {lowest} has left" if members.has_left(lowest) else None

    deadline = Deadline("the lowest rank to meet the process that joins", failure, None)
    while (said := members.text(what, lowest)) is None:
        try:
            deadline.pause()
        except PeerFailed:
            said = members.text(what, lowest)  # it may have written before it left
            if said is None:
                raise
            break
    return said


def _meet(wide: Any, me: int, size: int, deadline: Deadline) -> list[Any]:
    """Return three communicators of the ranks, in the order of their original numbers `me`.

    Args:
        wide: a communicator of these ranks and of processes that have ended.

    Raises:
        PeerFailed: another rank has left meanwhile. All remaining ranks raise it.
    """
    (found,) = shrunk(wide, 1, size, deadline)
    ordered = None
    try:
        ordered = on_a_thread(partial(found.Split, 0, me), deadline.check)
    except FAILURES:
        found.Revoke()  # releases ranks that are still in the call
    try:
        if not found.Agree(int(ordered is not None)):
            raise PeerFailed("another rank left while the ranks met")
    except MPI.Exception as error:  # the same on all ranks
        raise PeerFailed("another rank left while the ranks met") from error
    return shrunk(ordered, 3, size, deadline)


def _adopt(transport: mpi.MpiTransport, met: list[Any], me: int, ranks: list[int]) -> None:
    """Let the transport continue on these communicators, as `MpiTransport.shrink` does.

    It sets the transport's private fields. It stands here because the records of measurements depend on the code of the
    transports (decisions/0043), and none of them replaces a rank.
    """
    transport._comm, transport._control, *transport._lanes = met  # all ranks open other lanes again
    transport._collectives, transport._failure, transport._announced = transport._comm, [], []
    transport._counters, transport._arrivals = [], None
    transport._ranks, transport.rank, transport.num_workers = ranks, ranks.index(me), len(ranks)
