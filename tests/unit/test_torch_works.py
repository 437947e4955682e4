"""Sends and receives of gloo, whose end only a thread that waits for it hears of: which thread that is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workbench.runtimes.patience import Patience
from workbench.runtimes.torch_works import Waiters


class Work:
    """Ends when it is let; knows who waited."""

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


def patience() -> Patience:
    return Patience("a message", lambda: None, 10.0)


def test_a_thread_that_may_waits_in_the_library_itself() -> None:
    waiters, work = Waiters(), Work()
    handle = waiters.watch(work, torch.zeros(1), 1)
    work.end.set()
    handle.wait_inside(patience())
    assert work.waited == [threading.get_ident()]
    assert handle.poll()
    assert handle.finished_s is not None
    assert not waiters._threads
    waiters.close()


def test_whoever_looks_or_must_hear_of_failures_has_another_thread_wait() -> None:
    waiters = Waiters()
    for ask in ("poll", "wait"):
        work = Work()
        handle = waiters.watch(work, torch.zeros(1), 1)
        assert not work.waited, "nobody asked yet"
        if ask == "poll":
            assert not handle.poll()
        else:
            threading.Timer(0.01, work.end.set).start()
        assert work.end.set() is None
        handle.wait(patience())
        assert work.waited
        assert work.waited != [threading.get_ident()]
    waiters.close()


def test_one_thread_waits_and_no_other() -> None:
    """The library would wake one of two, and leave the other waiting."""
    waiters, work = Waiters(), Work()
    handle = waiters.watch(work, torch.zeros(1), 1)
    assert not handle.poll()
    assert work.begun.wait(10)
    work.end.set()
    handle.wait_inside(patience())
    assert len(work.waited) == 1
    waiters.close()


def test_what_nobody_waits_for_is_brought_to_its_end() -> None:
    """A send whose handle is dropped: its memory must not go before its bytes have."""
    waiters, work = Waiters(), Work()
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
    waiters, works = Waiters(), [Work() for _ in range(4)]
    waiters._threads = Slow()
    handles = [waiters.watch(work, torch.zeros(1), 1) for work in works]
    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(lambda handle: handle.poll(), handles))
        for work in works:
            work.end.set()
        list(pool.map(lambda handle: handle.wait(patience()), handles))
    assert [len(work.waited) for work in works] == [1, 1, 1, 1]
    waiters.close()


@pytest.mark.parametrize("inside", [False, True])
def test_what_went_wrong_is_raised_where_it_is_waited_for(inside: bool) -> None:
    waiters, work = Waiters(), Work("Connection closed by peer")
    handle = waiters.watch(work, torch.zeros(1), 1)
    work.end.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        (handle.wait_inside if inside else handle.wait)(patience())
    waiters.close()
