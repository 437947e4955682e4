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
        assert calls == ["Ibarrier", "Improbe", "Allreduce"], "of a short one a second barrier would be a good part"
        assert least == most == 6.0
