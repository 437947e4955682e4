"""SimPy as an independent oracle: the same algorithms, written a second time on it, end every step at the same moment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.laws import tiny
from tests.laws.simpy_cluster import (
    AllReduce,
    Cluster,
    Costs,
    Shard,
    Way,
    equal_links,
    halving_doubling,
    library,
    parameter_servers,
    pipe_sgd,
    ring,
    tree,
)
from workbench.algorithms import AsyncSGD, BackupSGD, ParameterServerSGD, PipeSGD, SynchronousSGD
from workbench.algorithms.parameter_server import ServerAlgorithm
from workbench.collectives import Collective, HalvingDoubling, Native, Ring, Tree
from workbench.costs import AnyNetwork, Compute, Lognormal, Network, SlowMachines, Topology
from workbench.gradients import Layout
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulate import run_simulation
from workbench.runtimes.simulator.worker import shape_of
from workbench.settings import Settings
from workbench.trace.run import Run

# A message of the model takes as long as a step
SLOW = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e4, sum_s_per_byte=3e-5)
QUICK = Network(latency_s=2e-3, bandwidth_bytes_per_s=1e6)
STEADY = Compute(forward_s=0.01, backward_s=0.02, update_s=0.003)
JITTERY = replace(STEADY, stragglers=(Lognormal(sigma=0.6),))


def simulated(
    algorithm: Algorithm,
    ranks: int,
    steps: int,
    network: AnyNetwork,
    compute: Compute,
    seed: int = 0,
    numel: int = 0,
    **how: Any,
) -> tuple[Run, Layout, Costs]:
    """Our run, timing only, all minibatches full; how the gradient lies; and what SimPy's needs to know of it."""
    problem = problem_of(algorithm.roles(ranks).num_computing, numel)
    chosen = Settings(steps=steps, batch_size=2, seed=seed)
    run = run_simulation(algorithm, problem, chosen, ranks, network=network, compute=compute, timing_only=True, **how)
    costs = Costs(
        way=equal_links(network.latency_s, 1 / network.bandwidth_bytes_per_s),
        sum_s_per_byte=network.sum_s_per_byte,
        forward_s=compute.forward_s,
        backward_s=compute.backward_s,
        update_s=compute.update_s,
        factors=[compute.factors(seed, step, ranks).tolist() for step in range(steps)],
    )
    return run, shape_of(problem, algorithm), costs


def problem_of(workers: int, numel: int) -> Problem:
    """A vector of that many parameters, or four tensors of 128, 16, 64 and 4; two steps to an epoch."""
    model: Any = partial(nn.Linear, numel, 1, bias=False)
    if not numel:
        model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))  # noqa: E731
    return tiny.problem(model=model, num_samples=4 * workers, test=None)


def agree(run: Run, oracle: Cluster) -> None:
    """Every step of every rank, and the run, end when SimPy says."""
    for rank, ends in enumerate(oracle.ends):
        ours = [row["seconds"] for row in run.metrics.get(rank, ()) if "staleness" in row]
        assert ours == pytest.approx(ends, rel=1e-9, abs=0.0), f"rank {rank}"
    assert run.info["result"]["seconds"] == pytest.approx(float(oracle.env.now), rel=1e-9)


# -- sums over all ranks ---------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    ranks=st.integers(1, 7),
    steps=st.integers(1, 4),
    width=st.integers(1, 3),
    numel=st.integers(1, 90),
    network=st.sampled_from([SLOW, QUICK]),
    sigma=st.sampled_from([0.0, 0.3, 1.5]),
    seed=st.integers(0, 1000),
)
def test_ring(ranks: int, steps: int, width: int, numel: int, network: Network, sigma: float, seed: int) -> None:
    """Blocks that differ by an element or are empty; ranks that begin together or far apart; one to three gradients in flight."""
    compute = replace(STEADY, stragglers=(Lognormal(sigma=sigma),))
    run, layout, costs = simulated(PipeSGD(width=width, collective=Ring()), ranks, steps, network, compute, seed, numel)
    agree(run, pipe_sgd(costs, ranks, steps, width, ring(layout.numel, layout.itemsize)))


def oracle_of(collective: Collective, layout: Layout, ranks: int, network: Network) -> AllReduce:
    if isinstance(collective, Tree):
        return tree(layout.message_bytes)
    if isinstance(collective, HalvingDoubling):
        return halving_doubling(layout.numel, layout.itemsize)
    hops, share = 2 * (ranks - 1), (ranks - 1) / ranks * layout.message_bytes
    return library(hops * network.latency_s + share * (2 / network.bandwidth_bytes_per_s + network.sum_s_per_byte))


@pytest.mark.parametrize("compute", [STEADY, JITTERY], ids=["steady", "jittery"])
@pytest.mark.parametrize("network", [SLOW, QUICK], ids=["slow", "quick"])
@pytest.mark.parametrize(
    ("collective", "ranks"),
    [
        (Tree(), 2),
        (Tree(), 5),
        (Tree(), 8),
        (HalvingDoubling(), 2),
        (HalvingDoubling(), 4),
        (HalvingDoubling(), 8),
        (Native(), 4),
    ],
    ids=str,
)
def test_other_sums(collective: Collective, ranks: int, network: Network, compute: Compute) -> None:
    for width in (1, 2):
        how: dict[str, Any] = {"detail": "messages"}
        run, layout, costs = simulated(PipeSGD(width=width, collective=collective), ranks, 3, network, compute, **how)
        agree(run, pipe_sgd(costs, ranks, 3, width, oracle_of(collective, layout, ranks, network)))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_one_program_for_all_workers(width: int) -> None:
    """A row of metrics is then the last worker's."""
    run, layout, costs = simulated(PipeSGD(width=width), 32, 6, SLOW, JITTERY)
    assert any("one program" in note for note in run.info["notes"])
    oracle = pipe_sgd(costs, 32, 6, width, oracle_of(Native(), layout, 32, SLOW))
    assert [row["seconds"] for row in run.steps()] == pytest.approx(
        [max(ends) for ends in zip(*oracle.ends, strict=True)], rel=1e-9
    )
    assert run.info["result"]["seconds"] == pytest.approx(float(oracle.env.now), rel=1e-9)


