"""Evaluations come on schedule, even if a rank is slow, drops its gradients or leaves.

An evaluation of step s is due when the run has made the updates of s + 1 steps. No rank's speed may change which
evaluations there are. If a slow worker delays no other (a server takes the gradients that come first), its number may
not change their times.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.laws import tiny
from tests.laws.train import by_turns, train
from tests.laws.variants import name_of, representatives, variants
from workbench.algorithms import AsyncSGD, BackupSGD, PartialAllReduce, SoftsyncSGD, StaleSynchronousSGD
from workbench.costs import Compute, Network, SlowMachines
from workbench.program import Algorithm
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

WORKERS, STEPS, EVERY, SLOWER = 4, 12, 2, 9.7  # not a whole number: no ties with the quick ones
settings = partial(Settings, steps=STEPS, batch_size=2, timeout_s=30, optimizer=tiny.sgd, seed=3, evaluate_every=EVERY)
SCHEDULE = list(range(EVERY - 1, STEPS, EVERY))


def train_with_slow(algorithm: Algorithm, slow: int | None, num_ranks: int = WORKERS) -> Run:
    """On simulated workers, one of which is 10 times slower; the network costs next to nothing."""
    stragglers = () if slow is None else (SlowMachines(factor_of={slow: SLOWER}),)  # type: ignore[arg-type]  # pairs or a dictionary
    compute = Compute(forward_s=0.3, backward_s=0.7, update_s=0.001, stragglers=stragglers)
    network = Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    problem = tiny.problem(num_samples=24)  # all batches are whole, so that workers are equal
    return Simulation(algorithm, problem, settings(), num_ranks, network=network, compute=compute).run()


def num_ranks_of(algorithm: Algorithm) -> int:
    """The number of ranks of which `WORKERS` compute."""
    return next(
        (number for number in range(WORKERS, 2 * WORKERS + 1) if algorithm.roles(number).num_computing == WORKERS), 1
    )


VARIANTS = variants()


@pytest.mark.parametrize("algorithm", VARIANTS, ids=name_of)
def test_the_schedule_is_the_same_whichever_rank_is_slow(algorithm: Algorithm) -> None:
    """None, and each rank in turn, for one variant of each algorithm; one rank, another for each, for the others."""
    num_ranks = num_ranks_of(algorithm)
    ranks = range(min(WORKERS, num_ranks))
    for slow in (None, *ranks) if algorithm in representatives() else [VARIANTS.index(algorithm) % len(ranks)]:
        steps = [row["step"] for row in train_with_slow(algorithm, slow, num_ranks).evaluations()]
        assert steps == SCHEDULE, f"rank {slow} is slow: evaluated after steps {steps}"


NOBODY_WAITS = [
    BackupSGD(backups=1, dedicated=True),
    BackupSGD(backups=2),
    AsyncSGD(),
    AsyncSGD(dedicated=True),
    AsyncSGD(shards=3),
    SoftsyncSGD(),
    PartialAllReduce(quorum=3),
]


@pytest.mark.parametrize("algorithm", NOBODY_WAITS, ids=name_of)
def test_the_time_of_an_evaluation_does_not_depend_on_which_rank_is_slow(algorithm: Algorithm) -> None:
    """Workers are equal but for their numbers, so the mirror image of a run takes the same time."""
    num_ranks = num_ranks_of(algorithm)
    times = [
        [row["seconds"] for row in train_with_slow(algorithm, slow, num_ranks).evaluations()] for slow in range(WORKERS)
    ]
    for slow, found in enumerate(times):
        assert np.allclose(found, times[-1], rtol=0.05, atol=0.05), (
            f"rank {slow} slow: {found}; rank {WORKERS - 1} slow: {times[-1]}"
        )


def test_an_update_counts_as_many_steps_as_it_has_gradients_of_the_workers() -> None:
    """3 quick workers make 3 updates a second and a slow one 0.1: the evaluation of step s is due after 4 (s + 1) updates."""
    run = train_with_slow(AsyncSGD(), 0)
    updates = [row["seconds"] for row in run.updates()]
    for row in run.evaluations()[:-1]:
        assert row["seconds"] == updates[WORKERS * (row["step"] + 1) - 1]


@pytest.mark.parametrize("algorithm", [BackupSGD(backups=1), BackupSGD(backups=0, timeout_s=0.5)], ids=name_of)
def test_each_update_of_synchronous_sgd_counts_as_a_step_whatever_it_waited_for(algorithm: Algorithm) -> None:
    """The slow worker's gradient is dropped once in some ten updates, so gradients would count less than an update."""
    run = train_with_slow(algorithm, 0)
    updates = [row["seconds"] for row in run.updates()]
    assert len(updates) == STEPS
    assert [row["seconds"] for row in run.evaluations()] == [updates[step] for step in SCHEDULE]


