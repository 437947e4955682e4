"""Networks by name, seconds of compute, and measurements of a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from workbench import costs
from workbench.costs import Compute, Lognormal, Network, Topology, Windows, measure_compute, measure_steps
from workbench.costs.measure import _fixed_share, _middle, _of_backward, _of_forward
from workbench.costs.stragglers import Failures
from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.problems import Problem

# ---------------------------------------------------------------- networks


@pytest.mark.parametrize(
    ("name", "gigabytes_per_s"),
    [
        ("ethernet-1g", 0.125),
        ("ethernet-10g", 1.25),
        ("ethernet-25g", 3.125),
        ("ethernet-100g", 12.5),
        ("ethernet-200g", 25.0),
        ("ethernet-400g", 50.0),
        ("infiniband-hdr", 25.0),
        ("infiniband-ndr", 50.0),
        ("nvlink-2", 150.0),
        ("nvlink-3", 300.0),
        ("nvlink-4", 450.0),
        ("pcie-3", 15.754),
        ("pcie-4", 31.508),
        ("pcie-5", 63.015),
        ("shared-memory", 10.0),
        ("wan-100m", 0.0125),
        ("wan-1g", 0.125),
    ],
)
def test_profiles_have_their_nominal_rate(name: str, gigabytes_per_s: float) -> None:
    network = costs.get(name)
    assert isinstance(network, Network)
    assert network.bandwidth_bytes_per_s == pytest.approx(gigabytes_per_s * 1e9, rel=1e-4)
    assert 0.5e-6 < network.latency_s < 0.1


def test_profiles_are_those_that_have_a_name() -> None:
    made = {name.replace("_", "-"): value for name, value in vars(costs).items() if isinstance(value, Network)}
    assert {name: costs.get(name) for name in costs.names()} == made
    assert set(made) == set(costs.names()) and set(costs.__all__) <= set(vars(costs))


def test_what_a_network_says_of_itself() -> None:
    assert str(costs.wan_1g) == "1 Gbit/s WAN (50 ms, 1 Gbit/s, 0 ns a summed byte)"
    assert str(costs.ethernet_10g) == "10 Gbit/s Ethernet (30 µs, 10 Gbit/s, 0 ns a summed byte)"


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("8x nvlink-3 + ethernet-10g", Topology(between=costs.ethernet_10g, inside=costs.nvlink_3, ranks_per_host=8)),
        ("8xNVLink-3+Ethernet-10g", Topology(between=costs.ethernet_10g, inside=costs.nvlink_3, ranks_per_host=8)),
        (
            "8x nvlink-4 + 8x infiniband-ndr",
            Topology(between=costs.infiniband_ndr, inside=costs.nvlink_4, ranks_per_host=8, nics_per_host=8),
        ),
        (
            "ethernet-25g / 16 hosts 4:1",
            Topology(between=costs.ethernet_25g, hosts_per_switch=16, oversubscription=4.0),
        ),
        ("ethernet-25g/16hosts,2.5:1", Topology(between=costs.ethernet_25g, hosts_per_switch=16, oversubscription=2.5)),
        ("ethernet-25g / 1 host", Topology(between=costs.ethernet_25g, hosts_per_switch=1)),
        (
            "4x pcie-4 + 2x ethernet-100g / 8 hosts 3:1",
            Topology(
                between=costs.ethernet_100g,
                inside=costs.pcie_4,
                ranks_per_host=4,
                nics_per_host=2,
                hosts_per_switch=8,
                oversubscription=3.0,
            ),
        ),
    ],
)
def test_topologies_by_name(text: str, topology: Topology) -> None:
    assert costs.get(text) == topology


def test_a_topology_s_name_can_be_read_back_by_a_reader() -> None:
    assert (
        costs.get("4xpcie-4+2xethernet-100g/8hosts3:1").name == "4x PCIe 4 x16 + 2x 100 Gbit/s Ethernet / 8 hosts 3:1"
    )
    slow = Topology(between=costs.ethernet_1g, rates=((2, 0.5), (0, 0.25, 1)))
    assert slow.name == "1 Gbit/s Ethernet, host 0 at 0.25 out, 1 in of the rate, host 2 at 0.5 of the rate"
    assert slow.bandwidth_bytes_per_s == 0.25 * costs.ethernet_1g.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("ethernet10g", "did you mean ethernet-10g"),
        ("infiniband", "did you mean infiniband"),
        ("8x nvlink + ethernet-10g", "did you mean nvlink"),
        ("8x nvlink-3 + ethernet-10", "did you mean ethernet-10"),
        ("8x nvlink-3 + 2x pcie-4 + ethernet-10g", "write .*8x nvlink-3"),
        ("ethernet-10g / 4:1", "16 hosts 4:1"),
        ("ethernet-10g /", "16 hosts 4:1"),
        ("8x nvlink-3 +", "write "),
        ("3x nvlink-3 + 2x ethernet-10g", "divides ranks_per_host"),
        ("2x ethernet-10g", "divides ranks_per_host"),
        ("0x nvlink-3 + ethernet-10g", "1 or more"),
        ("", "no network is called ''"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_fix(text: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        costs.get(text)


@pytest.mark.parametrize(
    "wrong", [{"latency_s": -1e-6}, {"latency_s": math.nan}, {"bandwidth_bytes_per_s": 0}, {"sum_s_per_byte": -1}]
)
def test_a_network_s_numbers_are_refused_where_they_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        replace(costs.ethernet_10g, **wrong)


# ---------------------------------------------------------------- compute


def test_few_samples_take_the_fixed_part_and_their_share_of_the_rest() -> None:
    compute = Compute(forward_s=1.0, backward_s=3.0, fixed_share=0.25)
    assert compute.seconds(1.0) == (1.0, 3.0)
    assert compute.seconds(0.5) == (0.625, 1.875)
    assert compute.seconds(0.0) == (0.0, 0.0), "who has no samples computes nothing"
    assert compute.time_share(np.array([1.0, 0.5, 0.0])).tolist() == [1.0, 0.625, 0.0]
    assert replace(compute, fixed_share=0.0).seconds(0.5) == (0.5, 1.5)
    assert "25% of forward and backward for any batch" in str(compute)


def test_two_laws_of_one_kind_draw_numbers_of_their_own() -> None:
    one = Compute(forward_s=1, backward_s=1, stragglers=Lognormal(sigma=0.3)).factors(0, 0, 2000)
    two = Compute(forward_s=1, backward_s=1, stragglers=(Lognormal(sigma=0.3), Lognormal(sigma=0.3))).factors(
        0, 0, 2000
    )
    assert np.array_equal(one, Lognormal(sigma=0.3).factors(0, 0, 2000))
    assert abs(np.corrcoef(np.log(two / one), np.log(one))[0, 1]) < 0.1
    assert np.log(two).std() == pytest.approx(0.3 * math.sqrt(2), rel=0.1)


def test_a_timed_law_leaves_factors_alone() -> None:
    compute = Compute(
        forward_s=1, backward_s=1, stragglers=(Windows(windows=((0.0, 10.0, 2.0),)), Lognormal(sigma=0.3))
    )
    assert not Compute(forward_s=1, backward_s=1, stragglers=Lognormal(sigma=0.3)).timed and compute.timed
    assert compute.finish_s(0, 0, 4.0, 1.0) == 6.0
    assert compute.factors(0, 0, 4).std() > 0


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"forward_s": -1.0}, "0 or more"),
        ({"backward_s": math.nan}, "0 or more"),
        ({"update_s": math.inf}, "finite"),
        ({"fixed_share": 1.5}, "0 to 1"),
        ({"forward_shares": (0.5, 0.6)}, "sum to 1"),
        ({"backward_shares": (-0.5, 1.5)}, "0 or more"),
        ({"stragglers": ("lognormal:0.3",)}, "costs.stragglers.get"),
        ({"stragglers": (Failures(mean_between_s=1), Failures(mean_between_s=2))}, "combine them into one"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_fix(wrong: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        Compute(**{"forward_s": 1.0, "backward_s": 1.0, **wrong})


# ---------------------------------------------------------------- measured


class Clock:
    """In place of the machine's: it moves when a layer says that it has computed."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("workbench.costs.measure.time", found)
    return found


