"""torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import LaunchError, Stalled
from workbench.gradients import block_bounds
from workbench.runtimes.transport import HOST_TIMES, Handle, Patience, Transport, pick_device, ranks_here

FAILURE_KEY = "workbench/failure"
NCCL_GRACE_S = 30.0
CLOSE_S = 5.0  # how long a rank that is done waits for the others before it gives its groups back
JOIN_S = 0.5  # for threads that wait in the library; one whose peer is gone stays


def join_process_group(rank: int, num_workers: int, store_path: str | None, timeout_s: float) -> bool:
    """Make the default process group if there is none: by a shared file, or as torchrun's environment says. True if made here."""
    if dist.is_initialized():
        return False
    backend = "nccl" if dist.is_nccl_available() and 0 < ranks_here(num_workers) <= torch.cuda.device_count() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        if store_path is not None:
            store = dist.FileStore(store_path, num_workers)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_workers, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"rank {rank} of {num_workers} could not join the torch.distributed group: {error}") from error
    return True


@final
class TorchTransport(Transport):
    """A rank of `among` (the default group), on groups of its own, so that nothing mixes with the user's calls."""

    def __init__(self, device: torch.device | None = None, timeout_s: float | None = None, among: dist.ProcessGroup | None = None) -> None:
        self.rank, self.num_workers = dist.get_rank(among), dist.get_world_size(among)
        self._ranks = dist.get_process_group_ranks(among or dist.group.WORLD)  # rank here -> rank of the default group
        self._store = dist.distributed_c10d._get_default_store()
        place = FAILURE_KEY if among is None else f"{FAILURE_KEY}/{'-'.join(map(str, self._ranks))}"
        run = (self._store.add(f"{place}/runs", 1) - 1) // self.num_workers  # all ranks are in the same run
        self._key = f"{place}/{run}"
        patience = Patience("all ranks to join the run", lambda: None, timeout_s)  # new_group itself would wait for half an hour
        while self._store.add(f"{place}/runs", 0) < (run + 1) * self.num_workers:
            patience.pause()
        self._backend = backend = dist.get_backend(among)
        self.device = device or (pick_device(self.rank) if backend == "nccl" else torch.device("cpu"))
        self.enter_thread()
        # NCCL's own limit comes after ours; gloo's would close connections that a late rank needs to hear why the others left.
        limit = timedelta(seconds=timeout_s + NCCL_GRACE_S) if backend == "nccl" and timeout_s is not None else None
        self._some: dict[str, Any] = (
            {} if among is None else {"ranks": self._ranks, "use_local_synchronization": True}
        )  # the others do not call it
        self._group = dist.new_group(backend=backend, timeout=limit, **self._some)
        self._host_group = self._group if backend == "gloo" else dist.new_group(backend="gloo", **self._some)
        self._limit = limit
        self._lanes = [dist.new_group(backend=backend, timeout=limit, **self._some)]  # lane -> its collectives' group
        self.library = f"torch.distributed {backend}"
        self.notes = [HOST_TIMES] if self.device.type == "cuda" else []
        if self.device.type == "cpu" and torch.cuda.is_available():
            here = f"{ranks_here(self.num_workers)} ranks and {torch.cuda.device_count()} GPUs on this host"
            self.notes.append(f"{here}: NCCL wants a GPU for each rank, so the ranks compute on the CPU and speak gloo")
        self._waiters = _Waiters()

    def open_lanes(self, num_lanes: int) -> None:
        while len(self._lanes) < num_lanes:
            self._lanes.append(dist.new_group(backend=self._backend, timeout=self._limit, **self._some))

    def all_reduce(self, flat: Tensor, patience: Patience) -> None:
        self._collective(dist.all_reduce(flat, group=self._group, async_op=True), flat).wait(patience)

    def start_all_reduce(self, flat: Tensor, *, always: bool = False) -> Handle | None:
        return self._collective(dist.all_reduce(flat, group=self._group, async_op=True), flat)

    def reduce_scatter(self, flat: Tensor, patience: Patience) -> None:
        bounds, table = self._table(flat)
        for block, row in enumerate(table):
            row[: bounds[block + 1] - bounds[block]].copy_(flat[bounds[block] : bounds[block + 1]])
        out = torch.empty_like(table[0])
        self._plain(dist.reduce_scatter_tensor(out, table.view(-1), group=self._group, async_op=True), out).wait(patience)
        flat[bounds[self.rank] : bounds[self.rank + 1]].copy_(out[: bounds[self.rank + 1] - bounds[self.rank]])

    def all_gather(self, flat: Tensor, patience: Patience) -> None:
        bounds, table = self._table(flat)
        mine = flat.new_zeros(table.shape[1])
        mine[: bounds[self.rank + 1] - bounds[self.rank]].copy_(flat[bounds[self.rank] : bounds[self.rank + 1]])
        self._plain(dist.all_gather_into_tensor(table.view(-1), mine, group=self._group, async_op=True), table).wait(patience)
        for block, row in enumerate(table):
            flat[bounds[block] : bounds[block + 1]].copy_(row[: bounds[block + 1] - bounds[block]])

    def _table(self, flat: Tensor) -> tuple[list[int], Tensor]:
        """Where blocks begin, and a (ranks, longest block) table: the library wants blocks of one length."""
        bounds = block_bounds(flat.numel(), self.num_workers)
        return bounds, flat.new_zeros(self.num_workers, bounds[1])

    def _plain(self, work: Any, flat: Tensor) -> Handle:
        """gloo reports the end of these only to a thread that waits for it."""
        return StreamHandle(work) if flat.is_cuda else self._waiters.watch(work, flat, self.rank)

    def broadcast(self, flat: Tensor, root: int, patience: Patience) -> None:
        self._collective(dist.broadcast(flat, self._ranks[root], group=self._group, async_op=True), flat).wait(patience)

    def barrier(self, patience: Patience) -> None:
        word = torch.zeros(1)
        WorkHandle(dist.all_reduce(word, group=self._host_group, async_op=True)).wait(patience)

    def _collective(self, work: Any, flat: Tensor) -> Handle:
        return StreamHandle(work) if flat.is_cuda else WorkHandle(work)

    def start_send(self, to: int, flat: Tensor, tag: int) -> Handle:
        host = flat.cpu()  # NCCL knows no tags and needs both ends in step: single messages go through the host
        return self._waiters.watch(dist.isend(host, self._ranks[to], group=self._host_group, tag=tag), host, to)

    def start_recv(self, source: int, flat: Tensor, tag: int) -> Handle:
        host = torch.empty_like(flat, device="cpu") if flat.is_cuda else flat
        work = dist.irecv(host, None if source < 0 else self._ranks[source], group=self._host_group, tag=tag)
        return self._waiters.watch(work, host, source, flat if flat.is_cuda else None)

    def gather_texts(self, text: str, patience: Patience) -> list[str]:
        encoded = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        lengths = torch.zeros(self.num_workers, dtype=torch.int64)
        lengths[self.rank] = len(encoded)
        WorkHandle(dist.all_reduce(lengths, group=self._host_group, async_op=True)).wait(patience)
        table = torch.zeros(self.num_workers, int(lengths.max()), dtype=torch.uint8)
        table[self.rank, : len(encoded)] = encoded
        WorkHandle(dist.all_reduce(table, group=self._host_group, async_op=True)).wait(patience)
        return [bytes(row[: int(length) - 1].tolist()).decode() for row, length in zip(table, lengths, strict=True)]

    def announce_failure(self, words: str) -> None:
        self._store.set(self._key, words[:4000])

    def peer_failure(self) -> str | None:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None

    def close(self) -> None:
        self._waiters.close()
        if self._all_came_to_the_end():  # a group whose peers may still use it, or hang in it, is left alone
            for group in {self._group, self._host_group, *self._lanes}:
                dist.destroy_process_group(group)

    def _all_came_to_the_end(self) -> bool:
        key = f"{self._key}/ended"
        patience = Patience("all ranks to leave the run", self.peer_failure, CLOSE_S)
        try:
            self._store.add(key, 1)
            while self._store.add(key, 0) < self.num_workers:
                patience.check()
                time.sleep(1e-4)
            return self.peer_failure() is None
        except (RuntimeError, Stalled):  # a peer failed (PeerFailed is a RuntimeError), or took the store with it
            return False

    def for_lane(self, lane: int) -> TorchTransport:
        other = object.__new__(TorchTransport)
        other.__dict__.update(self.__dict__)
        other._group = self._lanes[lane]
        return other


