"""torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import ConfigError, LaunchError, Stalled
from workbench.gradients import block_bounds
from workbench.runtimes.transport.base import HOST_TIMES, Deadline, Handle, Transport, pick_device, ranks_here
from workbench.runtimes.transport.fault_tolerant import AnyHandle, PeerHandle
from workbench.runtimes.transport.torch_groups import GroupRendezvous
from workbench.runtimes.transport.torch_handles import (
    JOIN_S,
    PendingWorks,
    StreamHandle,
    WaiterThreads,
    close_connections,
    wait_inside,
)
from workbench.units import MIB

FAILURE_KEY = "workbench/failure"
NCCL_GRACE_S = 30.0
LONG_BYTES, LONG_PARTS = 16 * MIB, 2  # gloo leaves gaps between the steps of a long sum; two halves fill them
CLOSE_S = 5.0  # how long a finished rank waits for the others before it destroys its groups


def join_process_group(rank: int, num_workers: int, store_path: str | None, timeout_s: float) -> bool:
    """Make the default process group if there is none, by a shared file or torchrun's environment.

    Returns whether it was made.

    Raises:
        LaunchError: the ranks did not find each other.
    """
    if dist.is_initialized():
        return False
    timeout = timedelta(seconds=timeout_s)
    try:
        if store_path is not None:
            store = dist.FileStore(store_path, num_workers)
        else:
            store, rank, num_workers = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        backend = agreed_backend(dist.PrefixStore("workbench/gpu", store), rank, num_workers, own_gpu(rank))
        dist.init_process_group(
            backend, store=dist.PrefixStore("default_pg", store), rank=rank, world_size=num_workers, timeout=timeout
        )
    except (ValueError, RuntimeError) as error:
        raise LaunchError(
            f"rank {rank} of {num_workers} could not join the torch.distributed group: {error}. Check MASTER_ADDR, that "
            "MASTER_PORT is free, and that the hosts reach each other"
        ) from error
    return True


def own_gpu(rank: int) -> str:
    """Identifier of this rank's GPU; "" if it has none that NCCL can use."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return ""
    return str(torch.cuda.get_device_properties(pick_device(rank)).uuid)


def agreed_backend(store: dist.Store, rank: int, num_workers: int, gpu: str) -> str:
    """ "nccl" if each rank has its own GPU, else "gloo". All ranks must call it, and get the same answer.

    The number of visible GPUs does not decide: a launcher may show each rank only its own GPU (`srun
    --gpus-per-task=1`).
    """
    store.set(str(rank), gpu)
    if not gpu:
        return "gloo"
    gpus = [store.get(str(peer)).decode() for peer in range(num_workers)]
    return "nccl" if all(gpus) and len(set(gpus)) == num_workers else "gloo"


def backend_of(group: dist.ProcessGroup | None) -> str:
    """Backend of this rank's tensors.

    A group that was made without a backend's name has one for each kind of device.
    """
    named = str(dist.get_backend(group))
    if named in ("gloo", "nccl"):
        return named
    has_nccl = "nccl" in str(dist.get_backend_config(group))
    return "nccl" if has_nccl and torch.cuda.is_available() else "gloo"


