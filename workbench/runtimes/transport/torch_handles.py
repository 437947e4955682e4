"""Handles for the `Work` objects of torch.distributed, one class for each way to report completion."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.runtimes.transport.base import Deadline, Handle

CHECK_INTERVAL = timedelta(seconds=0.1)  # between two checks for failed peers
CUT_TAG = 31_000  # no rank sends with it
JOIN_S = 0.5  # for threads that wait in the library; one whose peer is gone never returns


def wait_inside(work: Any, deadline: Deadline) -> None:
    """Wait for a collective on host memory, in the library, which wakes this thread directly."""
    while True:
        over = work.is_completed()  # read before the wait: then an error is the work's own, and no time-out
        try:
            work.wait(CHECK_INTERVAL)
        except RuntimeError:
            if over:
                raise
            deadline.check()
        else:
            return


@final
class WorkHandle(Handle):
    """A collective on host memory: the library's thread reports its completion."""

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
        done = self._event.is_set()  # read once: the error is set before
        if done and self._error is not None:
            raise self._error
        return done

    def wait(self, deadline: Deadline) -> None:
        while not self._event.wait(0.1):
            deadline.check()
        self.poll()


@final
class PendingWorks:
    """gloo's collectives in progress.

    They call Python at their end, which must not happen while the interpreter ends.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakSet[WorkHandle] = weakref.WeakSet()  # a work holds its handle until it completes

    def watch(self, work: Any) -> WorkHandle:
        handle = WorkHandle(work)
        self._handles.add(handle)
        return handle

    def pending(self) -> bool:
        """Return True if one is in progress."""
        return any(handle.finished_s is None for handle in list(self._handles))

    def wait(self, limit_s: float) -> None:
        """Wait until all have ended, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self.pending() and time.monotonic() < deadline:
            time.sleep(1e-3)


def close_connections(group: dist.ProcessGroup, rank: int, num_ranks: int) -> None:
    """Close all connections of a gloo group: every wait in it ends with an error.

    `abort` and `shutdown` do nothing on gloo. A receive that times out closes the connections.
    """
    if num_ranks > 1:
        with contextlib.suppress(RuntimeError, ValueError):
            work = dist.irecv(torch.zeros(1), group=group, group_src=(rank + 1) % num_ranks, tag=CUT_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


@final
class StreamHandle(Handle):
    """A collective on device memory.

    The host waits for it too, to notice a failed peer and to know when it completed.
    """

    def __init__(self, work: Any) -> None:
        self.started_s = time.perf_counter()
        self._work = work

    def poll(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, deadline: Deadline) -> None:
        while not self.poll():
            deadline.pause()
        self._work.wait()  # orders the stream, and raises the error of the work
        self.finished_s = time.perf_counter()


@final
class PointHandle(Handle):
    """A send or receive of gloo.

    gloo reports its completion only to a thread that waits for it: the first thread that asks, or one of
    `WaiterThreads`.

    Args:
        host: memory that the library uses.
        target: device memory to copy it to, on the thread that polls.
        numbers: position in the group -> rank; None if they are equal.
    """

    def __init__(
        self,
        work: Any,
        host: Tensor,
        peer: int,
        target: Tensor | None,
        numbers: list[int] | None,
        waiters: WaiterThreads,
    ) -> None:
        self.started_s = time.perf_counter()
        self.source = peer
        self._event = threading.Event()
        self._waiters = waiters
        self._free = threading.Lock()  # locked once a thread waits for it, or will
        self.error: BaseException | None = None
        self._work = work
        self._host, self._target, self._numbers = host, target, numbers

    @property
    def event(self) -> threading.Event:
        """Set when it is complete."""
        if self._free.acquire(blocking=False):
            self._waiters.take(self)
        return self._event

    def __del__(self) -> None:
        """Give it to a waiter, which keeps its memory alive until it completes, because the library still uses it."""
        if not self._waiters.closed:
            _ = self.event

    def run(self) -> None:
        """Wait for it in the library, on the calling thread."""
        try:
            self._work.wait()
            if self.source < 0:
                place = self._work.source_rank()
                self.source = place if self._numbers is None else self._numbers[place]
        except RuntimeError as error:
            self.error = error
        self.finished_s = time.perf_counter()
        self._event.set()

    def poll(self) -> bool:
        done = self.event.is_set()  # read once: the error is set before
        if done and self.error is not None:
            raise self.error
        if done and self._target is not None:  # in `poll`, so that the copy is on the stream of the thread that uses it
            self._target.copy_(self._host)
            self._target = None
        return done

    def wait(self, deadline: Deadline) -> None:
        event = self.event
        while not event.wait(0.1):
            deadline.check()
        self.poll()

    def wait_inside(self, deadline: Deadline) -> None:
        if self._free.acquire(blocking=False):
            self.run()
        self.wait(deadline)


@final
class WaiterThreads:
    """Threads that wait for sends and receives: one for each that is waited for at the same time."""

    def __init__(self) -> None:
        self.closed = False
        self.busy: set[int] = set()  # threads that wait in the library now
        self._tasks: SimpleQueue[PointHandle | None] = SimpleQueue()
        # One entry a thread. No semaphore: its methods may collect a handle.
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def watch(
        self, work: Any, host: Tensor, peer: int, target: Tensor | None = None, numbers: list[int] | None = None
    ) -> PointHandle:
        return PointHandle(work, host, peer, target, numbers, self)

    def take(self, handle: PointHandle) -> None:
        """Let a thread wait for this handle."""
        try:
            self._idle.get_nowait()
        except Empty:
            thread = threading.Thread(target=self._run, name="workbench-waiter", daemon=True)
            self._threads.append(thread)
            thread.start()  # not self._threads[-1]: several threads may be here at once
        self._tasks.put(handle)

    def _run(self) -> None:
        me = threading.get_ident()
        while (handle := self._tasks.get()) is not None:
            self.busy.add(me)
            handle.run()
            del handle
            self.busy.discard(me)
            self._idle.put(None)

    def close(self) -> None:
        """End the threads.

        A thread that returns from the library while the interpreter ends would abort the process.
        """
        self.closed = True
        deadline = time.monotonic() + JOIN_S
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