Spend = Callable[[float], None]


class Busy(torch.autograd.Function):
    """Computes for these seconds, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, spend: Spend, forward_s: float, backward_s: float) -> Tensor:
        ctx.spend, ctx.backward_s = spend, backward_s
        spend(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.spend(ctx.backward_s)
        return grads[0], None, None, None


class Slow(nn.Module):
    """One weight; seconds for the pass, and more for each sample."""

    def __init__(self, spend: Spend, forward_s: float, backward_s: float, a_sample_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.spend, self.seconds = spend, (forward_s, backward_s, a_sample_s)

    def forward(self, value: Tensor) -> Tensor:
        forward_s, backward_s, a_sample_s = self.seconds
        more = a_sample_s * len(value)
        # Its backward, then the weight's
        return Busy.apply(value * self.weight, self.spend, forward_s + more, backward_s + 2 * more)


class Chain(nn.Module):
    """Layers one after the other, after a parameter that is not used."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


def problem(*layers: nn.Module, batch_size: int = 8) -> Problem:
    return Problem(
        model=partial(Chain, list(layers)),
        loss=lambda output, target: ((output - target) ** 2).mean(),
        train=(torch.ones(32, 1), torch.zeros(32, 1)),
        batch_size=batch_size,
        correct=None,
    )


