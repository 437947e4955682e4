"""MPI through mpi4py, directly on tensor memory.

Every wait can be interrupted: a collective first passes a non-blocking barrier that is polled, so that all ranks are
known to be there before the library's own (fast, blocking) collective is entered.

Where Open MPI was started with fault tolerance (User-Level Failure Mitigation, MPI Forum), a rank that is killed ends what it took part
in with an error, on some of the others; one of them revokes the communicators, which lets the rest go, and all shrink them.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from workbench.errors import LaunchError, PeerFailed
from workbench.gradients import block_bounds
from workbench.runtimes.transport.base import HOST_TIMES, Deadline, Handle, Transport, pick_device
from workbench.runtimes.transport.mpi_fault_tolerant import is_fault_tolerant, shrunk
from workbench.runtimes.transport.mpi_finalize import bound_finalize
from workbench.runtimes.transport.mpi_requests import MpiHandle, buffer_of
from workbench.units import MIB

FAILURE_TAG, ARRIVAL_TAG = 7, 8
LONG_BYTES = 16 * MIB  # of a call before which ranks meet twice
_UNFREED: list[MpiTransport] = []  # those that were not closed by all ranks together
_JOINING: dict[int, MpiHandle] = {}  # communicator -> its barrier that was begun


@final
class MpiTransport(Transport):
    """A rank of an MPI communicator.

    CUDA tensors go through pinned host memory unless the MPI library says that it takes device pointers.
    """

    def __init__(
        self,
        communicator: Any = None,
        device: torch.device | None = None,
        timeout_s: float | None = None,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        parent = MPI.COMM_WORLD if communicator is None else communicator
        if communicator is None:
            _refuse_to_be_alone()
        _join(parent, Deadline("all ranks to join the run", failure, timeout_s))  # Dup itself would wait for ever
        self._comm = parent.Dup()
        self._lanes = [parent.Dup()]  # lane -> its collectives' communicator
        self._control = parent.Dup()
        self.rank, self.num_workers = self._comm.Get_rank(), self._comm.Get_size()
        self._ranks = list(range(self.num_workers))  # as they were numbered at first
        self.device = device or pick_device(self.rank)
        self.enter_thread()
        self.library = MPI.Get_library_version().split(",")[0].strip()
        self.notes = [HOST_TIMES] if self.device.type == "cuda" else []
        self._staged = self.device.type == "cuda" and not is_cuda_aware()
        if self._staged:
            self.notes.append(f"{self.library} does not take CUDA pointers: tensors are staged through pinned host memory")
        self._threads = self.has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.can_shrink = self._threads and is_fault_tolerant()  # whoever looks for the others does so on a thread
        if not self._threads:
            self.notes.append(f"{self.library} was built without MPI_THREAD_MULTIPLE: background work waits for the foreground")
        self._failure: list[str] = []  # shared with the lane's transport: each peer's words come once, to whichever thread looks first
        self._announced: list[Any] = []
        self._last_words = ""  # that were announced
        self._arrived: dict[int, dict[int, str]] = {}  # number of a barrier -> rank -> what it said there
        self._said: list[Any] = []  # what this rank said, until it was received
        self._collectives = self._comm
        self._bound = False  # its peers count on this rank for a call that they could not leave
        _UNFREED.append(self)

    @property
    def bound(self) -> bool:
        return self._bound

    def open_lanes(self, num_lanes: int) -> None:
        while len(self._lanes) < num_lanes:
            self._lanes.append(self._comm.Dup())

    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        with self._together(deadline, flat.nbytes):
            host = self._to_host(flat)
            self._collectives.Allreduce(MPI.IN_PLACE, buffer_of(host), MPI.SUM)
            self._from_host(flat, host)

    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        if self._threads and not always:
            return None  # MPI moves bytes only inside MPI calls, so a lane thread makes them
        host = self._to_host(flat)
        return MpiHandle(self._lanes[0].Iallreduce(MPI.IN_PLACE, buffer_of(host), MPI.SUM), lambda: self._from_host(flat, host))

    def reduce_scatter(self, flat: Tensor, deadline: Deadline) -> None:
        with self._together(deadline, flat.nbytes):
            host = self._to_host(flat)
            counts, start = self._blocks(flat)
            mine = torch.empty(counts[self.rank], dtype=flat.dtype)
            self._collectives.Reduce_scatter(buffer_of(host), buffer_of(mine), counts, MPI.SUM)
            flat[start[self.rank] : start[self.rank] + counts[self.rank]].copy_(mine)

    def all_gather(self, flat: Tensor, deadline: Deadline) -> None:
        with self._together(deadline, flat.nbytes):
            host = self._to_host(flat)
            counts, start = self._blocks(flat)
            memory, _, kind = buffer_of(host)
            self._collectives.Allgatherv(MPI.IN_PLACE, [memory, counts, start, kind])
            self._from_host(flat, host)

    def _blocks(self, flat: Tensor) -> tuple[list[int], list[int]]:
        bounds = block_bounds(flat.numel(), self.num_workers)
        return [bounds[block + 1] - bounds[block] for block in range(self.num_workers)], bounds[:-1]

    def broadcast(self, flat: Tensor, root: int, deadline: Deadline) -> None:
        with self._together(deadline, flat.nbytes):
            host = self._to_host(flat)
            self._collectives.Bcast(buffer_of(host), root)
            self._from_host(flat, host)

    def barrier(self, deadline: Deadline) -> None:
        request = self._collectives.Ibarrier()
        if not request.Test():  # looked at before a handle is made, for short sums
            MpiHandle(request).wait(deadline)

    def _together(self, deadline: Deadline, num_bytes: int = 0) -> _Together:
        return _Together(self, deadline, num_bytes)

    def gather_here(self, deadline: Deadline, num_bytes: int) -> None:
        """All ranks are here for a call that none can leave before all have made it: who has come to the barrier must make it too,

        and who comes to it after another has left all the same must not.
        """
        self._bound = True
        self.barrier(deadline)
        words = self.peer_failure()
        if words is not None:
            raise PeerFailed(words)
        if num_bytes >= LONG_BYTES:
            # To ask for words moves messages too, those of who is in the call already: MPICH then copies them once more.
            self.barrier(deadline)
            if self._failure:  # heard meanwhile, by this thread or another: who spoke does not come
                raise PeerFailed(self._failure[0])

    def end_call(self) -> None:
        """The call has been made, or never will be."""
        self._bound = False

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        host = self._to_host(flat)
        return MpiHandle(self._comm.Issend(buffer_of(host), to, tag), keep=host)

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        host = torch.empty_like(flat, device="cpu") if self._staged else flat
        request = self._comm.Irecv(buffer_of(host), MPI.ANY_SOURCE if source < 0 else source, tag)

        def came() -> None:
            self._from_host(flat, host)
            # Its sender waits for a word that it came. Over Open MPI's TCP that goes with the next call, which may be long in coming.
            MPI.COMM_SELF.Iprobe()

        return MpiHandle(request, came)

    def gather_texts(self, text: str, deadline: Deadline) -> list[str]:
        if self.members is not None:
            texts = self.members.gather_texts(text, deadline)
            return [texts[rank] for rank in self._ranks]
        with self._together(deadline):
            mine = np.frombuffer(text.encode(), np.uint8)  # as bytes: `allgather` would unpickle what a peer says
            lengths = np.empty(self.num_workers, np.int64)
            self._comm.Allgather(np.array([len(mine)], np.int64), lengths)
            everything = np.empty(int(lengths.sum()), np.uint8)
            self._comm.Allgatherv(mine, (everything, lengths.tolist()))
            return [part.tobytes().decode() for part in np.split(everything, np.cumsum(lengths)[:-1])]

    def announce_failure(self, words: str) -> None:
        payload, self._last_words = words.encode()[:4000], words
        for peer in range(self.num_workers):
            if peer != self.rank:
                with suppress(MPI.Exception) if self.can_shrink else nullcontext():  # it is gone itself
                    self._announced.append(self._control.Isend([payload, MPI.BYTE], peer, FAILURE_TAG))

    def arrive(self, number: int, text: str) -> None:
        self._arrived.setdefault(number, {})[self.rank] = text
        payload = f"{number} {text}".encode()
        self._said = [request for request in self._said if not request.Test()]
        for peer in range(self.num_workers):
            if peer != self.rank:
                with suppress(MPI.Exception) if self.can_shrink else nullcontext():  # it is gone itself
                    self._said.append(self._control.Isend([payload, MPI.BYTE], peer, ARRIVAL_TAG))

    def arrivals(self, number: int, text: str) -> tuple[int, tuple[int, str] | None]:
        with suppress(MPI.Exception) if self.can_shrink else nullcontext():
            while (message := self._control.Improbe(MPI.ANY_SOURCE, ARRIVAL_TAG, status := MPI.Status())) is not None:
                payload = bytearray(status.Get_count(MPI.BYTE))
                message.Recv([payload, MPI.BYTE])
                which, _, said = payload.decode(errors="replace").partition(" ")
                self._arrived.setdefault(int(which), {})[status.Get_source()] = said
        self._arrived.pop(number - 1, None)
        rows = self._arrived.get(number, {})
        other = next(((rank, said) for rank, said in list(rows.items()) if said != text), None)
        return len(rows), other

    def peer_failure(self) -> str | None:
        if not self._failure and (words := self._words()) is not None:
            self._failure.append(words)
        if self._failure or self.members is None:
            return self._failure[0] if self._failure else None
        return self.members.failure()

    def _words(self) -> str | None:
        """That a peer has sent."""
        try:
            message = self._control.Improbe(MPI.ANY_SOURCE, FAILURE_TAG, status := MPI.Status())
        except MPI.Exception:
            if not self.can_shrink:
                raise
            self._control.Ack_failed()  # until a death is acknowledged, nobody can be asked for words of any rank
            return None
        if message is None:
            return None
        payload = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([payload, MPI.BYTE])
        return payload.decode(errors="replace")

    def abandon(self) -> None:
        for communicator in (self._comm, *self._lanes):
            if not communicator.Is_revoked():
                communicator.Revoke()

    def shrink(self, ranks: list[int], place: Path, deadline: Deadline) -> None:
        me = self._ranks[self.rank]
        self._comm, self._control, *self._lanes = shrunk(self._comm, 3, len(ranks), deadline)  # all open the other lanes anew
        self._collectives, self._failure, self._announced = self._comm, [], []
        self._ranks, self.rank, self.num_workers = ranks, ranks.index(me), len(ranks)

    def for_lane(self, lane: int) -> MpiTransport:
        other = object.__new__(MpiTransport)
        other.__dict__.update(self.__dict__)
        other._collectives = self._lanes[lane]
        return other

    def why_unfreed(self) -> str:
        """Why this rank's process ends before all ranks have closed the transport."""
        return self._last_words or (self._failure[0] if self._failure else "it left its run before the others")

    def close(self) -> None:
        if self.members is not None:
            self.members.leave()
            if self.members.gone:
                return
        if not self._failure and not self._announced:  # freeing is collective: only when all ranks come here
            for communicator in (self._comm, *self._lanes, self._control):
                communicator.Free()
            _UNFREED.pop()

    def _to_host(self, flat: Tensor) -> Tensor:
        if not self._staged:
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()  # MPI reads the memory now, not in stream order
            return flat
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=torch.cuda.is_available())
        return host.copy_(flat)

    def _from_host(self, flat: Tensor, host: Tensor) -> None:
        if host is not flat:
            flat.copy_(host)


