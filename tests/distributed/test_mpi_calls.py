"""The MPI calls of a rank before and after a call that blocks until all ranks make it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import shared_pool
from workbench.errors import PeerFailed
from workbench.runtimes.rank.main import transport_here
from workbench.runtimes.transport.base import Deadline

LONG, SHORT = 4 << 20, 100  # numbers of 4 bytes


class Heard:
    """A communicator, and in which order it was used."""

    def __init__(self, of: Any, calls: list[str]) -> None:
        self._of, self._calls = of, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._of, name)


def sums(length: int) -> tuple[list[str], float, float]:
    transport: Any = transport_here(30.0)
    calls: list[str] = []
    heard = transport.for_lane(0)
    heard._collectives, heard._control = Heard(transport._collectives, calls), Heard(transport._control, calls)
    flat = torch.full((length,), float(transport.rank + 1))
    heard.all_reduce(flat, Deadline("a sum", lambda: None, 30.0))
    assert not transport.bound
    transport.close()
    return calls, float(flat.min()), float(flat.max())


def hears_at_the_last_barrier() -> tuple[list[str], str]:
    """On all ranks: a message comes to this rank while it waits for the others a second time."""
    transport: Any = transport_here(30.0)
    calls: list[str] = []
    heard = transport.for_lane(0)

    class Late(Heard):
        def Ibarrier(self) -> Any:  # noqa: N802 - MPI's name
            if calls.count("Ibarrier") == 1:
                heard._failure.append("rank 7 failed")
            return self.__getattr__("Ibarrier")()

    heard._collectives, heard._failure = Late(transport._collectives, calls), []
    try:
        heard.all_reduce(torch.zeros(LONG), Deadline("a sum", lambda: None, 30.0))
    except PeerFailed as error:
        return calls, f"{error}, {heard.bound}"
    finally:
        transport.close()
    return calls, "nothing"


@pytest.mark.mpi
def test_who_hears_of_a_failure_at_the_second_barrier_does_not_make_the_call() -> None:
    for calls, words in shared_pool("mpi", 2).run(hears_at_the_last_barrier):
        assert calls == ["Ibarrier", "Ibarrier"] and words == "rank 7 failed, False"


@pytest.mark.mpi
def test_nothing_moves_messages_between_the_last_barrier_and_a_long_call() -> None:
    """MPICH's sum of 64 MiB took half as long again if a check for a peer's messages came last before it."""
    for calls, least, most in shared_pool("mpi", 3).run(sums, LONG):
        assert calls == ["Ibarrier", "Improbe", "Ibarrier", "Allreduce"]
        assert least == most == 6.0
    for calls, least, most in shared_pool("mpi", 3).run(sums, SHORT):
        assert calls == ["Allreduce"], "before a short one, ranks on one host count their arrivals in shared memory"
        assert least == most == 6.0


class Pauses:
    """A deadline that does this when a rank has to wait."""

    def __init__(self, *actions: Any) -> None:
        self._actions = iter(actions)

    def pause(self) -> None:
        next(self._actions)()


def fail() -> None:
    raise PeerFailed("rank 1 failed")


def counters() -> list[Any]:
    """The counters of two ranks, in common memory."""
    from workbench.runtimes.transport.mpi_arrivals import LINE, ArrivalCounters

    memory = memoryview(bytearray(2 * LINE * 8)).cast("q")
    return [ArrivalCounters(memory, rank, 2) for rank in range(2)]


def gives_up() -> list[str]:
    """On a rank: one rank of two gives up, so the other one must not pass; then both arrive again."""
    first, second = counters()
    seen = []
    for rank in (first, second, second):
        try:
            rank.wait(Pauses(fail))
        except PeerFailed:
            seen.append("waited in vain")
    first.wait(Pauses(lambda: second.wait(Pauses())))
    seen.append("both passed")
    return seen


def gives_up_late() -> list[str]:
    """On a rank: the other one arrives, and may pass, at the moment in which this one gives up."""
    first, second = counters()

    def arrives_then_fails() -> None:
        second.wait(Pauses())
        fail()

    first.wait(Pauses(arrives_then_fails))
    return ["passed"]


def one_takes_it_back() -> list[str]:
    """On a rank: the first of three ranks arrives, and takes it back before the second arrives."""
    from workbench.runtimes.transport.mpi_arrivals import LINE, ArrivalCounters

    memory = memoryview(bytearray(3 * LINE * 8)).cast("q")
    first, second, third = 0, LINE, ArrivalCounters(memory, 2, 3)
    memory[first] = 1

    def takes_it_back() -> None:
        memory[first], memory[second] = 0, 1

    try:
        third.wait(Pauses(takes_it_back, fail))
    except PeerFailed:
        return ["waited in vain"]
    return ["passed"]


@pytest.mark.mpi
def test_no_rank_passes_if_one_takes_its_arrival_back_meanwhile() -> None:
    assert shared_pool("mpi", 2).run(one_takes_it_back) == [["waited in vain"]] * 2


@pytest.mark.mpi
def test_a_rank_that_gives_up_takes_its_arrival_back_unless_all_have_arrived() -> None:
    pool = shared_pool("mpi", 2)
    assert pool.run(gives_up) == [[*["waited in vain"] * 3, "both passed"]] * 2
    assert pool.run(gives_up_late) == [["passed"]] * 2