@final
class WorkHandle(Handle):
    """A collective on host memory: the library's own thread reports its end."""

    def __init__(self, work: Any) -> None:
        self.started_s = time.perf_counter()
        self._event = threading.Event()
        self._error: BaseException | None = None
        self._work = work
        work.get_future().add_done_callback(self._done)

    def _done(self, future: Any) -> None:
        self.finished_s = time.perf_counter()
        try:
            future.value()
        except RuntimeError as error:
            self._error = error
        self._event.set()

    def poll(self) -> bool:
        if self._event.is_set() and self._error is not None:
            raise self._error
        return self._event.is_set()

    def wait(self, patience: Patience) -> None:
        while not self._event.wait(0.1):
            patience.check()
        self.poll()


@final
class StreamHandle(Handle):
    """A collective on device memory. The host waits for it too: so it hears of a failed peer, and knows when it was done."""

    def __init__(self, work: Any) -> None:
        self.started_s = time.perf_counter()
        self._work = work

    def poll(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, patience: Patience) -> None:
        while not self.poll():
            patience.pause()
        self._work.wait()  # orders the stream, and raises what went wrong
        self.finished_s = time.perf_counter()


@final
class PointHandle(Handle):
    """A send or receive: gloo tells its end only to a thread that waits for it."""

    def __init__(self, work: Any, host: Tensor, peer: int, target: Tensor | None) -> None:
        self.started_s = time.perf_counter()
        self.source = peer
        self.event = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        self._host = host  # memory that the library still uses
        self._target = target  # device memory to copy it to

    def run(self) -> None:
        """Wait for it, on a waiter's thread."""
        try:
            self._work.wait()
            if self.source < 0:
                self.source = self._work.source_rank()
            if self._target is not None:
                self._target.copy_(self._host)
        except RuntimeError as error:
            self.error = error
        self.finished_s = time.perf_counter()
        self.event.set()

    def poll(self) -> bool:
        if self.event.is_set() and self.error is not None:
            raise self.error
        return self.event.is_set()

    def wait(self, patience: Patience) -> None:
        while not self.event.wait(0.1):
            patience.check()
        self.poll()


@final
class _Waiters:
    """Threads that wait for sends and receives: as many as were ever pending at once."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[PointHandle | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def watch(self, work: Any, host: Tensor, peer: int, target: Tensor | None = None) -> PointHandle:
        handle = PointHandle(work, host, peer, target)
        if not self._idle.acquire(blocking=False):
            self._threads.append(threading.Thread(target=self._run, name="workbench-waiter", daemon=True))
            self._threads[-1].start()
        self._tasks.put(handle)
        return handle

    def _run(self) -> None:
        while (handle := self._tasks.get()) is not None:
            handle.run()
            self._idle.release()

    def close(self) -> None:
        """End them; one that came back from the library while the interpreter ends would abort the process."""
        deadline = time.monotonic() + JOIN_S
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def failure_in_last_run() -> str | None:
    """What a failing rank announced in the last run of the default group that this process joined."""
    store = dist.distributed_c10d._get_default_store()
    key = f"{FAILURE_KEY}/{store.add(f'{FAILURE_KEY}/runs', 0) // dist.get_world_size() - 1}"
    return store.get(key).decode() if store.check([key]) else None
