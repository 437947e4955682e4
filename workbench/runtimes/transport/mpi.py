"""MPI through mpi4py, directly on tensor memory.

Every wait can be interrupted. Before the library's fast, blocking collective, ranks poll a non-blocking barrier, or
counters in shared memory. Then all ranks have arrived.

With Open MPI's fault tolerance (User-Level Failure Mitigation, MPI Forum), operations with a killed rank end with an
error on some ranks. One of them revokes the communicators, which releases the others, and all shrink them.
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
from workbench.runtimes.transport.fault_tolerant import PeerHandle
from workbench.runtimes.transport.mpi_arrivals import shared_counters
from workbench.runtimes.transport.mpi_fault_tolerant import MatchedReceive, is_fault_tolerant, matched, shrunk
from workbench.runtimes.transport.mpi_finalize import bound_finalize
from workbench.runtimes.transport.mpi_requests import MpiHandle, buffer_of
from workbench.units import MIB

FAILURE_TAG, ARRIVAL_TAG = 7, 8
LONG_BYTES = 16 * MIB  # a collective of this size or more has a second barrier before it
NUM_COUNTED = 16  # communicators with counters of arrivals: the foreground's and those of the first lanes
_UNFREED: list[MpiTransport] = []  # not closed by all ranks together: their communicators still exist
_JOINING: dict[int, MpiHandle] = {}  # communicator -> its barrier in progress


@final
class MpiTransport(Transport):
    """A rank of an MPI communicator.

    CUDA tensors go through pinned host memory unless the MPI library accepts device pointers.
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
            _check_not_alone()
        _join(parent, Deadline("all ranks to join the run", failure, timeout_s))  # Dup has no time-out
        self._comm = parent.Dup()
        self._lanes = [parent.Dup()]  # lane -> its collectives' communicator
        self._control = parent.Dup()
        self.rank, self.num_workers = self._comm.Get_rank(), self._comm.Get_size()
        self._ranks = list(range(self.num_workers))  # their numbers at the start of the run
        self.device = device or pick_device(self.rank)
        self.enter_thread()
        self.library = MPI.Get_library_version().split(",")[0].strip()
        self.notes = [HOST_TIMES] if self.device.type == "cuda" else []
        self._staged = self.device.type == "cuda" and not is_cuda_aware()
        if self._staged:
            self.notes.append(
                f"{self.library} does not take CUDA pointers: tensors are staged through pinned host memory"
            )
        self._threads = self.has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        # The failure detector uses a thread.
        self.outlives_peers = self.can_shrink = self._threads and is_fault_tolerant()
        if not self._threads:
            self.notes.append(
                f"{self.library} was built without MPI_THREAD_MULTIPLE: background work waits for the foreground"
            )
        self._failure: list[str] = []  # shared with the lanes' transports: an announcement arrives once
        self._announced: list[Any] = []
        self._last_failure = ""  # announced by this rank
        self._arrived: dict[int, dict[int, str]] = {}  # number of a barrier -> rank -> the call that it reported
        self._arrival_sends: list[Any] = []  # requests of this rank's reports that no peer has received yet
        self._collectives = self._comm
        self._counters = shared_counters(self._comm, NUM_COUNTED)  # foreground, lane 0, lane 1, ...
        self._arrivals = self._counters[0] if self._counters else None
        self._bound = False  # True while peers depend on a call of this rank that they cannot leave
        _UNFREED.append(self)

    @property
    def bound(self) -> bool:
        return self._bound

    def open_lanes(self, num_lanes: int) -> None:
        while len(self._lanes) < num_lanes:
            self._lanes.append(self._comm.Dup())

    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        self._bound = True  # as `_BlockingCollective`, without its microsecond
        try:
            self.gather_here(deadline, flat.nbytes)
            host = self._to_host(flat)
            self._collectives.Allreduce(MPI.IN_PLACE, buffer_of(host), MPI.SUM)
            self._from_host(flat, host)
        finally:
            self._bound = False

    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        if self._threads and not always:
            return None  # MPI moves bytes only inside MPI calls, so a lane thread makes them
        host = self._to_host(flat)
        return MpiHandle(
            self._lanes[0].Iallreduce(MPI.IN_PLACE, buffer_of(host), MPI.SUM), lambda: self._from_host(flat, host)
        )

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
        if not request.Test():  # before a handle is made, for short sums
            MpiHandle(request).wait(deadline)

    def _together(self, deadline: Deadline, num_bytes: int = 0) -> _BlockingCollective:
        return _BlockingCollective(self, deadline, num_bytes)

    def gather_here(self, deadline: Deadline, num_bytes: int) -> None:
        """Wait until all ranks are here for a blocking call.

        A rank that has passed the barrier must make the call. A rank that arrives after a failure must not make it.
        """
        self._bound = True
        if self._arrivals is not None and num_bytes < LONG_BYTES and self.members is None:
            self._arrivals.wait(deadline)  # a rank that fails has taken its arrival back
            return
        self.barrier(deadline)
        reason = self.peer_failure()
        if reason is not None:
            raise PeerFailed(reason)
        if num_bytes >= LONG_BYTES:
            # Polling for announcements also moves messages of ranks that are in the call already; MPICH copies these
            # once more.
            self.barrier(deadline)
            if self._failure:  # the failed rank will not make the call
                raise PeerFailed(self._failure[0])

    def end_call(self) -> None:
        """Note that the blocking call has ended, or will not be made."""
        self._bound = False

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        host = self._to_host(flat)

        def begin() -> Handle:
            return MpiHandle(self._comm.Issend(buffer_of(host), to, tag), keep=host)

        return PeerHandle(self.members, to, begin) if self.members is not None and self.may_lose_peers else begin()

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        if self.members is None or not self.may_lose_peers:
            return self._start_recv(source, flat, tag)
        if source >= 0:
            return PeerHandle(self.members, source, lambda: self._start_recv(source, flat, tag))
        return MatchedReceive(self.members, self._comm, tag, flat, self._received)

    def _start_recv(self, source: int, flat: Tensor, tag: int) -> MpiHandle:
        anyone = MPI.ANY_SOURCE if source < 0 else source
        return self._received(flat, lambda buffer: self._comm.Irecv(buffer, anyone, tag))

    def _received(self, flat: Tensor, begin: Callable[[list[Any]], Any]) -> MpiHandle:
        """Return a receive into `flat`. `begin` takes a buffer, and returns the request."""
        host = torch.empty_like(flat, device="cpu") if self._staged else flat
        request = begin(buffer_of(host))

        def came() -> None:
            self._from_host(flat, host)
            # The sender waits for an acknowledgement. Over Open MPI's TCP it goes out with the next MPI call, which may
            # come late.
            MPI.COMM_SELF.Iprobe()

        return MpiHandle(request, came)

    def gather_texts(self, text: str, deadline: Deadline) -> list[str]:
        if self.members is not None:
            texts = self.members.gather_texts(text, deadline)
            return [texts[rank] for rank in self._ranks]
        with self._together(deadline):
            mine = np.frombuffer(text.encode(), np.uint8)  # as bytes: `allgather` would unpickle a peer's data
            lengths = np.empty(self.num_workers, np.int64)
            self._comm.Allgather(np.array([len(mine)], np.int64), lengths)
            everything = np.empty(int(lengths.sum()), np.uint8)
            self._comm.Allgatherv(mine, (everything, lengths.tolist()))
            return [part.tobytes().decode() for part in np.split(everything, np.cumsum(lengths)[:-1])]

    def announce_failure(self, reason: str) -> None:
        payload, self._last_failure = reason.encode()[:4000], reason
        if self.can_shrink and not self._failure:
            self._failure.append(reason)  # of two ranks, the one that remains hears it from nobody else
        for peer in range(self.num_workers):
            if peer != self.rank:
                with suppress(MPI.Exception) if self.can_shrink else nullcontext():  # that peer is gone
                    self._announced.append(self._control.Isend([payload, MPI.BYTE], peer, FAILURE_TAG))

    def arrive(self, number: int, text: str) -> None:
        self._arrived.setdefault(number, {})[self.rank] = text
        payload = f"{number} {text}".encode()
        self._arrival_sends = [request for request in self._arrival_sends if not request.Test()]
        for peer in range(self.num_workers):
            if peer != self.rank:
                with suppress(MPI.Exception) if self.can_shrink else nullcontext():  # that peer is gone
                    self._arrival_sends.append(self._control.Isend([payload, MPI.BYTE], peer, ARRIVAL_TAG))

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
        if not self._failure and (reason := self._received_failure()) is not None:
            self._failure.append(reason)
        if self._failure or self.members is None:
            return self._failure[0] if self._failure else None
        return self.members.failure()

    def _received_failure(self) -> str | None:
        """A failure that a peer has sent; None if none has."""
        status = MPI.Status()
        if self.can_shrink:
            message = matched(self._control, FAILURE_TAG, status)
        else:
            message = self._control.Improbe(MPI.ANY_SOURCE, FAILURE_TAG, status)
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
        # All ranks open other lanes again.
        self._comm, self._control, *self._lanes = shrunk(self._comm, 3, len(ranks), deadline)
        self._collectives, self._failure, self._announced = self._comm, [], []
        self._counters, self._arrivals = [], None
        self._ranks, self.rank, self.num_workers = ranks, ranks.index(me), len(ranks)

    def for_lane(self, lane: int) -> MpiTransport:
        other = object.__new__(MpiTransport)
        other.__dict__.update(self.__dict__)
        other._collectives = self._lanes[lane]
        other._arrivals = self._counters[1 + lane] if 1 + lane < len(self._counters) else None
        return other

    def why_unfreed(self) -> str:
        """Why this rank's process ends without a collective close."""
        return self._last_failure or (self._failure[0] if self._failure else "it left its run before the others")

    def close(self) -> None:
        if self.members is not None:
            self.members.leave()
            if self.members.gone:
                return
        if not self._failure and not self._announced:  # freeing is collective: only if all ranks come here
            for communicator in (self._comm, *self._lanes, self._control):
                communicator.Free()
            _UNFREED.pop()

    def _to_host(self, flat: Tensor) -> Tensor:
        if not self._staged:
            if flat.is_cuda:
                # MPI reads the memory at once, not in stream order.
                torch.cuda.current_stream(flat.device).synchronize()
            return flat
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=torch.cuda.is_available())
        return host.copy_(flat)

    def _from_host(self, flat: Tensor, host: Tensor) -> None:
        if host is not flat:
            flat.copy_(host)


