"""Closed forms alone: against each other, at their limits, and against published numbers."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import theory
from workbench.codecs import Truncate16
from workbench.collectives import Auto, Hierarchical, Ring
from workbench.costs import Network
from workbench.errors import ConfigError
from workbench.theory import (
    Arrival,
    BimodalTime,
    ConstantTime,
    ParetoTime,
    ShiftedExponentialTime,
)
from workbench.units import GBIT_PER_S

EXPONENTIAL = ShiftedExponentialTime(shift_s=0.0, scale_s=1.0)
LAWS: dict[str, Arrival] = {
    "constant": ConstantTime(seconds=2.0),
    "exponential": EXPONENTIAL,
    "pareto": ParetoTime(minimum_s=1.0, shape=2.5),
    "bimodal": BimodalTime(usual_s=1.0, slow_s=5.0, probability=0.03),
}

# ---------------------------------------------------------------- collectives and steps


def test_ring_and_server_at_10_gbit() -> None:
    """AlexNet, 61 million float32 on 4 machines: 293 ms and 1561 ms; 16/3 as long."""
    link, num_bytes = Network(latency_s=0.0, bandwidth_bytes_per_s=10 * GBIT_PER_S), 61e6 * 4
    ring_s, server_s = Ring().seconds(num_bytes, 4, link), theory.parameter_server_s(num_bytes, 4, link)
    assert ring_s == pytest.approx(0.293, abs=5e-4) and server_s == pytest.approx(1.561, abs=1e-3)
    assert server_s / ring_s == pytest.approx(16 / 3) == theory.server_over_ring(4)


def test_staggered_replies_save_all_but_one() -> None:
    link = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-7)
    full, staggered = (theory.parameter_server_s(1000, 8, link, staggered=flag) for flag in (False, True))
    assert full - staggered == pytest.approx(7 * 1e-3), "p - 1 replies of 1 ms on the wire"
    assert theory.parameter_server_s(1000, 1, link) == theory.parameter_server_s(1000, 1, link, staggered=True)


def test_collectives_without_a_formula_say_so() -> None:
    network = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, encode_s_per_byte=1e-9)
    assert theory.all_reduce_s(Ring(), 1000, 4, network) == Ring().seconds(1000, 4, network)
    assert theory.codec_s(Ring(codec=Truncate16()), 1000, 1, network) == 0.0
    for collective in (
        Ring(codec=Truncate16(), chunks=2),
        Hierarchical(codec=Truncate16()),
        Auto(candidates=(Ring(codec=Truncate16()),)),
    ):
        if collective.lossy:
            with pytest.raises(ConfigError, match="formula"):
                theory.codec_s(collective, 1000, 4, network)
    for wrong in (lambda: theory.gather_s(1.0, 2, network, shards=0), lambda: theory.server_over_ring(1)):
        with pytest.raises(ConfigError):
            wrong()


@given(compute_s=st.floats(0.001, 10), communication_s=st.floats(0.001, 10), width=st.integers(2, 8))
def test_pipe_is_between_half_of_synchronous_and_all_of_it(
    compute_s: float, communication_s: float, width: int
) -> None:
    synchronous = theory.synchronous_s(compute_s, communication_s)
    assert theory.pipe_s(compute_s, communication_s, 1) == synchronous
    assert synchronous / 2 <= theory.pipe_s(compute_s, communication_s, width) < synchronous
    assert theory.pipe_unlimited_s(compute_s, communication_s, width) <= theory.pipe_s(
        compute_s, communication_s, width
    )
    assert 1 < theory.pipe_speedup(compute_s, communication_s) <= 2
    assert theory.pipe_speedup(compute_s, compute_s) == 2


def test_layers_cost_a_pipe_their_latencies() -> None:
    """2 (L-1) (p-1) alpha where communication bounds, nothing where compute does."""
    link, layers, p = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6, sum_s_per_byte=1e-7), 5, 4
    pieces, whole = [Ring().seconds(2000, p, link)] * layers, Ring().seconds(2000 * layers, p, link)
    assert theory.per_layer_pipe_s(1e-6, pieces) - theory.pipe_s(1e-6, whole) == pytest.approx(
        2 * (layers - 1) * (p - 1) * 1e-3
    )
    assert theory.per_layer_pipe_s(1.0, pieces) == theory.pipe_s(1.0, whole) == 1.0


@given(compute_s=st.floats(0.01, 10), communication_s=st.floats(0.01, 50), part=st.floats(0.01, 1))
def test_the_smallest_useful_delay_is_the_first_of_the_shortest_steps(
    compute_s: float, communication_s: float, part: float
) -> None:
    wire_s = part * communication_s
    best = theory.smallest_useful_delay(compute_s, communication_s, wire_s)
    shortest = max(compute_s, wire_s)
    assert theory.delayed_s(compute_s, communication_s, wire_s, best) == pytest.approx(shortest, rel=1e-9)
    if best > 1:
        assert theory.delayed_s(compute_s, communication_s, wire_s, best - 1) > shortest * (1 + 1e-9)
    assert theory.delayed_s(compute_s, communication_s, wire_s, 0) == theory.synchronous_s(compute_s, communication_s)


def test_wrong_steps_are_refused() -> None:
    for wrong in (
        lambda: theory.pipe_s(1.0, 1.0, width=0),
        lambda: theory.synchronous_s(-1.0, 1.0),
        lambda: theory.delayed_s(1.0, 1.0, 1.0, delay=-1),
        lambda: theory.smallest_useful_delay(0.0, 1.0, 0.0),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert theory.smallest_useful_delay(1.0, 0.0, 0.0) == 0


# ---------------------------------------------------------------- layer by layer

layers = st.integers(1, 6).flatmap(
    lambda n: st.tuples(*[st.lists(st.floats(0.0, 3.0), min_size=n, max_size=n) for _ in range(3)])
)


@given(layers, st.floats(0, 3))
def test_layerwise_orders(times: tuple[list[float], list[float], list[float]], forward_s: float) -> None:
    """On one lane B3 is B2, which is never later than B1; none beats its bounds, none is slower than no overlap."""
    backward, communication, update = times
    steps = {
        order: theory.layerwise(forward_s, backward, communication, update, order)
        for order in ("all", "backward", "any")
    }
    assert steps["any"].applied_s == steps["backward"].applied_s
    assert steps["backward"].step_s <= steps["all"].step_s + 1e-9
    sequential = forward_s + sum(backward) + sum(communication) + sum(update)
    for step in steps.values():
        assert step.step_s <= sequential + 1e-9
        assert (
            step.step_s
            >= max(forward_s + sum(backward) + sum(update), forward_s + backward[0] + sum(communication)) - 1e-9
        )
    saved = sequential - steps["all"].step_s
    assert saved <= sum(backward) - backward[0] + 1e-9, "only the rest of backward hides anything"


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), min_size=1, max_size=7), st.floats(0, 3))
def test_whichever_is_there_is_never_later(buckets: list[tuple[float, float]], from_s: float) -> None:
    """Arrivals in any order, as of several lanes: B3 idles only while nothing is there, so it ends first."""
    arrived, update = [time for time, _ in buckets], [seconds for _, seconds in buckets]
    ends = [max(theory.apply_times(arrived, from_s, update, order)) for order in ("any", "backward", "all")]
    assert ends[0] <= ends[1] + 1e-9 and ends[1] <= ends[2] + 1e-9


def test_b1_b2_and_b3_by_hand() -> None:
    """Backward ends at 3; buckets arrive at 6, 4 and 5; an update takes 1."""
    arrived, update = [6.0, 4.0, 5.0], [1.0, 1.0, 1.0]
    assert theory.apply_times(arrived, 3.0, update, "all") == (9.0, 9.0, 9.0)
    assert theory.apply_times(arrived, 3.0, update, "backward") == (7.0, 8.0, 9.0)
    assert theory.apply_times(arrived, 3.0, update, "any") == (7.0, 5.0, 6.0)


def test_dear_hides_both_halves() -> None:
    """Three equal layers of f = b = 2 and half-sums of 1: all hidden but the first gather and the last scatter."""
    assert theory.dear_s([2.0] * 3, [2.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3) == 1 + 6 + 6 + 1
    assert theory.dear_s([0.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3, [0.5] * 3) == 3 + 0.5 + 3


def test_layerwise_wants_one_of_each() -> None:
    for wrong in (([1.0], [1.0, 2.0], [1.0]), ([], [], [])):
        with pytest.raises(ConfigError, match="give one of each"):
            theory.layerwise(1.0, *wrong)
    with pytest.raises(ConfigError, match="order"):
        theory.layerwise(1.0, [1.0], [1.0], [1.0], "first")  # type: ignore[arg-type]


# ---------------------------------------------------------------- asynchronous


def test_asynchronous_rate_and_staleness() -> None:
    link = Network(latency_s=0.01, bandwidth_bytes_per_s=1000.0)
    service, cycle = theory.service_s(100, 0.05, link), theory.cycle_s(1.0, 100, 0.05, link)
    assert (service, cycle) == (pytest.approx(0.16), pytest.approx(1.27))
    few, many = math.floor(theory.busiest_workers(cycle, service)), math.ceil(theory.busiest_workers(cycle, service))
    assert theory.update_interval_s(cycle, few, service) == cycle / few
    assert theory.update_interval_s(cycle, many, service) == service
    assert theory.busiest_workers(1.0, 0.0) == math.inf
    with pytest.raises(ConfigError):
        theory.mean_staleness(0)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 12])
@pytest.mark.parametrize("law", ["exponential", "pareto", "constant", "bimodal"])
def test_asynchronous_by_a_heap(num_workers: int, law: str) -> None:
    """p independent renewal processes: E[X] / p between updates, p - 1 updates stale, for any distribution, slow machines too."""
    chance, num_updates = np.random.default_rng(5), 20_000
    slowness = np.linspace(1, 3, num_workers)  # machines that are permanently slower
    draws = iter(LAWS[law].quantile(chance.random(num_updates + num_workers)))
    queue = [(slowness[worker] * next(draws), worker, 0) for worker in range(num_workers)]
    heapq.heapify(queue)
    staleness, now = 0, 0.0
    for update in range(num_updates):
        now, worker, read = heapq.heappop(queue)
        staleness += update - read
        heapq.heappush(queue, (now + slowness[worker] * next(draws), worker, update + 1))
    in_flight = sum(num_updates - read for _, _, read in queue)
    assert staleness + in_flight == theory.mean_staleness(num_workers) * num_updates, (
        "exactly, with what is still under way"
    )
    rate = sum(1 / (LAWS[law].mean_s * slow) for slow in slowness)
    assert now / num_updates == pytest.approx(1 / rate, rel=0.03)


# ---------------------------------------------------------------- stability


def test_stability_limits_of_the_sheet() -> None:
    assert [round(theory.stability_limit(delay), 3) for delay in range(5)] == [2.0, 1.0, 0.618, 0.445, 0.347]
    assert [round(theory.stability_limit(delay, 0.9), 4) for delay in range(5)] == [3.8, 0.1, 0.0512, 0.0348, 0.0265]


@given(delay=st.integers(0, 12), momentum=st.floats(0, 0.99))
def test_stability_limit_is_where_the_largest_root_leaves_the_circle(delay: int, momentum: float) -> None:
    limit = theory.stability_limit(delay, momentum)
    assert theory.spectral_radius(limit, delay, momentum) == pytest.approx(1.0, abs=1e-6)
    assert (
        theory.spectral_radius(0.98 * limit, delay, momentum)
        < 1
        < theory.spectral_radius(1.02 * limit, delay, momentum)
    )


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_special_cases_meet_the_general_one(delay: int) -> None:
    assert theory.stability_limit(delay, 1e-9) == pytest.approx(theory.stability_limit(delay), rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_spectral_radius_is_how_parameters_grow(delay: int, momentum: float) -> None:
    """The recurrence itself, run for 3000 updates."""
    step = 1.1 * theory.stability_limit(delay, momentum)
    w, velocity = [1.0] * (delay + 1), 0.0
    for _ in range(3000):
        velocity = momentum * velocity + step * w[-1 - delay]
        w.append(w[-1] - velocity)
        if abs(w[-1]) > 1e100:
            w, velocity = [value * 1e-100 for value in w[-200:]], velocity * 1e-100
    grown = (max(map(abs, w[-50:])) / max(map(abs, w[-150:-100]))) ** (1 / 100)
    assert grown == pytest.approx(theory.spectral_radius(step, delay, momentum), rel=5e-3)


def test_wrong_delays_and_momenta_are_refused() -> None:
    for wrong in ((-1, 0.0), (1, 1.0), (1, -0.1), (1.5, 0.0)):
        with pytest.raises(ConfigError):
            theory.stability_limit(*wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- compression

per_byte = st.floats(1e-11, 1e-8)


@given(
    p=st.integers(2, 64),
    ratio=st.floats(1.1, 64),
    encode=st.floats(1e-11, 1e-8),
    decode=st.floats(1e-11, 1e-8),
    num_bytes=st.floats(1, 1e9),
)
def test_break_even_is_where_saved_and_spent_are_equal(
    p: int, ratio: float, encode: float, decode: float, num_bytes: float
) -> None:
    rate = theory.ring_break_even_bandwidth(p, ratio, encode, decode)
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=rate)
    wire_s = theory.wire_s(num_bytes, p, network)
    spent = num_bytes * (encode + decode) + (p - 1) / p * num_bytes * max(0.0, decode - 1 / (ratio * rate))
    assert wire_s * (1 - 1 / ratio) == pytest.approx(spent)


def test_the_smallest_useful_ratio_just_hides_communication() -> None:
    link, p, num_bytes = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8, sum_s_per_byte=1e-10), 8, 1e8
    whole = Ring().seconds(num_bytes, p, link)
    for share in (0.2, 0.5, 0.9):
        ratio = theory.smallest_useful_ratio(share * whole, num_bytes, p, link, codec_s=0.01)
        quicker = replace(link, bandwidth_bytes_per_s=ratio * link.bandwidth_bytes_per_s)
        assert Ring().seconds(num_bytes, p, quicker) + 0.01 == pytest.approx(share * whole)
    assert theory.smallest_useful_ratio(whole * 1.000001, num_bytes, p, link, codec_s=9.0) == 1.0, (
        "it hides without a codec"
    )
    assert theory.smallest_useful_ratio(0.01, num_bytes, p, link) == math.inf, "latency alone takes longer"
    assert theory.break_even_bandwidth(1.0, 0.0) == math.inf
    for wrong in ((1, 2.0), (4, 0.5)):
        with pytest.raises(ConfigError):
            theory.ring_break_even_bandwidth(*wrong, 1e-9, 1e-9)