@final
class _Together:
    """A block in which all ranks make a call; a class of its own, since a generator's takes as long again as a short sum."""

    __slots__ = ("_deadline", "_num_bytes", "_transport")

    def __init__(self, transport: MpiTransport, deadline: Deadline, num_bytes: int) -> None:
        self._transport, self._deadline, self._num_bytes = transport, deadline, num_bytes

    def __enter__(self) -> None:
        try:
            self._transport.gather_here(self._deadline, self._num_bytes)
        except BaseException:
            self._transport.end_call()
            raise

    def __exit__(self, *_: object) -> None:
        self._transport.end_call()


def _bound_finalize() -> None:
    if _UNFREED:
        transport = _UNFREED[-1]
        bound_finalize(transport.rank, transport.why_unfreed())


atexit.register(_bound_finalize)  # when this module is imported, so that it runs after what the user registers later


def _join(communicator: Any, deadline: Deadline) -> None:
    """Until all ranks are here. A barrier to which not all came is the next run's: whoever did not come to it comes to it there."""
    key = communicator.py2f()
    if key not in _JOINING:
        _JOINING[key] = MpiHandle(communicator.Ibarrier())
    _JOINING[key].wait(deadline)
    del _JOINING[key]


def _refuse_to_be_alone() -> None:
    """A rank started by one MPI's launcher with another MPI's library sees a world of one, without any error."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        started = int(os.environ.get(name, 0))
        if started and started != MPI.COMM_WORLD.Get_size():
            library = MPI.Get_library_version().split(",")[0].strip()
            raise LaunchError(
                f"{started} ranks were started, but this one sees {MPI.COMM_WORLD.Get_size()}: the launcher and {library}, "
                "which mpi4py loads, do not belong together. Use the mpiexec of that library, or name the other's in MPI4PY_LIBMPI. "
                "Under srun: --mpi=pmix for Open MPI and --mpi=pmi2 for MPICH"
            )


def is_cuda_aware() -> bool:
    """Whether this process's MPI library says that it takes device pointers (MPIX_Query_cuda_support)."""
    import ctypes

    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())  # the library is visible through mpi4py only
    except (AttributeError, OSError):
        return False