def test_synchronous_sgd_is_a_pipe_of_one() -> None:
    run, layout, costs = simulated(SynchronousSGD(collective=Ring()), 5, 4, SLOW, JITTERY)
    agree(run, pipe_sgd(costs, 5, 4, 1, ring(layout.numel, layout.itemsize)))


# -- parameter servers -----------------------------------------------------------------------------------------


def shards_of(algorithm: ServerAlgorithm, layout: Layout, ranks: int) -> list[Shard]:
    """Backward reaches a shard when the parameters of those before it, and its own, are done."""
    sizes = [sum(slot.numel for slot in piece.slots) for piece in layout.buckets]
    first = algorithm.roles(ranks).num_computing if algorithm.dedicated else 0
    return [
        Shard(
            rank=first + piece.index if algorithm.dedicated else piece.index % ranks,
            num_bytes=(piece.stop - piece.start) * layout.itemsize,
            ready=min(1.0, done / sum(sizes)),
            update=(piece.stop - piece.start) / layout.numel,
        )
        for piece, done in zip(layout.buckets, accumulate(sizes), strict=True)
    ]


def machines(*factors: float) -> Compute:
    return replace(STEADY, stragglers=(SlowMachines(factor_of=tuple(enumerate(factors))),))


# But for this: of two that come at one moment either may be the first
EQUAL = machines(*(1 + 1e-6 * rank for rank in range(7)))
UNEQUAL = machines(1.31, 2.17, 1.05)
ALGORITHMS = [
    AsyncSGD(),
    AsyncSGD(shards=2),
    AsyncSGD(shards=3, dedicated=True),
    ParameterServerSGD(),
    ParameterServerSGD(shards=2),
    ParameterServerSGD(shards=2, dedicated=True),
    BackupSGD(backups=1),
    BackupSGD(backups=2, dedicated=True),
]


@pytest.mark.parametrize("compute", [EQUAL, UNEQUAL, JITTERY], ids=["equal", "unequal", "jittery"])
@pytest.mark.parametrize("network", [SLOW, QUICK], ids=["slow", "quick"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_parameter_servers(algorithm: ServerAlgorithm, network: Network, compute: Compute) -> None:
    """On a worker's rank, whose interface they share, and on separate ranks."""
    for ranks in (4, 7):
        run, layout, costs = simulated(algorithm, ranks, 5, network, compute)
        workers = algorithm.roles(ranks).num_computing
        quorum = workers - int(algorithm.backups) if isinstance(algorithm, BackupSGD) else None
        agree(run, parameter_servers(costs, ranks, workers, 5, shards_of(algorithm, layout, ranks), quorum))


# -- shared interfaces and switches ----------------------------------------------------------------------------


def racks(sender: int, to: int) -> Way:
    """Two ranks a host, with one interface; two hosts a leaf switch, whose uplink has a quarter of their rate. Host 1 sends at half
    of it, host 2 receives at a quarter."""
    host, other = sender // 2, to // 2
    if host == other:
        return 1e-4, {("port out", sender): 1e-6, ("port in", to): 1e-6}
    between = {("out", host): 1e-4 * (2 if host == 1 else 1), ("in", other): 1e-4 * (4 if other == 2 else 1)}
    if host // 2 != other // 2:
        between |= {("up", host // 2): 4e-4 / 2, ("down", other // 2): 4e-4 / 2}
    return 1e-3, between


RACKS = Topology(
    between=Network(latency_s=1e-3, bandwidth_bytes_per_s=1e4),
    inside=Network(latency_s=1e-4, bandwidth_bytes_per_s=1e6),
    ranks_per_host=2,
    hosts_per_switch=2,
    oversubscription=4.0,
    rates=((1, 0.5, 1.0), (2, 1.0, 0.25)),
)


def test_a_ring_over_racks() -> None:
    run, layout, costs = simulated(PipeSGD(width=2, collective=Ring()), 11, 3, RACKS, JITTERY)
    agree(run, pipe_sgd(replace(costs, way=racks), 11, 3, 2, ring(layout.numel, layout.itemsize)))


@pytest.mark.parametrize("algorithm", [AsyncSGD(shards=2), ParameterServerSGD(shards=3, dedicated=True)], ids=str)
def test_parameter_servers_over_racks(algorithm: ServerAlgorithm) -> None:
    """Messages of ranks, of servers on the same host, and their replies all pass the host's one interface."""
    run, layout, costs = simulated(algorithm, 11, 4, RACKS, JITTERY)
    workers = algorithm.roles(11).num_computing
    quorum = workers if isinstance(algorithm, BackupSGD) else None
    agree(run, parameter_servers(replace(costs, way=racks), 11, workers, 4, shards_of(algorithm, layout, 11), quorum))