@final
class TorchTransport(Transport):
    """A rank of the group `among` (None: the default group).

    It uses its own groups, so nothing mixes with the user's calls.
    """

    can_admit = True

    def __init__(
        self,
        device: torch.device | None = None,
        timeout_s: float | None = None,
        among: dist.ProcessGroup | None = None,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._on_default_group = True
        self.rank, self.num_workers = dist.get_rank(among), dist.get_world_size(among)
        # Rank in `among` -> rank of the default group.
        self._ranks = dist.get_process_group_ranks(among or dist.group.WORLD)
        self._store = dist.distributed_c10d._get_default_store()
        place = FAILURE_KEY if among is None else f"{FAILURE_KEY}/{'-'.join(map(str, self._ranks))}"
        run = (self._store.add(f"{place}/runs", 1) - 1) // self.num_workers  # equal on all ranks
        self._key = f"{place}/{run}"
        deadline = Deadline("all ranks to join the run", failure, timeout_s)  # new_group itself waits half an hour
        try:
            while int(self._store.get(f"{place}/runs")) < (run + 1) * self.num_workers:
                deadline.pause()
        except BaseException:
            self._store.add(f"{place}/runs", -1)  # not joined: else ranks would count their next run differently
            raise
        self._backend = backend = backend_of(among)
        self.sums_from_threads = backend != "nccl"
        self.device = device or (pick_device(self.rank) if backend == "nccl" else torch.device("cpu"))
        self.enter_thread()
        # NCCL's limit comes after ours. A limit on gloo would close connections that a late rank needs to learn why
        # others left.
        limit = timedelta(seconds=timeout_s + NCCL_GRACE_S) if backend == "nccl" and timeout_s is not None else None
        # Ranks outside `among` do not call it
        self._some: dict[str, Any] = {} if among is None else {"ranks": self._ranks, "use_local_synchronization": True}
        self._limit, self._timeout_s = limit, timeout_s
        self._meeting: GroupRendezvous | None = None  # makes groups after ranks have left or joined
        self._numbers: list[int] | None = None  # position in a group -> rank, if they differ
        self._groups = self._new_groups()
        self._host_group = self._groups[0] if backend == "gloo" else dist.new_group(backend="gloo", **self._some)
        self._lanes = [self._new_groups()]  # lane -> its collectives' groups
        self.library = f"torch.distributed {backend}"
        self.notes = [HOST_TIMES] if self.device.type == "cuda" else []
        if self.device.type == "cpu" and torch.cuda.is_available():
            here = f"{ranks_here(self.num_workers)} ranks and {torch.cuda.device_count()} GPUs on this host"
            self.notes.append(f"{here}: NCCL needs a GPU for each rank, so the ranks compute on the CPU and use gloo")
        self._waiters = WaiterThreads()
        self._works = PendingWorks()
        self.outlives_peers = self.can_shrink = backend == "gloo" and among is None
        # (tag, bytes) -> receives from each rank, where one from any rank fails.
        self._fans: dict[tuple[int, int], Any] = {}

    @classmethod
    def join_later(cls, rank: int, num_workers: int, num_lanes: int, timeout_s: float) -> TorchTransport:
        """The transport of a rank that joins a running gloo run: without groups until `admit`."""
        self = object.__new__(cls)
        self._on_default_group = False
        self.rank, self.num_workers, self._ranks = rank, num_workers, list(range(num_workers))
        self._store, self._key = dist.HashStore(), FAILURE_KEY  # until `admit`, it cannot announce a failure
        self._backend, self.device, self._some, self._limit, self._timeout_s = (
            "gloo",
            torch.device("cpu"),
            {},
            None,
            timeout_s,
        )
        self._meeting, self._numbers, self._groups, self._lanes = None, None, [], [[] for _ in range(max(1, num_lanes))]
        self.library, self.notes, self.outlives_peers, self.can_shrink = "torch.distributed gloo", [], True, True
        self._waiters, self._fans, self._works = WaiterThreads(), {}, PendingWorks()
        return self

    def unusable(self) -> str:
        if not self._on_default_group or dist.is_initialized():
            return ""
        return (
            "the default process group was destroyed while this rank was training: call "
            "torch.distributed.destroy_process_group() "
            "after the Trainer's `with` block, or after finish(), on every rank"
        )

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def open_lanes(self, num_lanes: int) -> None:
        while len(self._lanes) < num_lanes:
            self._lanes.append(self._new_groups())

    def _new_groups(self) -> list[dist.ProcessGroup]:
        """One group; on gloo `LONG_PARTS` groups, for the parts of long sums."""
        parts = LONG_PARTS if self._backend == "gloo" else 1
        if self._meeting is not None:
            return self._meeting.groups(parts, Deadline("the ranks that remain", self.peer_failure, self._timeout_s))
        return [dist.new_group(backend=self._backend, timeout=self._limit, **self._some) for _ in range(parts)]

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[0]

    def all_reduce(self, flat: Tensor, deadline: Deadline) -> None:
        self._check_type(flat)
        parts = flat.tensor_split(len(self._groups)) if flat.nbytes >= LONG_BYTES else (flat,)
        begun = [
            dist.all_reduce(part, group=group, async_op=True) for part, group in zip(parts, self._groups, strict=False)
        ]
        for work in begun:
            self._wait(work, flat, deadline)

    def _check_type(self, flat: Tensor) -> None:
        if flat.dtype == torch.int16:
            raise ConfigError(
                f"{self._backend} cannot sum 16-bit integers: use SharedInt(bits=8) or SharedInt(bits=32), "
                "or sum them over Send and Recv: Once(codec=SharedInt(bits=16), inner=Ring())"
            )

    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        self._check_type(flat)
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        return StreamHandle(work) if flat.is_cuda else self._works.watch(work)

    def reduce_scatter(self, flat: Tensor, deadline: Deadline) -> None:
        bounds, table = self._table(flat)
        for block, row in enumerate(table):
            row[: bounds[block + 1] - bounds[block]].copy_(flat[bounds[block] : bounds[block + 1]])
        out = torch.empty_like(table[0])
        self._plain(dist.reduce_scatter_tensor(out, table.view(-1), group=self._group, async_op=True), out).wait(
            deadline
        )
        flat[bounds[self.rank] : bounds[self.rank + 1]].copy_(out[: bounds[self.rank + 1] - bounds[self.rank]])

    def all_gather(self, flat: Tensor, deadline: Deadline) -> None:
        bounds, table = self._table(flat)
        mine = flat.new_zeros(table.shape[1])
        mine[: bounds[self.rank + 1] - bounds[self.rank]].copy_(flat[bounds[self.rank] : bounds[self.rank + 1]])
        self._plain(dist.all_gather_into_tensor(table.view(-1), mine, group=self._group, async_op=True), table).wait(
            deadline
        )
        for block, row in enumerate(table):
            flat[bounds[block] : bounds[block + 1]].copy_(row[: bounds[block + 1] - bounds[block]])

    def _table(self, flat: Tensor) -> tuple[list[int], Tensor]:
        """Bounds of the blocks, and a (ranks, longest block) table, because the library needs blocks of one length."""
        bounds = block_bounds(flat.numel(), self.num_workers)
        return bounds, flat.new_zeros(self.num_workers, bounds[1])

    def _plain(self, work: Any, flat: Tensor) -> Handle:
        """A handle. gloo reports the completion of these only to a thread that waits."""
        return StreamHandle(work) if flat.is_cuda else self._waiters.watch(work, flat, self.rank)

    def broadcast(self, flat: Tensor, root: int, deadline: Deadline) -> None:
        self._wait(dist.broadcast(flat, self._ranks[root], group=self._group, async_op=True), flat, deadline)

    def barrier(self, deadline: Deadline) -> None:
        group = self._group if self._backend == "gloo" else self._host_group  # on gloo, the lane's own
        wait_inside(dist.all_reduce(torch.zeros(1), group=group, async_op=True), deadline)

    def _wait(self, work: Any, flat: Tensor, deadline: Deadline) -> None:
        """Wait on the calling thread for a work that it began."""
        if flat.is_cuda:
            StreamHandle(work).wait(deadline)
        else:
            wait_inside(work, deadline)

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        host = self._to_host(flat)  # NCCL has no tags and orders messages: single messages go through the host

        def begin() -> Handle:
            return self._waiters.watch(dist.isend(host, self._ranks[to], group=self._host_group, tag=tag), host, to)

        return PeerHandle(self.members, to, begin) if self.members is not None and self.may_lose_peers else begin()

    def _to_host(self, flat: Tensor) -> Tensor:
        """The values in host memory. Waits for the calling thread's stream only."""
        if not flat.is_cuda:
            return flat
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        host.copy_(flat, non_blocking=True)
        self.streams.finish()
        return host

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        if self.members is None or not self.may_lose_peers:
            return self._start_recv(source, flat, tag)
        if source >= 0:
            return PeerHandle(self.members, source, lambda: self._start_recv(source, flat, tag))
        fan = self._fans.setdefault((tag, flat.nbytes), {})
        return AnyHandle(self.members, flat, lambda rank, memory: self._start_recv(rank, memory, tag), fan)

    def _start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True) if flat.is_cuda else flat
        work = dist.irecv(host, None if source < 0 else self._ranks[source], group=self._host_group, tag=tag)
        return self._waiters.watch(work, host, source, flat if flat.is_cuda else None, self._numbers)

    def gather_texts(self, text: str, deadline: Deadline) -> list[str]:
        if self.members is not None:
            texts = self.members.gather_texts(text, deadline)
            return [texts[rank] for rank in self._ranks]
        encoded = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        lengths = torch.zeros(self.num_workers, dtype=torch.int64)
        lengths[self.rank] = len(encoded)
        wait_inside(dist.all_reduce(lengths, group=self._host_group, async_op=True), deadline)
        table = torch.zeros(self.num_workers, int(lengths.max()), dtype=torch.uint8)
        table[self.rank, : len(encoded)] = encoded
        wait_inside(dist.all_reduce(table, group=self._host_group, async_op=True), deadline)
        return [bytes(row[: int(length) - 1].tolist()).decode() for row, length in zip(table, lengths, strict=True)]

    def shrink(self, ranks: list[int], place: Path, deadline: Deadline) -> None:
        self._lanes = self._lanes[:1]  # ranks may have opened different numbers of other lanes: all open them again
        self._adopt(*self._make_groups(ranks, place, deadline))
        self._number(ranks)

    def admit(self, ranks: list[int], place: Path, deadline: Deadline, agreed: Callable[[bool], bool]) -> bool:
        try:
            met = self._make_groups(ranks, place, deadline)
        except (RuntimeError, Stalled):  # PeerFailed is a RuntimeError
            met = None
        if not agreed(met is not None) or met is None:
            return False
        self._adopt(*met)
        if self.members is not None and self.members.shrinks:
            self._number(ranks)
        else:
            self._numbers = ranks
        return True

    def _number(self, ranks: list[int]) -> None:
        """Renumber the ranks in this order."""
        self._ranks, self.rank, self.num_workers = ranks, ranks.index(self._ranks[self.rank]), len(ranks)

    def _make_groups(
        self, ranks: list[int], place: Path, deadline: Deadline
    ) -> tuple[GroupRendezvous, list[dist.ProcessGroup]]:
        """New groups among these ranks."""
        meeting = GroupRendezvous(place, self._ranks[self.rank], ranks, self._timeout_s)
        return meeting, meeting.groups((1 + len(self._lanes)) * LONG_PARTS, deadline)

    def _adopt(self, meeting: GroupRendezvous, groups: list[dist.ProcessGroup]) -> None:
        pairs = [groups[start : start + LONG_PARTS] for start in range(0, len(groups), LONG_PARTS)]
        self._groups, self._lanes, self._host_group = pairs[0], pairs[1:], pairs[0][0]
        self._meeting, self._store, self._key, self._fans = meeting, meeting.store, FAILURE_KEY, {}

    def announce_failure(self, reason: str) -> None:
        with suppress(RuntimeError):  # the process that holds the store is gone
            self._store.set(self._key, reason[:4000])

    def arrive(self, number: int, text: str) -> None:
        # A text that differs from the first is kept too: the rank that wrote the first may have left and not check
        # again.
        key, mine = f"{self._key}/barrier-{number}", f"{self.rank} {text}"
        first = self._store.compare_set(key, "", mine).decode()
        if first.partition(" ")[2] != text:
            self._store.set(f"{key}/other", mine)
        self._store.add(f"{key}/{text}", 1)

    def arrivals(self, number: int, text: str) -> tuple[int, tuple[int, str] | None]:
        key = f"{self._key}/barrier-{number}"
        if not self._store.check([key]):
            return 0, None
        said = [key, f"{key}/other"] if self._store.check([f"{key}/other"]) else [key]
        for rank, _, words in (self._store.get(place).decode().partition(" ") for place in said):
            if words != text:
                return 0, (int(rank), words)
        return self._store.add(f"{key}/{text}", 0), None

    def peer_failure(self) -> str | None:
        if self._store.check([self._key]):
            return self._store.get(self._key).decode()
        return None if self.members is None else self.members.failure()

    def close(self) -> None:
        self._waiters.close()
        if self._meeting is None and self._all_have_finished():  # else peers may still use the groups, or hang in them
            for group in self._all_groups():
                with suppress(ValueError):  # the user destroyed the default group, and so all groups
                    dist.destroy_process_group(group)
        elif self._backend == "nccl":
            for group in self._all_groups() - {self._host_group}:
                abort(group)
        if self.members is not None:
            self.members.leave()

    def _all_groups(self) -> set[dist.ProcessGroup]:
        return {self._host_group, *self._groups, *(group for groups in self._lanes for group in groups)}

    @property
    def in_flight(self) -> bool:
        return self._works.pending() or bool(self._waiters.busy)

    def abort_waits(self) -> None:
        if self._backend != "gloo":
            return
        for group in self._all_groups():
            close_connections(group, self.rank, self.num_workers)
        self._works.wait(JOIN_S)
        self._waiters.close()

    def _all_have_finished(self) -> bool:
        if self.members is not None and self.members.departures(now=True):
            return False
        key = f"{self._key}/ended"
        deadline = Deadline("all ranks to leave the run", self.peer_failure, CLOSE_S)
        try:
            self._store.add(key, 1)
            # `get`, because `add(key, 0)` makes a file store longer.
            while int(self._store.get(key)) < self.num_workers:
                deadline.check()
                time.sleep(1e-4)
            return self.peer_failure() is None
        except (RuntimeError, Stalled):  # a peer failed (PeerFailed is a RuntimeError), maybe the one with the store
            return False

    def for_lane(self, lane: int) -> TorchTransport:
        other = object.__new__(TorchTransport)
        other.__dict__.update(self.__dict__)
        other._groups = self._lanes[lane]
        return other


def abort(group: dist.ProcessGroup) -> None:
    """Abort NCCL's operations in a group that lost a rank.

    Else torch's watchdog would end this process minutes later.
    """
    ends = getattr(dist.distributed_c10d, "_abort_process_group", None)  # of torch 2.6 and newer
    if ends is not None:
        with suppress(RuntimeError, ValueError):  # it is gone already
            ends(group)


def failure_in_last_run() -> str | None:
    """The failure that a rank announced in this process's last run on the default group; None if none did."""
    store = dist.distributed_c10d._get_default_store()
    key = f"{FAILURE_KEY}/{store.add(f'{FAILURE_KEY}/runs', 0) // dist.get_world_size() - 1}"
    return store.get(key).decode() if store.check([key]) else None
