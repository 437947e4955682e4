"""Topologies: what messages share on their way, and that the library's collectives take what their messages would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.laws import tiny
from tests.laws.world import Timed
from workbench import costs
from workbench.algorithms import SynchronousSGD
from workbench.collectives import Collective, Hierarchical, Native, Ring
from workbench.collectives.hierarchical import among
from workbench.costs import AnyNetwork, Compute, Failures, Network, Topology
from workbench.errors import ConfigError
from workbench.gradients import block_bounds, build_layout, trainable
from workbench.ops import Program, Recv, Send, Start, Wait
from workbench.program import Context, perform
from workbench.runtimes.simulator.simulate import Detail, run_simulation
from workbench.settings import Settings

FAST = Network(latency_s=2e-6, bandwidth_bytes_per_s=100e9, sum_s_per_byte=1e-11, name="inside")
SLOW = Network(latency_s=30e-6, bandwidth_bytes_per_s=1e9, sum_s_per_byte=1e-11, name="between")


def hosts(ranks: int, **more: Any) -> Topology:
    return Topology(between=SLOW, inside=FAST, ranks_per_host=ranks, **more)


def seconds_of(network: AnyNetwork, num_ranks: int, flows: list[tuple[int, int, int]]) -> float:
    """Messages (from, to, bytes) that all begin at once; until the last is there."""

    def program(rank: int) -> Program:
        tickets = []
        for number, (sender, receiver, num_bytes) in enumerate(flows):
            value = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            if rank == sender:
                tickets.append((yield Start(Send(receiver, value, number))))
            if rank == receiver:
                tickets.append((yield Start(Recv(sender, value, number))))
        for ticket in tickets:
            yield Wait(ticket)

    return Timed([program(rank) for rank in range(num_ranks)], network).run()


# ---------------------------------------------------------------- what is shared


def test_ranks_of_a_host_share_its_interface() -> None:
    """Four flows out of one host take four times one; a second interface halves that."""
    num_bytes = 10**6
    flows = [(rank, 4 + rank, num_bytes) for rank in range(4)]
    assert seconds_of(hosts(4), 8, flows[:1]) == pytest.approx(SLOW.send_s(num_bytes))
    assert seconds_of(hosts(4), 8, flows) == pytest.approx(SLOW.send_s(4 * num_bytes))
    assert seconds_of(hosts(4, nics_per_host=2), 8, flows) == pytest.approx(SLOW.send_s(2 * num_bytes))
    assert seconds_of(hosts(4, nics_per_host=2), 8, flows[:2]) == pytest.approx(SLOW.send_s(2 * num_bytes)), (
        "neighbours share one"
    )


def test_a_server_has_one_interface() -> None:
    num_bytes = 10**6
    gather = [(rank, 0, num_bytes) for rank in range(1, 6)]
    for network in (SLOW, Topology(between=SLOW)):
        assert seconds_of(network, 6, gather) == pytest.approx(SLOW.send_s(5 * num_bytes))


def test_both_ways_of_a_link_are_free_of_each_other() -> None:
    num_bytes = 10**6
    for network in (SLOW, Topology(between=SLOW), hosts(4)):
        assert seconds_of(network, 8, [(0, 4, num_bytes), (4, 0, num_bytes)]) == pytest.approx(SLOW.send_s(num_bytes))


def test_inside_a_host_the_interface_is_not_used() -> None:
    num_bytes = 10**6
    inside = [(0, 1, num_bytes), (2, 3, num_bytes)]
    assert seconds_of(hosts(4), 8, inside) == pytest.approx(FAST.send_s(num_bytes))
    assert seconds_of(hosts(4), 8, [*inside, (0, 4, num_bytes)]) == pytest.approx(SLOW.send_s(num_bytes))


@pytest.mark.parametrize("over", [1.0, 2.0, 4.0])
def test_an_oversubscribed_switch_slows_what_leaves_it(over: float) -> None:
    """Four hosts a leaf: among themselves at full rate, all at once to the next leaf at 1 / over of it, one alone at full rate."""
    network = Topology(between=SLOW, hosts_per_switch=4, oversubscription=over)
    num_bytes = 10**6
    assert seconds_of(network, 8, [(0, 1, num_bytes), (2, 3, num_bytes)]) == pytest.approx(SLOW.send_s(num_bytes))
    across = [(host, 4 + host, num_bytes) for host in range(4)]
    assert seconds_of(network, 8, across) == pytest.approx(SLOW.send_s(over * num_bytes))
    assert seconds_of(network, 8, across[:1]) == pytest.approx(SLOW.send_s(num_bytes))


def test_a_slow_host_slows_both_ways_or_one() -> None:
    num_bytes = 10**6
    network = Topology(between=SLOW, rates=((1, 0.5), (2, 0.25, 1.0)))
    times = [
        seconds_of(network, 4, [pair])
        for pair in ((0, 3, num_bytes), (1, 0, num_bytes), (0, 1, num_bytes), (2, 0, num_bytes))
    ]
    assert times == pytest.approx([SLOW.send_s(num_bytes * slower) for slower in (1, 2, 2, 4)])
    assert seconds_of(network, 4, [(0, 2, num_bytes)]) == pytest.approx(SLOW.send_s(num_bytes)), "in at full rate"


def test_flows_that_share_a_stage_end_when_fair_sharing_would_end_the_last() -> None:
    """Of 3, 1 and 2 MB out of one interface, in whatever order."""
    sizes = (3 * 10**6, 10**6, 2 * 10**6)
    for order in ((0, 1, 2), (2, 0, 1)):
        flows = [(index, 4 + index, sizes[index]) for index in order]
        assert seconds_of(hosts(4), 8, flows) == pytest.approx(SLOW.send_s(sum(sizes)))


# ---------------------------------------------------------------- collectives


def ring(ctx: Context, value: torch.Tensor, half: str) -> Program:
    yield from perform(getattr(Ring(), half)(ctx, value))


def two_levels(ctx: Context, value: torch.Tensor, half: str, group: int) -> Program:
    """Reduce-scatter inside a host, a ring among those of one place in their hosts, all-gather inside."""
    host, place = divmod(ctx.rank, group)
    mine = range(host * group, (host + 1) * group)
    peers = range(place, ctx.num_workers, group)
    bounds = block_bounds(value.numel(), group)
    inner = replace(ctx, rank=place, num_workers=group)
    outer = replace(ctx, rank=host, num_workers=len(peers))
    if half != "all_gather":
        yield from among(mine, ring(inner, value, "reduce_scatter"))
    yield from among(peers, ring(outer, value[bounds[place] : bounds[place + 1]], half))
    if half != "reduce_scatter":
        yield from among(mine, ring(inner, value, "all_gather"))


def run(network: AnyNetwork, num_ranks: int, numel: int, program: Any) -> float:
    values = [torch.zeros(numel, device="meta") for _ in range(num_ranks)]
    return Timed([program(Context(rank, num_ranks), value) for rank, value in enumerate(values)], network).run()


def without_sums(network: Topology) -> Topology:
    """Sums that take no time: those of ranks on quick links are done while the slow ones still send, which the closed forms leave out."""
    inside = network.inside and replace(network.inside, sum_s_per_byte=0.0)
    return replace(network, between=replace(network.between, sum_s_per_byte=0.0), inside=inside)


def hidden_s(network: Topology, numel: int, num_ranks: int) -> float:
    """All sums of a rank."""
    return (num_ranks - 1) * 4 * -(-numel // num_ranks) * network.sum_s_per_byte


HALVES = ["all_reduce", "reduce_scatter", "all_gather"]


def closed(network: AnyNetwork, half: str, numel: int, num_ranks: int) -> float:
    found: float = getattr(network, f"{half}_s")(4 * numel, num_ranks)
    return found


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("numel", [840, 840_000])
@pytest.mark.parametrize(
    ("network", "num_ranks"),
    [
        (Topology(between=SLOW), 6),
        (Topology(between=SLOW, rates=((2, 0.5),)), 5),
        (Topology(between=SLOW, rates=((2, 0.5, 1.0), (7, 0.1))), 5),
        (Topology(between=SLOW, hosts_per_switch=2, oversubscription=4.0), 6),
        (Topology(between=SLOW, hosts_per_switch=2, oversubscription=4.0), 2),
        (hosts(4), 4),
        (hosts(4), 6),
        (hosts(4, hosts_per_switch=1, oversubscription=2.0), 7),
    ],
    ids=lambda item: getattr(item, "name", str(item)),
)
def test_the_library_s_ring_takes_what_its_messages_do(
    network: Topology, num_ranks: int, numel: int, half: str
) -> None:
    """On hosts of one rank, on one host, and on hosts that are not full."""
    messages = run(network, num_ranks, numel, lambda ctx, value: ring(ctx, value, half))
    found = closed(network, half, numel, num_ranks)
    assert found * (1 + 1e-9) >= messages >= (found - hidden_s(network, numel, num_ranks)) * (1 - 1e-9)
    network = without_sums(network)
    messages = run(network, num_ranks, numel, lambda ctx, value: ring(ctx, value, half))
    assert closed(network, half, numel, num_ranks) == pytest.approx(messages, rel=1e-9)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("numel", [16 * 50, 16 * 50_000])
@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize(
    "network",
    [
        hosts(4),
        hosts(4, nics_per_host=2),
        hosts(4, nics_per_host=4),
        hosts(2, rates=((1, 0.5),)),
        hosts(4, hosts_per_switch=2, oversubscription=4.0),
        hosts(4, nics_per_host=4, hosts_per_switch=2, oversubscription=8.0),
    ],
    ids=lambda item: getattr(item, "name", str(item)),
)
def test_on_full_hosts_it_takes_the_quicker_of_a_ring_and_two_levels(
    network: Topology, num_ranks: int, numel: int, half: str
) -> None:
    def quicker(network: Topology) -> float:
        flat = run(network, num_ranks, numel, lambda ctx, value: ring(ctx, value, half))
        return min(
            flat,
            run(network, num_ranks, numel, lambda ctx, value: two_levels(ctx, value, half, network.ranks_per_host)),
        )

    found = closed(network, half, numel, num_ranks)
    assert found * (1 + 1e-9) >= quicker(network) >= (found - hidden_s(network, numel, num_ranks)) * (1 - 1e-9)
    network = without_sums(network)
    assert closed(network, half, numel, num_ranks) == pytest.approx(quicker(network), rel=1e-9)


def test_two_levels_win_where_latency_counts_and_where_hosts_have_several_interfaces() -> None:
    for network, numel in ((hosts(4), 16), (hosts(4, nics_per_host=4), 16 * 50_000)):
        flat = run(network, 16, numel, lambda ctx, value: ring(ctx, value, "all_reduce"))
        assert closed(network, "all_reduce", numel, 16) < 0.5 * flat


def test_hierarchical_by_messages_is_between_a_flat_ring_and_the_library() -> None:
    """By latency, at 16 ranks on 4 hosts; its leaders alone talk to other hosts."""
    network, numel = hosts(4), 16 * 10
    flat = run(network, 16, numel, lambda ctx, value: ring(ctx, value, "all_reduce"))
    ours = run(network, 16, numel, lambda ctx, value: perform(Hierarchical(group=4).all_reduce(ctx, value)))
    assert closed(network, "all_reduce", numel, 16) < ours < 0.5 * flat


def test_one_rank_a_host_is_the_flat_network() -> None:
    network = Topology(between=SLOW)
    for num_ranks in (1, 2, 7, 64):
        for name in ("all_reduce_s", "reduce_scatter_s", "all_gather_s", "broadcast_s"):
            assert getattr(network, name)(1e6, num_ranks) == pytest.approx(getattr(SLOW, name)(1e6, num_ranks)), name
        assert network.barrier_s(num_ranks) == SLOW.barrier_s(num_ranks)
    assert (network.latency_s, network.bandwidth_bytes_per_s, network.sum_s_per_byte) == (30e-6, 1e9, 1e-11)
    assert network.local_s("sum", 1e6) == SLOW.local_s("sum", 1e6)


def test_a_broadcast_and_a_barrier_cross_hosts_as_rarely_as_they_can() -> None:
    network = hosts(8, hosts_per_switch=4, oversubscription=16.0)
    assert network.broadcast_s(1e6, 8) == FAST.broadcast_s(1e6, 8)
    assert network.broadcast_s(1e6, 32) == pytest.approx(2 * SLOW.send_s(1e6) + FAST.broadcast_s(1e6, 8))
    assert network.broadcast_s(1e6, 64) == pytest.approx(
        2 * SLOW.send_s(1e6) + SLOW.send_s(4e6) + FAST.broadcast_s(1e6, 8)
    )
    assert network.barrier_s(64) == pytest.approx(3 * SLOW.latency_s + 3 * FAST.latency_s)


def test_more_of_anything_is_never_quicker() -> None:
    network = costs.get("8x nvlink-3 + ethernet-25g / 4 hosts 4:1")
    for name in ("all_reduce_s", "reduce_scatter_s", "all_gather_s", "broadcast_s"):
        of_size = [getattr(network, name)(num_bytes, 64) for num_bytes in (0, 1e3, 1e6, 1e9)]
        of_hosts = [getattr(network, name)(1e8, 8 * num) for num in (1, 2, 4, 8, 16)]
        assert of_size == sorted(of_size) and of_hosts == sorted(of_hosts), name


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("collective", [Native(), Ring()], ids=str)
def test_a_simulated_step_sums_over_the_topology(collective: Collective) -> None:
    """Hosts that are not full, so that both are the ring; six parameters' elements, of which blocks are nearly alike."""
    network, compute = hosts(4, rates=((1, 0.25),)), Compute(forward_s=0.01, backward_s=0.02, update_s=0.001)
    found = run_simulation(
        SynchronousSGD(collective=collective),
        tiny.problem(),
        Settings(steps=3, batch_size=1),
        6,
        network=network,
        compute=compute,
        timing_only=True,
    )
    layout = build_layout(trainable(tiny.problem().model()))
    expected = 0.031 + network.all_reduce_s(layout.message_bytes, 6)
    assert found.info["result"]["seconds"] / 3 == pytest.approx(expected, rel=2e-4)
    assert any(network.name in note for note in found.info["notes"])