MS = 1e-3


def three_layers(spend: Spend) -> list[nn.Module]:
    """Of 1, 4 and 2 ms forward, 2, 1 and 5 ms backward."""
    return [Slow(spend, 1 * MS, 2 * MS), Slow(spend, 4 * MS, 1 * MS), Slow(spend, 2 * MS, 5 * MS)]


def test_a_model_s_seconds_and_shares_are_measured(clock: Clock) -> None:
    class Paced(torch.optim.SGD):
        def step(self, *args: Any, **named: Any) -> Any:
            clock.spend(0.5 * MS)
            return super().step(*args, **named)

    measured = measure_steps(problem(*three_layers(clock.spend)), optimizer=partial(Paced, lr=0.1), steps=5)
    compute = measured.compute
    assert (compute.forward_s, compute.backward_s, compute.update_s) == pytest.approx((7 * MS, 8 * MS, 0.5 * MS))
    assert compute.forward_shares == pytest.approx((0, 1 / 7, 4 / 7, 2 / 7))  # the unused one is registered first
    assert compute.backward_shares == pytest.approx((0, 2 / 8, 1 / 8, 5 / 8))
    assert measured.forward_s.shape == measured.backward_s.shape == measured.update_s.shape == (5,)
    assert measured.spread == pytest.approx(0, abs=1e-9)
    assert compute.fixed_share == pytest.approx(1), "these layers take their time for any batch"


def test_seconds_are_medians_and_the_spread_is_told(clock: Clock) -> None:
    """One step in four is ten times as slow; steps of the small batch and those that are looked into come in between."""
    steps = 0

    def spend(seconds: float) -> None:
        nonlocal steps
        steps += 1
        clock.spend(seconds * (10 if steps % 16 < 4 else 1))  # two passes a step, two steps a turn

    measured = measure_steps(problem(Slow(spend, 1 * MS, 3 * MS)), steps=16)
    assert (measured.compute.forward_s, measured.compute.backward_s) == pytest.approx((1 * MS, 3 * MS))
    assert measured.forward_s.max() == pytest.approx(10 * MS)
    assert measured.spread == pytest.approx(2.25)  # from 4 ms to a quarter of the way to 40 ms, over 4 ms


def test_shares_say_when_buckets_are_ready_and_needed(clock: Clock) -> None:
    layers = three_layers(clock.spend)
    compute = measure_compute(problem(*layers), steps=3)
    layout = build_layout(trainable(Chain(layers)), 0)
    assert compute.ready_shares(layout) == pytest.approx((5 / 8, 6 / 8, 1, 1))
    assert compute.forward_parts(layout) == pytest.approx((2 / 7, 4 / 7, 1 / 7, 0))


