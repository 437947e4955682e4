"""A worker of a simulated cluster leaves, at any time: every algorithm with servers continues."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK
from tests.laws.variants import name_of, variants
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    NoCommunication,
    OnlineBackupSGD,
    ParameterServerSGD,
    SoftsyncSGD,
    StaleSynchronousSGD,
    SynchronousSGD,
)
from workbench.algorithms.parameter_server import ServerAlgorithm
from workbench.costs import Compute
from workbench.costs.stragglers import SlowMachines
from workbench.errors import ConfigError
from workbench.laws.sentences import assert_equal_ranks
from workbench.program import can_lose, settings_of
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

STEPS, RANKS = 8, 5
HOW = Settings(steps=STEPS, batch_size=3, seed=2, optimizer=tiny.momentum)
ALGORITHMS = [item for item in variants() if item.requires.servers]


def lose(
    algorithm: Any, leaves: dict[int, float], *, ranks: int = RANKS, timing_only: bool = False, how: Settings = HOW
) -> Simulation:
    """Run to the end; the record is `simulation.found`."""
    problem = tiny.problem(test=None) if timing_only else tiny.problem()
    return Simulation(
        algorithm,
        problem,
        how,
        ranks,
        network=NETWORK,
        compute=COMPUTE,
        timing_only=timing_only,
        check_in_flight=not timing_only,
        failures=leaves,
    )


def sources(run: Run) -> Counter[tuple[int, int]]:
    """(worker, shard) -> its gradients in updates."""
    return Counter((source, update["bucket"]) for update in run.updates() for source in update["sources"])


def last_lost(algorithm: ServerAlgorithm) -> int:
    """The last rank that can be lost."""
    return next(rank for rank in reversed(range(RANKS)) if can_lose(algorithm, rank, RANKS))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
@pytest.mark.parametrize("at_s", [0.55, 2.3, 4.9])
def test_the_others_end_and_hold_the_same(algorithm: ServerAlgorithm, at_s: float) -> None:
    victim = last_lost(algorithm)
    simulation = lose(algorithm, {victim: at_s})
    run = simulation.run()
    assert run.info["departures"] == [{"rank": victim, "seconds": at_s, "why": "as was planned"}]
    workers = [rank for rank in range(algorithm.roles(RANKS).num_computing) if rank != victim]
    final = [simulation.workers[rank].trained.read_parameters() for rank in workers]
    law = f"{name_of(algorithm)}: those that remain are equal at the end"
    assert_equal_ranks(law, final, f"at the end, ranks {workers} without rank {victim}, by position")
    used, shards = sources(run), {update["bucket"] for update in run.updates()}
    for shard in shards:
        assert used[victim, shard] < STEPS
        if algorithm.max_staleness is None and getattr(algorithm, "cutoff", None) is None:
            assert [used[rank, shard] for rank in workers] == [STEPS] * len(workers), (
                "each of the others' gradients is used once"
            )
        if algorithm.max_staleness == 0:
            assert max(update["update"] for update in run.updates() if update["bucket"] == shard) == STEPS
    if algorithm.max_staleness != 0:  # else a late worker leaves steps out
        assert [run.metrics[rank][-1]["step"] for rank in workers] == [STEPS - 1] * len(workers)


@settings(max_examples=20, deadline=None)
@given(
    algorithm=st.sampled_from(
        [AsyncSGD(), StaleSynchronousSGD(bound=0), SoftsyncSGD(), BackupSGD(backups=1), OnlineBackupSGD()]
    ),
    first=st.floats(0, 12),
    second=st.floats(0, 12),
    shards=st.integers(1, 2),
)
def test_whenever_two_of_them_leave(algorithm: ServerAlgorithm, first: float, second: float, shards: int) -> None:
    algorithm = type(algorithm)(**{**settings_of(algorithm), "shards": shards})
    run = lose(algorithm, {3: first, 4: second}).run()
    if algorithm.max_staleness != 0:
        assert run.metrics[0][-1]["step"] == STEPS - 1
    assert all(row["seconds"] in (first, second) for row in run.info["departures"])


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_a_quorum_is_of_those_that_are_there(backups: int) -> None:
    """b includes the workers that have left: an update takes p - b gradients while that many workers are there, then one from each."""
    run = lose(BackupSGD(backups=backups), {3: 2.2, 4: 4.4}).run()
    counts = [len(update["sources"]) for update in run.updates()]
    assert counts[0] == RANKS - backups
    assert counts[-1] == min(RANKS - backups, RANKS - 2)
    assert counts == sorted(counts, reverse=True)
    for update in run.updates():
        assert len(set(update["sources"])) == len(update["sources"])


def test_what_it_had_sent_is_used_with_all_the_others() -> None:
    """PS-Sync: the update that a worker's last gradient is in waits for every other worker's, and drops none."""
    for at_s in (1.2, 1.6, 2.0, 2.4, 2.8, 3.2, 3.6):
        run = lose(ParameterServerSGD(), {4: at_s}).run()
        assert all({0, 1, 2, 3} <= set(update["sources"]) for update in run.updates())
        assert not any(update["dropped"] for update in run.updates())


def test_nobody_waits_for_the_clock_of_one_that_has_left() -> None:
    """Stale synchronous, bound 0: without that, every worker would wait for its next push forever."""
    run = lose(StaleSynchronousSGD(bound=0), {2: 1.5}).run()
    assert sources(run)[1, 0] == STEPS


def test_who_trains_alone_is_not_missed() -> None:
    run = lose(NoCommunication(), {2: 3.3, 4: 0.5}).run()
    assert [run.metrics[rank][-1]["step"] for rank in (0, 1, 3)] == [STEPS - 1] * 3
    assert max(row["step"] for row in run.metrics[2]) < STEPS - 1


def test_time_is_the_same_without_values() -> None:
    how = Settings(steps=STEPS, batch_size=3, seed=2)
    for algorithm in (AsyncSGD(), BackupSGD(backups=1), SoftsyncSGD()):
        runs = [lose(algorithm, {4: 2.7}, timing_only=only, how=how).run() for only in (False, True)]
        updates = [[(row["update"], row["sources"], round(row["seconds"], 9)) for row in run.updates()] for run in runs]
        assert updates[0] == updates[1]


@pytest.mark.parametrize(
    ("algorithm", "rank"),
    [(AsyncSGD(), 0), (AsyncSGD(shards=2), 1), (SynchronousSGD(), 1), (AsyncSGD(dedicated=True), 4)],
)
def test_who_cannot_be_done_without(algorithm: Any, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot continue without rank {rank}"):
        lose(algorithm, {rank: 1.0})


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({5: 1.0}, "there is no rank 5 among 5; choose 1 to 4"),
        ({-1: 1.0}, "there is no rank -1"),
        ({"4": 1.0}, "there is no rank '4'"),
        ({True: 1.0}, "there is no rank True"),
        ({0: 1.0}, "cannot continue without rank 0"),
        ({4: -0.5}, "rank 4 fails at -0.5; give finite virtual seconds, 0 or more"),
        ({4: float("inf")}, "rank 4 fails at inf"),
        ({4: float("nan")}, "rank 4 fails at nan"),
        ({4: "soon"}, "rank 4 fails at 'soon'"),
    ],
)
def test_failures_that_cannot_be_simulated_are_refused(failures: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        wb.simulate(AsyncSGD(), tiny.problem(), workers=RANKS, compute=COMPUTE, failures=failures, steps=2)


@pytest.mark.parametrize("detail", ["auto", "messages"])
def test_a_symmetric_algorithm_is_refused_however_it_is_simulated(detail: Any) -> None:
    with pytest.raises(ConfigError, match="cannot continue without rank 1"):
        wb.simulate(
            SynchronousSGD(), tiny.problem(), workers=3, compute=COMPUTE, failures={1: 1.0}, detail=detail, steps=2
        )


def test_simulate_loses_a_worker() -> None:
    run = wb.simulate(
        AsyncSGD(),
        tiny.problem(),
        workers=RANKS,
        network=NETWORK,
        compute=COMPUTE,
        failures={4: 0},
        steps=STEPS,
        batch_size=3,
    )
    assert run.info["departures"] == [{"rank": 4, "seconds": 0.0, "why": "as was planned"}]
    assert sources(run)[4, 0] == 0
    assert sources(run)[3, 0] == STEPS


def test_the_run_ends_with_those_that_remain() -> None:
    """What the lost worker was computing would have taken a hundred seconds; the others need about ten."""
    compute = Compute(forward_s=0.3, backward_s=0.7, stragglers=(SlowMachines(factor_of={4: 100.0}),))
    run = wb.simulate(
        AsyncSGD(),
        tiny.problem(),
        workers=RANKS,
        network=NETWORK,
        compute=compute,
        failures={4: 1.0},
        steps=STEPS,
        batch_size=3,
    )
    assert run.info["result"]["seconds"] < 50