@final
class _BlockingCollective:
    """A context around a blocking collective.

    A class, because a generator's context manager takes as long as a short sum.
    """

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


atexit.register(_bound_finalize)  # registered at import, so that it runs after the user's own functions


def _join(communicator: Any, deadline: Deadline) -> None:
    """Wait until all ranks are here. The next run completes a barrier that not all ranks reached."""
    key = communicator.py2f()
    if key not in _JOINING:
        _JOINING[key] = MpiHandle(communicator.Ibarrier())
    _JOINING[key].wait(deadline)
    del _JOINING[key]


def _check_not_alone() -> None:
    """Raise if launcher and library belong to different MPIs: each rank would silently be alone in its world."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        started = int(os.environ.get(name, 0))
        if started and started != MPI.COMM_WORLD.Get_size():
            library = MPI.Get_library_version().split(",")[0].strip()
            raise LaunchError(
                f"{started} ranks were started, but this one sees {MPI.COMM_WORLD.Get_size()}: the launcher and "
                f"{library}, "
                "which mpi4py loads, do not belong together. Use the mpiexec of that library, or set MPI4PY_LIBMPI to "
                "the "
                "launcher's library. "
                "Under srun: --mpi=pmix for Open MPI and --mpi=pmi2 for MPICH"
            )


def is_cuda_aware() -> bool:
    """Return True if this process's MPI library accepts device pointers (MPIX_Query_cuda_support)."""
    import ctypes

    try:
        return bool(ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support())  # the library is visible only through mpi4py
    except (AttributeError, OSError):
        return False
