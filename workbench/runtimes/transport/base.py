"""The port between the interpreter and a communication library: what a library must do, and no more."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.runtimes.liveness.deadline import SPINS as SPINS
from workbench.runtimes.liveness.deadline import Deadline as Deadline
from workbench.streams import Streams, streams_of
from workbench.trace.processes import BOOT_ID

if TYPE_CHECKING:
    from workbench.runtimes.liveness.membership import Membership

CLOCK_TAG = 30_000  # above the interpreter's tags
HOST_TIMES = "on a GPU the spans of the timeline show when the host asked for the work, not when the device did it"


class Handle(ABC):
    """An operation in progress in the library."""

    started_s: float  # time.perf_counter
    finished_s: float | None = None

    @abstractmethod
    def poll(self) -> bool:
        """Return True if it is complete.

        Makes progress where the library needs that, and raises the operation's error.
        """

    @abstractmethod
    def wait(self, deadline: Deadline) -> None:
        """Wait until it is complete."""

    def abandon(self) -> None:  # noqa: B027 - nothing to do for most
        """Wait for it no more, and keep its memory if the library may still use it."""

    def wait_inside(self, deadline: Deadline) -> None:
        """Wait until it is complete, on a thread with no other duty, because it may block in the library."""
        self.wait(deadline)


class Transport(ABC):
    """One rank's endpoint of a communication library. Tensors are 1-D, contiguous, on `device`, and used in place.

    Four operations raise `NotImplementedError` where there is nothing to do them with. Before the call, ask for

    - `shrink`: `can_shrink`,
    - `admit`: `can_admit` (for MPI, `elastic.mpi_admission` does it),
    - `arrive` and `arrivals`: `num_workers > 1`.
    """

    rank: int
    num_workers: int
    device: torch.device
    library: str  # name and version, for the record
    has_threads = True  # whether several threads of a rank may use it at once
    sums_from_threads = True  # whether several threads of a rank may begin sums, each on its own lane
    notes: list[str]  # warnings for the user: staging, missing thread support
    outlives_peers = False  # whether messages between other ranks continue when a rank's process ends
    can_shrink = False  # whether the remaining ranks can then continue as fewer (`shrink`)
    can_admit = False  # whether `admit` lets another rank in
    members: Membership | None = None  # which ranks take part, if the run continues without some

    @property
    def may_lose_peers(self) -> bool:
        """Return True if the run continues after some departures, so that messages to such a rank are dropped."""
        return self.members is not None and any(self.members.losable)

    @cached_property
    def streams(self) -> Streams:
        """The streams of this rank's device."""
        return streams_of(self.device)

    @abstractmethod
    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        """Sum over ranks, on the calling thread."""

    @abstractmethod
    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        """Begin a sum in the background; None where the library makes no progress by itself (a lane's thread then
        blocks).

        Args:
            always: begin it in the library even then.
        """

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, deadline: Deadline) -> None:
        """Sum over ranks; each rank gets its own block of `gradients.block_bounds`."""

    @abstractmethod
    def all_gather(self, flat: Tensor, deadline: Deadline) -> None:
        """Send each rank's own block to all."""

    @abstractmethod
    def broadcast(self, flat: Tensor, root: int, deadline: Deadline) -> None:
        """Copy the root's tensor to all."""

    @abstractmethod
    def barrier(self, deadline: Deadline) -> None:
        """Wait until all ranks have called it."""

    @abstractmethod
    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        """Begin to send; `flat` must not change before the handle is complete."""

    @abstractmethod
    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        """Begin to receive into `flat`; the handle's `source` is the sender."""

    @abstractmethod
    def gather_texts(self, text: str, deadline: Deadline) -> list[str]:
        """Every rank's text, in order of rank."""

    @abstractmethod
    def announce_failure(self, reason: str) -> None:
        """Report to all ranks, out of band, that this rank fails; never blocks."""

    @abstractmethod
    def peer_failure(self) -> str | None:
        """What a failing peer announced; None if none did."""

    def arrive(self, number: int, text: str) -> None:
        """Report, out of band, that this rank has reached barrier `number` with call `text`; never blocks."""
        raise NotImplementedError(f"{self.library} has no barrier {number} for {text!r}")

    def arrivals(self, number: int, text: str) -> tuple[int, tuple[int, str] | None]:
        """Number of ranks that reached it with that text, and one (rank, text) with another text, or None."""
        raise NotImplementedError(f"{self.library} has no barrier {number} for {text!r}")

    @property
    def bound(self) -> bool:
        """Return True if peers are in a call that they cannot leave without this thread: an interrupt should wait."""
        return False

    def unusable(self) -> str:
        """Why the library cannot be used any more, and the fix; "" if it can."""
        return ""

    def enter_thread(self) -> None:
        """Select this rank's GPU on the calling thread: CUDA's current device is per thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def num_lanes(self) -> int:
        """Number of open lanes."""
        return 1

    def open_lanes(self, num_lanes: int) -> None:  # noqa: B027 - most libraries need nothing
        """Open lanes of collectives in addition to the foreground's. Every rank must call it."""

    def for_lane(self, lane: int) -> Transport:
        """The transport for a lane's thread. Its collectives do not mix with those of the calling thread."""
        return self

    def abandon(self) -> None:  # noqa: B027 - most libraries need nothing
        """A rank has left, so operations in progress will not end.

        Release threads that wait in the library, on every remaining rank.
        """

    @property
    def in_flight(self) -> bool:
        """Return True if an operation is in progress in the library, or a thread waits in it."""
        return False

    def abort_waits(self) -> None:  # noqa: B027 - most libraries need nothing
        """Make every wait in the library return at once, with an error, at the end of the process."""

    def shrink(self, ranks: list[int], place: Path, deadline: Deadline) -> None:
        """Continue with these ranks alone, renumbered in this order.

        Each of them must call it. They meet at `place`, a new file.
        """
        raise NotImplementedError(f"{self.library} cannot continue with ranks {ranks} alone")

    def admit(self, ranks: list[int], place: Path, deadline: Deadline, agreed: Callable[[bool], bool]) -> bool:
        """Continue among these ranks, one of which is new, if all agree. Returns whether they did.

        Ranks keep their numbers, or, where members shrink, are numbered in this order.

        Args:
            agreed: called with whether this rank has met the others; returns the decision of all.
        """
        raise NotImplementedError(f"{self.library} cannot continue among ranks {ranks}")

    def close(self) -> None:  # noqa: B027 - most libraries need nothing
        """Release what this run took from the library. The process group itself belongs to the launcher."""


