"""Staleness: the measured one against each algorithm's definition."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, by_turns, on_all_runtimes, on_real_runtimes, train
from tests.laws.variants import in_step, name_of, representatives, variants
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    Geometric,
    OnlineBackupSGD,
    SoftsyncSGD,
    StaleSGD,
    StaleSynchronousSGD,
    Uniform,
)
from workbench.costs import Compute, Lognormal, Network
from workbench.laws.declared import check_staleness
from workbench.laws.sentences import NotTried, assert_same_rows
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

HOW = Settings(steps=8, batch_size=3, timeout_s=30)


def late(run: Run) -> list[int]:
    """Staleness of every gradient that a server applied."""
    return [value for update in run.updates() for value in update["staleness"]]


def of_equal_workers(algorithm: Algorithm, num_ranks: int, steps: int) -> Run:
    """Many steps of workers of equal speed, with nearly no time for messages: staleness is then that of the algorithm."""
    how = Settings(steps=steps, batch_size=1)
    compute, network = Compute(forward_s=0.3, backward_s=0.7), Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    problem = tiny.problem(num_samples=60)  # no batch is short
    return Simulation(algorithm, problem, how, num_ranks, network=network, compute=compute, timing_only=True).run()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shards", [1, 2])
def test_of_asynchronous_workers_it_is_p_less_one(num_ranks: int, shards: int) -> None:
    """Between a worker's read and its push every other worker pushes once.

    Only the first p pushes find fewer before them.
    """
    steps = 40
    found = late(of_equal_workers(AsyncSGD(shards=shards), num_ranks, steps))
    shortfall = num_ranks * (num_ranks - 1) / 2  # 0 + 1 + ... + p - 1 instead of p (p - 1), a shard
    assert len(found) == shards * num_ranks * steps
    assert num_ranks - 1 - 2 * shortfall / (num_ranks * steps) <= mean(found) <= num_ranks - 1
    if shards == 1:
        assert mean(found) == pytest.approx(num_ranks - 1 - shortfall / (num_ranks * steps), abs=1e-9)
        assert max(found) == num_ranks - 1


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_of_softsync_it_is_about_n(splits: int) -> None:
    """p gradients make n updates; a worker's own is one of the p since its read: n less the share of its own group."""
    found = late(of_equal_workers(SoftsyncSGD(splits=splits), 4, 40))
    assert splits - 1 - 1.5 / 40 <= mean(found) <= splits  # the first p pushes find fewer updates
    assert max(found) <= 2 * splits, "bounded by 2n, as its authors observe"


def slow_rank(algorithm: Algorithm, num_ranks: int, jitter: float = 1.0) -> Run:
    """Workers of very unequal steps."""
    compute = Compute(forward_s=0.3, backward_s=0.7, stragglers=(Lognormal(sigma=jitter),))
    return Simulation(
        algorithm,
        tiny.problem(),
        Settings(steps=30, batch_size=1),
        num_ranks,
        network=NETWORK,
        compute=compute,
        timing_only=True,
    ).run()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_stale_synchronous_workers_keep_within_their_bound(bound: int) -> None:
    num_ranks = 4
    run = slow_rank(StaleSynchronousSGD(bound=bound), num_ranks)
    assert max(late(run)) <= (num_ranks - 1) * (2 * bound + 1)
    clocks = dict.fromkeys(range(num_ranks), 0)
    lead = 0
    for update in run.updates():
        (source,) = update["sources"]
        clocks[source] += 1
        lead = max(lead, clocks[source] - min(clocks.values()))
    assert lead <= bound + 1, "a push that was computed when its worker was just within the bound"
    assert bound == 0 or lead > 1, "the bound was tried"


@pytest.mark.parametrize("cutoff", [0, 1, 2])
def test_a_cut_off_is_never_exceeded(cutoff: int) -> None:
    run = slow_rank(AsyncSGD(cutoff=cutoff), 4)
    assert max(late(run)) == cutoff
    assert any(update["dropped"] for update in run.updates())


@by_turns([item for item in representatives() if item.requires.servers], turn=1, simulated=True)
def test_on_servers_it_is_within_what_the_algorithm_says(algorithm: Algorithm, runtime: str) -> None:
    trained = train(runtime, 3, algorithm, tiny.problem(), HOW)
    found = late(trained.run)
    assert min(found) >= 0
    if algorithm.max_staleness is not None:
        assert max(found) <= algorithm.max_staleness
    bound = getattr(algorithm, "bound", None)
    if bound is not None:
        assert max(found) <= 2 * (2 * bound + 1)


@pytest.mark.parametrize("algorithm", in_step(variants()), ids=name_of)
def test_in_step_it_is_within_what_the_algorithm_says(algorithm: Algorithm) -> None:
    with suppress(NotTried):
        check_staleness(algorithm, 3)


@on_all_runtimes
@pytest.mark.parametrize(
    "algorithm", [StaleSGD(staleness=Uniform(0, 3)), StaleSGD(staleness=Geometric(2.0, 5), ramp_steps=4)], ids=name_of
)
def test_injected_staleness_is_what_was_drawn(algorithm: StaleSGD, runtime: str) -> None:
    trained = train(runtime, 2, algorithm, tiny.problem(), HOW)
    drawn = [min(algorithm.drawn(HOW.seed, step), step) for step in range(8)]
    assert any(drawn)
    for rank in range(2):
        found = [row["staleness"] for row in trained.rows(rank)]
        assert_same_rows(f"{name_of(algorithm)}: staleness is what was drawn", found, drawn, f"by step, rank {rank}")


@on_real_runtimes
def test_asynchronous_real_workers_find_one_another_s_updates(runtime: str) -> None:
    """By chance anything from 0; but p workers' pushes lie between one another's, so the mean is not 0."""
    found = late(train(runtime, 3, AsyncSGD(), tiny.problem(), HOW).run)
    assert len(found) == 24
    assert 0 < mean(found) <= 23


def versions(run: Run, shard: int) -> list[dict[str, Any]]:
    return [update for update in run.updates() if update["bucket"] == shard]


@pytest.mark.parametrize("algorithm", [item for item in variants() if item.requires.servers], ids=name_of)
def test_updates_are_numbered_in_order(algorithm: Algorithm) -> None:
    run = train("simulated", 3, algorithm, tiny.problem(), HOW).run
    for shard in {update["bucket"] for update in run.updates()}:
        mine = versions(run, shard)
        assert [update["update"] for update in mine] == list(range(1, len(mine) + 1))
        assert all(one["seconds"] <= two["seconds"] for one, two in pairwise(mine))
        if isinstance(algorithm, BackupSGD | OnlineBackupSGD):
            assert not any(late(run))
    assert COMPUTE.stragglers, "workers of unequal steps"