def test_the_last_evaluation_is_of_the_last_update() -> None:
    """A backup worker whose gradient comes too late ends alone; the parameters were final before."""
    run = train_with_slow(BackupSGD(backups=1), 0)
    assert run.evaluations()[-1]["seconds"] == pytest.approx(max(row["seconds"] for row in run.updates()))
    assert run.evaluations()[-1]["seconds"] < run.info["result"]["seconds"] - 1.0
    assert run.info["result"]["steps"] == STEPS, "rank 0 skipped steps, and the run did not"


def test_dropped_gradients_move_the_schedule_as_applied_ones_do() -> None:
    for slow in (None, *range(WORKERS)):
        run = train_with_slow(AsyncSGD(cutoff=0), slow)
        assert any(row["dropped"] for row in run.updates())
        assert [row["step"] for row in run.evaluations()] == SCHEDULE


def test_a_worker_that_leaves_takes_no_evaluation_with_it() -> None:
    for algorithm in (AsyncSGD(), BackupSGD(backups=1), SoftsyncSGD(), StaleSynchronousSGD()):
        compute, network = Compute(forward_s=0.3, backward_s=0.7), Network(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
        simulation = Simulation(
            algorithm, tiny.problem(), settings(), WORKERS, network=network, compute=compute, failures={2: 3.5}
        )
        found = simulation.run().evaluations()
        assert [row["step"] for row in found] == SCHEDULE
        assert max(np.diff([row["seconds"] for row in found])) < 2.5 * EVERY, (
            "the last ones did not all come at the end"
        )


def test_a_resumed_run_keeps_the_schedule() -> None:
    for algorithm in (AsyncSGD(shards=2), BackupSGD(backups=1), SoftsyncSGD()):
        first = train("simulated", 3, algorithm, tiny.problem(), settings(), stop_after=5)
        second = train("simulated", 3, algorithm, tiny.problem(), settings(), resume=first.checkpoint)
        before, after = ([row["step"] for row in part.run.evaluations()] for part in (first, second))
        assert before[-1] not in SCHEDULE[:-1] or before == SCHEDULE[: len(before)], (
            "the last one is where the run stopped"
        )
        missing = [step for step in SCHEDULE if step not in before]
        assert missing
        assert [step for step in after if step not in before] == missing


@by_turns(
    [
        *(item for item in representatives() if item.requires.servers),
        BackupSGD(dedicated=True),
        AsyncSGD(shards=2),
        PartialAllReduce(),
    ],
    turn=1,
)
def test_on_real_ranks_too(algorithm: Algorithm, runtime: str) -> None:
    run = train(runtime, 3, algorithm, tiny.problem(), settings()).run
    assert [row["step"] for row in run.evaluations()] == SCHEDULE
    times = [row["seconds"] for row in run.evaluations()]
    assert times == sorted(times)
    assert algorithm.replicas.equal_parameters or len(set(times)) == len(times), "one moment each"
