"""Delayed gradients at parameter servers and at a ring: steps and arrivals that are known without the simulation."""

from __future__ import annotations

import numpy as np
import pytest

from workbench import problems
from workbench.algorithms import SynchronousSGD
from workbench.collectives import Ring
from workbench.costs import Network, ShiftedExponential
from workbench.papers.studies.gathering import Gathering, measured_seconds
from workbench.papers.studies.simulated_steps import simulated_steps
from workbench.papers.studies.training import compute_cost
from workbench.theory import all_reduce_s

pytestmark = pytest.mark.notebooks
LINK = Network(latency_s=1e-5, bandwidth_bytes_per_s=1e9, sum_s_per_byte=1e-10)
GATHERING = Gathering(workers=4, compute_s=0.5, network=LINK, model_bytes=40e6, servers=(1, 2, 3))
FREE = Gathering(
    workers=4,
    compute_s=0.5,
    network=Network(latency_s=0.0, bandwidth_bytes_per_s=1e18),
    model_bytes=4e4,
    servers=(1, 2),
)
DELAYS = ShiftedExponential(scale=0.4)  # of mean 1.4


def test_the_small_model_takes_as_long_on_its_network_as_the_large_one() -> None:
    small = sum(4 * weight.numel() for weight in GATHERING.task.model().parameters())
    assert small / GATHERING.scaled.bandwidth_bytes_per_s == pytest.approx(40e6 / 1e9)
    assert small * GATHERING.scaled.sum_s_per_byte == pytest.approx(40e6 * 1e-10)
    assert GATHERING.scaled.latency_s == LINK.latency_s
    assert len({weight.numel() for weight in GATHERING.task.model().parameters()}) == 1
    assert len([*GATHERING.task.model().parameters()]) % 6 == 0, "two and three servers have equally many"


def test_a_step_of_the_ring_is_that_of_the_large_model() -> None:
    sum_s = all_reduce_s(Ring(), 40e6, 4, LINK)
    assert GATHERING.ring_step_s(None, 0, steps=4) == pytest.approx(0.5 + sum_s, rel=1e-3)
    last_s = GATHERING.without_traffic(DELAYS, 1, steps=6)[1:, -1].mean()
    assert GATHERING.ring_step_s(DELAYS, 1, steps=6) == pytest.approx(last_s + sum_s, rel=1e-3), "it waits for the last"


@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_with_servers_is_that_of_the_formula(servers: int) -> None:
    predicted = GATHERING.predicted_step_s(servers)
    # Each server takes p messages of n / M bytes, sums p - 1 of them, and sends one before the first worker goes on.
    message_s = 40e6 / servers / 1e9
    by_hand = 0.5 + 4 * message_s + 3 * 40e6 / servers * 1e-10 + servers * message_s
    assert predicted == pytest.approx(by_hand, rel=2e-3)
    assert GATHERING.server_step_s(None, 0, 6, servers) == pytest.approx(predicted, rel=0.02)
    assert GATHERING.server_step_s(DELAYS, 0, 6, servers) > predicted


@pytest.mark.parametrize("servers", [1, 2])
def test_gradients_arrive_when_they_are_computed_if_messages_cost_nothing(servers: int) -> None:
    drawn = FREE.without_traffic(DELAYS, 3, steps=4)
    assert drawn.shape == (4, 4) and (np.diff(drawn) >= 0).all()
    assert FREE.at_servers(DELAYS, 3, 4, servers) == pytest.approx(drawn, rel=1e-6)


def test_computing_takes_its_seconds_on_average_and_the_kth_of_exponential_delays_its_order_statistic() -> None:
    slow = Gathering(workers=4, compute_s=2.0, network=LINK, model_bytes=1e6, servers=(1,))
    found = slow.without_traffic(ShiftedExponential(scale=1.0), 0, steps=20_000)
    assert found.mean() == pytest.approx(2.0, rel=0.01)
    # 1 + exponential, of mean 2: the k-th of four is 1 + 1/4 + ... + 1/(5 - k)
    assert found.mean(axis=0) == pytest.approx([1.25, 1.5833, 2.0833, 3.0833], rel=0.02)


def test_measured_seconds_are_forward_and_backward_of_each_rank_without_the_first_tenth() -> None:
    cost = compute_cost(0.3, DELAYS)
    how = {"workers": 3, "network": LINK, "compute": cost, "steps": 20, "seed": 5, "trace_steps": None}
    run = simulated_steps(SynchronousSGD(), problems.get("digits-softmax"), **how)  # type: ignore[arg-type]
    drawn = np.array([DELAYS.factors(5, step, 3) for step in range(2, 20)]).T
    assert measured_seconds(run) == pytest.approx(0.3 * drawn)