@pytest.mark.parametrize("detail", ["auto", "messages"])
def test_a_run_with_failures_waits_for_whoever_is_away(detail: Detail) -> None:
    """Alike in one program and in many, and a pure function of the seed; each synchronous step ends with its last worker's."""
    law = Failures(mean_between_s=15.0, repair_s=7.0)
    compute = Compute(forward_s=1.0, backward_s=2.0, stragglers=law)

    def seconds(seed: int) -> float:
        settings = Settings(steps=7, batch_size=1, seed=seed)  # of an epoch of 23 samples, so all batches are full
        how: dict[str, Any] = {"network": costs.free, "compute": compute, "timing_only": True, "detail": detail}
        return float(run_simulation(SynchronousSGD(), tiny.problem(), settings, 3, **how).info["result"]["seconds"])

    def by_hand(seed: int) -> float:
        now = 0.0
        for _ in range(7):
            now = max(law.finish_s(seed, rank, law.finish_s(seed, rank, now, 1.0), 2.0) for rank in range(3))
        return now

    assert seconds(0) == pytest.approx(by_hand(0)) and seconds(0) > 7 * 3.0
    assert seconds(1) == pytest.approx(by_hand(1)) != pytest.approx(seconds(0))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ({"ranks_per_host": 4}, "inside="),
        ({"inside": "nvlink-3", "ranks_per_host": 4}, "a Network, such as"),
        ({"ranks_per_host": 0}, "1 or more"),
        ({"inside": FAST, "ranks_per_host": 4, "nics_per_host": 3}, "divides ranks_per_host"),
        ({"oversubscription": 4.0}, "set hosts_per_switch"),
        ({"hosts_per_switch": 2, "oversubscription": 0.0}, "4 for 4:1"),
        ({"hosts_per_switch": 0}, "1 or more"),
        ({"rates": ((0, 0.0),)}, "factors above 0"),
        ({"rates": ((0,),)}, "factor out, factor in"),
        ({"rates": ((0, 1.0), (0, 2.0))}, "twice"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_fix(wrong: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        Topology(between=SLOW, **wrong)