class _Done(Handle):
    """An operation with nothing to do."""

    def __init__(self) -> None:
        self.started_s = self.finished_s = time.perf_counter()

    def poll(self) -> bool:
        return True

    def wait(self, deadline: Deadline) -> None:
        """It is complete."""


class SoloTransport(Transport):
    """One process: every sum is the value itself."""

    def __init__(self) -> None:
        self.rank, self.num_workers = 0, 1
        self.device = pick_device(0)
        self.library = "none (one process)"
        self.notes = []

    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        """Wait until the value is computed, as every transport does."""
        self.streams.finish()

    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        self.streams.finish()
        return _Done()

    def reduce_scatter(self, flat: Tensor, deadline: Deadline) -> None:
        """Do nothing: there is no other rank."""

    def all_gather(self, flat: Tensor, deadline: Deadline) -> None:
        """Do nothing: there is no other rank."""

    def broadcast(self, flat: Tensor, root: int, deadline: Deadline) -> None:
        """Do nothing: there is no other rank."""

    def barrier(self, deadline: Deadline) -> None:
        """Do nothing: there is no other rank."""

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        raise ValueError("one process has no rank to send to")

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        raise ValueError("one process has no rank to receive from")

    def gather_texts(self, text: str, deadline: Deadline) -> list[str]:
        return [text]

    def announce_failure(self, reason: str) -> None:
        """Do nothing: there is no other rank."""

    def peer_failure(self) -> str | None:
        return None


def offset_to_rank0(transport: Transport, deadline: Deadline, rounds: int = 16) -> float:
    """Seconds to add to this rank's `time.perf_counter` to get rank 0's. Every rank must call it.

    0 for a rank that reads rank 0's clock: on Linux, the ranks of a machine share one. Rank 0 answers the others one
    after the other, and the fastest round trip of each counts (Cristian 1989).
    """
    clocks = transport.gather_texts(name_of_clock(), deadline)
    others = [rank for rank in range(1, transport.num_workers) if clocks[rank] != clocks[0] or not clocks[0]]
    word = torch.zeros(1, dtype=torch.float64)
    if transport.rank == 0:
        for peer in others:
            for _ in range(rounds):
                transport.start_recv(peer, word, CLOCK_TAG).wait(deadline)
                word[0] = time.perf_counter()
                transport.start_send(peer, word, CLOCK_TAG).wait(deadline)
    if transport.rank not in others:
        return 0.0
    best = (float("inf"), 0.0)
    for _ in range(rounds):
        before = time.perf_counter()
        transport.start_send(0, word, CLOCK_TAG).wait(deadline)
        transport.start_recv(0, word, CLOCK_TAG).wait(deadline)
        after = time.perf_counter()
        best = min(best, (after - before, float(word[0]) - (before + after) / 2))
    return best[1]


def name_of_clock() -> str:
    """Name of the clock of `time.perf_counter`, equal for processes that share it; "" if it is not known.

    On Linux, all processes of one start of a machine share it, unless they are in different time namespaces.
    """
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    return ""


def local_rank(environment: Any = os.environ) -> int | None:
    """This rank's number on its host, from its launcher's environment; None if the environment does not say it."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"):
        if name in environment:
            return int(environment[name])
    return None


def ranks_here(num_workers: int, environment: Mapping[str, str] = os.environ) -> int:
    """Number of ranks on this host, from the launcher's environment; all ranks if the environment does not say it.

    >>> ranks_here(5, {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "1"})
    2
    """
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if name in environment:
            return int(environment[name])
    if environment.get("SLURM_STEP_NUM_TASKS") == str(num_workers) and "SLURM_NODEID" in environment:  # srun's ranks
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        return [int(number) for number, times in parts for _ in range(int(times or 1))][
            int(environment["SLURM_NODEID"])
        ]
    return num_workers


def pick_device(rank: int) -> torch.device:
    """This rank's GPU by its local rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    here = local_rank()
    return torch.device("cuda", (rank if here is None else here) % torch.cuda.device_count())
