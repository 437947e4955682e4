"""`Work` objects of gloo: the thread that waits for the end of sends and receives, and the wait in the library for a collective."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from workbench.errors import PeerFailed, Stalled
from workbench.runtimes.liveness.deadline import Deadline
from workbench.runtimes.transport.torch_handles import WaiterThreads, wait_inside


class Work:
    """Ends when the test allows it; notes the threads that waited."""

    def __init__(self, error: str | None = None) -> None:
        self.end, self.begun = threading.Event(), threading.Event()
        self.error = error
        self.waited: list[int] = []

    def wait(self) -> None:
        self.waited.append(threading.get_ident())
        self.begun.set()
        assert self.end.wait(10)
        if self.error is not None:
            raise RuntimeError(self.error)


def deadline() -> Deadline:
    return Deadline("a message", lambda: None, 10.0)


def test_a_thread_that_may_waits_in_the_library_itself() -> None:
    waiters, work = WaiterThreads(), Work()
    handle = waiters.watch(work, torch.zeros(1), 1)
    work.end.set()
    handle.wait_inside(deadline())
    assert work.waited == [threading.get_ident()]
    assert handle.poll()
    assert handle.finished_s is not None
    assert not waiters._threads
    waiters.close()


def test_whoever_looks_or_must_hear_of_failures_has_another_thread_wait() -> None:
    waiters = WaiterThreads()
    for ask in ("poll", "wait"):
        work = Work()
        handle = waiters.watch(work, torch.zeros(1), 1)
        assert not work.waited, "nobody asked yet"
        if ask == "poll":
            assert not handle.poll()
        else:
            threading.Timer(0.01, work.end.set).start()
        assert work.end.set() is None
        handle.wait(deadline())
        assert work.waited
        assert work.waited != [threading.get_ident()]
    waiters.close()


def test_one_thread_waits_and_no_other() -> None:
    """The library would wake one of two, and leave the other waiting."""
    waiters, work = WaiterThreads(), Work()
    handle = waiters.watch(work, torch.zeros(1), 1)
    assert not handle.poll()
    assert work.begun.wait(10)
    work.end.set()
    handle.wait_inside(deadline())
    assert len(work.waited) == 1
    waiters.close()


def test_what_nobody_waits_for_is_brought_to_its_end() -> None:
    """A send whose handle is dropped: its memory must not go before its bytes have."""
    waiters, work = WaiterThreads(), Work()
    handle = waiters.watch(work, torch.zeros(1), 1)
    del handle
    assert work.begun.wait(10)
    work.end.set()
    waiters.close()
    dropped = Work()
    handle = waiters.watch(dropped, torch.zeros(1), 1)
    del handle
    assert not dropped.begun.wait(0.05), "the run is over: its groups are given back"


class Slow(list[threading.Thread]):
    """Another thread comes between when one is added."""

    def append(self, thread: threading.Thread) -> None:
        super().append(thread)
        time.sleep(0.002)


def test_threads_that_ask_at_once_each_have_one_that_waits() -> None:
    """A lane, a server and the foreground begin at the same time, when no waiter is there yet."""
    waiters, works = WaiterThreads(), [Work() for _ in range(4)]
    waiters._threads = Slow()
    handles = [waiters.watch(work, torch.zeros(1), 1) for work in works]
    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(lambda handle: handle.poll(), handles))
        for work in works:
            work.end.set()
        list(pool.map(lambda handle: handle.wait(deadline()), handles))
    assert [len(work.waited) for work in works] == [1, 1, 1, 1]
    waiters.close()


@pytest.mark.parametrize("inside", [False, True])
def test_what_went_wrong_is_raised_where_it_is_waited_for(inside: bool) -> None:
    waiters, work = WaiterThreads(), Work("Connection closed by peer")
    handle = waiters.watch(work, torch.zeros(1), 1)
    work.end.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        (handle.wait_inside if inside else handle.wait)(deadline())
    waiters.close()


class Sum:
    """A collective that ends by itself, or never; as the library says it, by an error in both cases where it is waited for with a limit."""

    def __init__(self, ends_after_s: float, error: str | None = None) -> None:
        self.ends_s, self.error, self.looks = time.perf_counter() + ends_after_s, error, 0

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.ends_s

    def wait(self, limit: timedelta) -> bool:
        self.looks += 1
        time.sleep(max(0.0, min(limit.total_seconds(), self.ends_s - time.perf_counter())))
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


def test_a_sum_is_waited_for_in_the_library() -> None:
    for seconds, looks in ((0.0, 1), (0.25, 3)):
        work = Sum(seconds)
        wait_inside(work, deadline())
        assert work.is_completed()
        assert work.looks >= looks, "between looks for failed peers"


@pytest.mark.parametrize("ends_after_s", [0.0, 0.15])
def test_a_sum_that_failed_says_why(ends_after_s: float) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_inside(Sum(ends_after_s, "Connection closed by peer"), deadline())


def test_a_sum_that_does_not_end_is_left() -> None:
    with pytest.raises(PeerFailed, match="rank 1 has left"):
        wait_inside(Sum(30.0), Deadline("a sum", lambda: "rank 1 has left", 10.0))
    with pytest.raises(Stalled, match="waited 0 s for a sum"):
        wait_inside(Sum(30.0), Deadline("a sum", lambda: None, 0.2))


def test_gloo_s_own_works_are_waited_for_so(tmp_path: Path) -> None:
    """What this relies on: a limit that has passed ends no work."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    results: list[float] = []

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        flat = torch.full((5,), float(number + 1))
        if number:
            time.sleep(0.35)
        wait_inside(group.allreduce([flat]), deadline())
        results.append(float(flat.sum()))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))
    assert results == [15.0, 15.0]
