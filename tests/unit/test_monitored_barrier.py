"""A barrier whose owner reports while another thread looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from workbench.errors import RankMismatch
from workbench.runtimes.user_loop.monitored_barrier import MonitoredBarrier


class TwoRanks:
    """The reports of rank 0, whose barrier is tested, and of rank 1, which are given; `meanwhile` runs after each look."""

    num_workers, rank = 2, 0

    def __init__(self, other: dict[int, str]) -> None:
        self.other, self.own = other, dict[int, str]()
        self.meanwhile: Callable[[], Any] = lambda: None

    def arrive(self, number: int, text: str) -> None:
        self.own[number] = text

    def arrivals(self, number: int, text: str) -> tuple[int, tuple[int, str] | None]:
        there = [(rank, made[number]) for rank, made in enumerate((self.own, self.other)) if number in made]
        found = sum(reported == text for _, reported in there), next((one for one in there if one[1] != text), None)
        self.meanwhile()
        return found


def barrier_of(other: dict[int, str], steps: int) -> tuple[MonitoredBarrier, TwoRanks]:
    ranks = TwoRanks(other)
    barrier = MonitoredBarrier(cast(Any, ranks))
    barrier.steps = steps
    return barrier, ranks


def test_a_report_while_another_thread_looks_is_no_mismatch() -> None:
    """A thread that drives a collective looks; before it judges what it saw, the training thread calls finish, too."""
    barrier, ranks = barrier_of({0: "finish 6"}, steps=6)
    ranks.meanwhile = lambda: barrier._announce("finish")
    assert barrier.num_arrived() == 0
    ranks.meanwhile = lambda: None
    assert barrier.num_arrived() == 2


def test_the_next_barrier_while_another_thread_looks_is_no_mismatch() -> None:
    barrier, ranks = barrier_of({0: "save 6", 1: "finish 7"}, steps=6)
    deadline = cast(Any, type("Deadline", (), {"check": staticmethod(lambda: None)}))
    barrier.wait("save", deadline, lambda: True)
    barrier.steps = 7
    ranks.meanwhile = lambda: barrier._announce("finish")
    assert barrier.num_arrived() == 0, "rank 1 is only ahead"


@pytest.mark.parametrize("what", ["finish 5", "save 6", "end 6"])
def test_another_call_is_a_mismatch(what: str) -> None:
    barrier, _ = barrier_of({0: what}, steps=6)
    barrier._announce("finish")
    with pytest.raises(RankMismatch, match=r"rank 1 .*, but rank 0 calls finish"):
        barrier.num_arrived()
