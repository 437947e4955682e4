"""State of many workers in one program: bytes by the times at which workers end their steps, and the seconds that they waited."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.laws import tiny
from workbench.algorithms import SynchronousSGD
from workbench.costs import Compute, SlowMachines, free
from workbench.runtimes.simulator.lockstep.worker_group import NUM_KEPT_ENDS, SentBytes
from workbench.runtimes.simulator.simulate import run_simulation
from workbench.settings import Settings


def test_bytes_are_counted_by_each_workers_own_time_in_a_run_of_any_length() -> None:
    """A sum that ends at the moment of a step's end counts; one that ends later does not, though it was begun."""
    sent, rows = SentBytes(), []
    for number in range(3 * NUM_KEPT_ENDS):
        row: dict[str, Any] = {"number": number}
        sent.note(row, np.array([number + 1.0, number + 0.5]))
        sent.book(number + 1.0, 2.5)
        rows.append(row)
    sent.settle(np.inf)
    for row in rows:
        assert row["bytes_sent"] == int(2.5 * (row["number"] + 1)) + int(2.5 * row["number"])


def test_a_row_costs_the_same_in_a_long_run() -> None:
    """It was looked up among all the sums there had been: 25 times as long after 8,000 as after 100."""

    def seconds(num_ends: int) -> float:
        sent = SentBytes()
        for number in range(num_ends):
            sent.book(float(number), 1.0)
        took = []
        for _ in range(5):
            for _ in range(50):
                sent.note({}, np.array([num_ends - 1.5]))
            begin = time.perf_counter()
            sent.settle(num_ends * 2.0)
            took.append(time.perf_counter() - begin)
        return min(took)

    assert seconds(8000) < 6 * seconds(100)


def test_idle_is_what_workers_waited_as_a_share_of_the_run() -> None:
    """One of four takes 3 s where the others take 1 s: they wait 2 s in each of all steps."""
    slow = Compute(forward_s=0.5, backward_s=0.5, stragglers=(SlowMachines(factor_of={2: 3.0}),))
    settings = Settings(steps=5, batch_size=2)
    run = run_simulation(
        SynchronousSGD(), tiny.problem(num_samples=64), settings, 4, network=free, compute=slow, timing_only=True
    )
    assert run.info["result"]["seconds"] == pytest.approx(15.0)
    assert run.info["result"]["waited_share"] == pytest.approx(3 / 4 * 2 / 3)