@pytest.mark.parametrize(("fixed", "a_sample"), [(4 * MS, 0.25 * MS), (0.0, 0.25 * MS)])
def test_the_part_that_does_not_shrink_with_the_batch_is_measured(clock: Clock, fixed: float, a_sample: float) -> None:
    compute = measure_compute(problem(Slow(clock.spend, fixed, 2 * fixed, a_sample), batch_size=16), steps=5)
    assert compute.fixed_share == pytest.approx(fixed / (fixed + 16 * a_sample), abs=1e-9)
    assert compute.seconds(0.25) == pytest.approx((fixed + 4 * a_sample, 2 * (fixed + 4 * a_sample)))


def test_the_machine_s_clock_is_read_where_none_is_given() -> None:
    """Other work on this machine can only make it longer."""

    def spin(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    compute = measure_compute(problem(Slow(spin, 2 * MS, 3 * MS)), steps=2)
    assert compute.forward_s >= 2 * MS and compute.backward_s >= 3 * MS and compute.update_s > 0
    assert sum(compute.forward_shares) == pytest.approx(1) and sum(compute.backward_shares) == pytest.approx(1)


def test_a_batch_too_small_to_tell_has_no_fixed_part() -> None:
    """And batch norm is never given a single sample."""
    made = problem(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1), batch_size=2)
    assert measure_compute(made, steps=1).fixed_share == 0
    assert 0 <= measure_compute(made, batch_size=5, steps=1).fixed_share <= 1
    for wrong in ({"steps": 0}, {"batch_size": -1}):
        with pytest.raises(ConfigError):
            measure_compute(made, **wrong)


def test_measuring_leaves_the_random_state_and_the_threads_alone() -> None:
    made = problem(nn.Linear(1, 1), nn.Dropout(0.5))
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    measure_compute(made, steps=1, threads=threads + 1)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_arithmetic_of_shares() -> None:
    """Module 0 holds parameters 0 and 1 (3 and 1 elements), module 1 parameter 2, and is called twice; parameter 3 is in none."""
    parameters = [torch.zeros(3), torch.zeros(1), torch.zeros(5), torch.zeros(1)]
    found = _of_forward([1, 0, 1], [0.0, 1.0, 3.0, 7.0, 10.0], [[0, 1], [2]], parameters)
    assert found is not None
    assert found.tolist() == pytest.approx([0.3, 0.1, 0.6, 0.0])
    assert _of_forward([], [0.0, 1.0], [], parameters) is None
    # Module 2 is tied to module 0: its 3 seconds are spent where it runs, after module 1.
    tied = _of_forward([0, 1, 2], [0.0, 1.0, 3.0, 7.0, 10.0], [[0, 1], [2], [0, 1]], parameters)
    assert tied is not None and tied.tolist() == pytest.approx([0.225, 0.075, 0.7, 0.0])
    # Arrivals at 4, 5, 2, 3 seconds of parameters 0 to 3; 4 is not reached. Buckets leave from the last on.
    assert _of_backward(np.array([4.0, 5.0, 2.0, 3.0, 0.0])).tolist() == pytest.approx([0, 0.4, 0, 0.6, 0])
    assert _of_backward(np.zeros(3)).tolist() == [1, 0, 0], "quicker than the clock: all at the end"
    middle = _middle([np.array([0.5, 0.5]), np.array([0.4, 0.6]), np.array([0.0, 1.0])])
    assert middle == pytest.approx((0.4, 0.6))
    rows, few_rows = np.array([[4.0, 6.0, 1.0]]), np.array([[2.0, 3.0, 1.0]])
    assert _fixed_share(8, rows, 2, few_rows) == pytest.approx(1 / 3)  # 5 s at 2, 10 s at 8: 10 / 3 s at 0
    assert _fixed_share(8, rows, 2, rows * 2) == 1.0 and _fixed_share(8, rows, 2, rows / 100) == 0.0
