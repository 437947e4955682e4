"""An update has the right gradients, each once, and every other gradient is accounted for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import pytest

from tests.laws import owed, tiny
from tests.laws.train import COMPUTE, NETWORK, Wrapper, on_all_runtimes, train
from tests.laws.variants import name_of, variants
from workbench.algorithms import AsyncSGD, BackupSGD, OnlineBackupSGD, PartialAllReduce, Quorum, SoftsyncSGD
from workbench.costs import Compute, Lognormal, Network
from workbench.gradients import WEIGHT
from workbench.ops import Apply, EndStep, Program
from workbench.program import Algorithm, Context
from workbench.runtimes.simulator.simulate import simulate
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

HOW = Settings(steps=8, batch_size=3, timeout_s=30)
NUM_RANKS = 4


def of_shard(run: Run, shard: int) -> list[dict[str, Any]]:
    return [update for update in run.updates() if update["bucket"] == shard]


def applied(update: dict[str, Any]) -> list[tuple[int, int]]:
    """(source, version) of each gradient in it."""
    return [
        (source, update["update"] - 1 - late)
        for source, late in zip(update["sources"], update["staleness"], strict=True)
    ]


def check_once(run: Run, shard: int) -> None:
    """No gradient is in two updates, and none is both applied and dropped."""
    used = [push for update in of_shard(run, shard) for push in applied(update)]
    dropped = [tuple(push) for update in of_shard(run, shard) for push in update["dropped"]]
    assert max(Counter([*used, *dropped]).values()) == 1


BACKUP = [
    BackupSGD(backups=0),
    BackupSGD(backups=1),
    BackupSGD(backups=2, shards=2),
    BackupSGD(backups=1, dedicated=True),
    BackupSGD(backups=1, timeout_s=0.2),
    OnlineBackupSGD(),
]


@on_all_runtimes
@pytest.mark.parametrize("algorithm", BACKUP, ids=name_of)
def test_an_update_sums_the_first_n_gradients_of_its_own_version(
    algorithm: BackupSGD | OnlineBackupSGD, runtime: str
) -> None:
    run = train(runtime, NUM_RANKS, algorithm, tiny.problem(), HOW).run
    workers = algorithm.roles(NUM_RANKS).num_computing
    for shard in range(algorithm.shards):
        mine = of_shard(run, shard)
        assert [update["update"] for update in mine] == list(range(1, HOW.steps + 1)), "one update a step"
        for update in mine:
            assert set(update["staleness"]) == {0}
            assert len(set(update["sources"])) == len(update["sources"])
            if isinstance(algorithm, BackupSGD) and algorithm.timeout_s is None:
                assert len(update["sources"]) == workers - algorithm.backups
            for _, version in update["dropped"]:
                assert version < update["update"], "dropped because it was late"
        check_once(run, shard)
        pushed = sum(len(rows_of(run, rank)) for rank in range(workers))
        seen = sum(len(update["sources"]) + len(update["dropped"]) for update in mine)
        if algorithm.shards == 1:
            assert 0 <= pushed - seen <= workers, "at most one gradient a worker was dropped after the last update"


def rows_of(run: Run, rank: int) -> list[dict[str, Any]]:
    return [row for row in run.metrics[rank] if "evaluation" not in row]


def test_a_step_is_the_oldest_version_that_it_read() -> None:
    """Shards on two servers, which differ in version: a worker takes the minibatch of the oldest of these versions."""
    uneven = Compute(forward_s=0.01, backward_s=0.02, stragglers=(Lognormal(sigma=0.8),))
    busy = Network(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    run = simulate(
        BackupSGD(backups=2, shards=2),
        tiny.problem(),
        workers=5,
        steps=30,
        evaluate_every=0,
        compute=uneven,
        network=busy,
    )
    apart = 0
    for rank, rows in run.metrics.items():
        pushes = [
            sorted(
                version
                for update in of_shard(run, shard)
                for source, version in [*applied(update), *map(tuple, update["dropped"])]
                if source == rank
            )
            for shard in (0, 1)
        ]
        for row, first, second in zip(
            rows, *pushes, strict=False
        ):  # a worker that has had its last version of a shard pushes the other alone
            assert row["step"] == min(first, second), (
                f"worker {rank} read versions {first} and {second} and took step {row['step']}"
            )
            apart += first != second
    assert apart > 5, "versions were to differ"


@on_all_runtimes
@pytest.mark.parametrize(
    "algorithm", [AsyncSGD(), AsyncSGD(cutoff=1), AsyncSGD(cutoff=0), SoftsyncSGD(splits=2)], ids=name_of
)
def test_every_push_is_applied_or_dropped(algorithm: Algorithm, runtime: str) -> None:
    run = train(runtime, NUM_RANKS, algorithm, tiny.problem(), HOW).run
    if not isinstance(algorithm, SoftsyncSGD):  # a quick worker may push twice between two updates
        check_once(run, 0)
    mine = of_shard(run, 0)
    used = Counter(source for update in mine for source in update["sources"])
    dropped = Counter(source for update in mine for source, _ in update["dropped"])
    for rank in range(NUM_RANKS):
        rows = rows_of(run, rank)
        marked = sum(bool(row.get("dropped")) for row in rows)
        assert len(rows) == HOW.steps
        assert used[rank] + marked == HOW.steps, "the worker was told of each gradient that was dropped"
        assert dropped[rank] <= marked, "of those after the last update no update tells"
    if getattr(algorithm, "cutoff", None) is None:
        assert not dropped


def test_softsync_updates_once_for_every_group() -> None:
    for splits in (1, 2, 4):
        run = train("simulated", NUM_RANKS, SoftsyncSGD(splits=splits), tiny.problem(), HOW).run
        sizes = [len(update["sources"]) for update in of_shard(run, 0)]
        assert sizes == [NUM_RANKS // splits] * (HOW.steps * splits)


@pytest.mark.parametrize("divide", [True, False])
def test_softsync_divides_each_gradient_by_its_staleness(divide: bool) -> None:
    """Every gradient is one: the parameters go by the sum over updates of the mean of 1 / max(1, staleness)."""
    situation = owed.Situation(num_samples=960, constant=True)
    algorithm = SoftsyncSGD(splits=4, divide=divide)
    simulation = Simulation(
        algorithm, situation.problem(), situation.settings(12, 0), 4, network=owed.NETWORK, compute=owed.COMPUTE
    )
    updates = simulation.run().updates()
    late = [update["staleness"] for update in updates]
    assert {2, 3} <= {staleness for of_update in late for staleness in of_update}
    expected = (
        sum(np.mean([1 / max(1, staleness) for staleness in of_update]) for of_update in late)
        if divide
        else len(updates)
    )
    np.testing.assert_allclose(owed.ended(simulation).applied[0], expected, rtol=1e-12)


def test_a_server_s_worker_clips_the_mean_of_its_own_samples() -> None:
    """Every gradient is 53 ones.

    An update of norm 2 moves each parameter by 2 / sqrt(53), for any share of the batch.
    """
    situation = owed.Situation(num_samples=960, constant=True)
    algorithm = AsyncSGD(clip_norm=2.0)
    simulation = Simulation(
        algorithm, situation.problem(), situation.settings(6, 0), 4, network=owed.NETWORK, compute=owed.COMPUTE
    )
    updates = simulation.run().updates()
    np.testing.assert_allclose(owed.ended(simulation).applied[0], len(updates) * 2 / 53**0.5, rtol=1e-6)


def test_a_rest_of_gradients_makes_a_last_update() -> None:
    """Three workers by twos: 24 pushes of 3 x 8, and with 7 steps 21, of which the last is alone."""
    run = train("simulated", 5, SoftsyncSGD(splits=2), tiny.problem(), Settings(steps=7, batch_size=3)).run
    sizes = [len(update["sources"]) for update in of_shard(run, 0)]
    assert sizes == [2] * 17 + [1]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Wrapper):
    """Another algorithm, whose updates are noted."""

    heard: list[tuple[int, int, tuple[tuple[int, int], ...], float]] = field(default_factory=list, compare=False)

    def worker(self, ctx: Context) -> Program:
        program, answer, round_number = self.inner.worker(ctx), None, 0
        while True:
            try:
                request = program.send(answer)
            except StopIteration:
                return
            if isinstance(request, Apply):
                weight = float(request.gradient.tail()[WEIGHT])
                self.heard.append((ctx.rank, round_number, request.of, weight))
                round_number += 1
            if isinstance(request, EndStep):
                assert request.step == round_number - 1, "every step ends with its round"
            answer = yield request


@pytest.mark.parametrize("quorum", [Quorum.SOLO, Quorum.MAJORITY, Quorum.ALL, 2], ids=str)
def test_a_round_sums_what_was_not_yet_used(quorum: Quorum | int) -> None:
    """Each rank's own gradients once; the summed weight is that of the minibatches in it, each a share of a quarter."""
    algorithm = PartialAllReduce(quorum=quorum)
    listening = Listening(inner=algorithm)
    problem = tiny.problem(num_samples=24)  # every share is full
    Simulation(listening, problem, HOW, NUM_RANKS, network=NETWORK, compute=COMPUTE).run()
    of_round: Counter[int] = Counter()
    weights: dict[int, set[float]] = {}
    for rank in range(NUM_RANKS):
        own = [(number, of) for by, number, of, _ in listening.heard if by == rank]
        assert [number for number, _ in own] == list(range(HOW.steps))
        pushes = [push for _, of in own for push in of]
        assert len(set(pushes)) == len(pushes) and {source for source, _ in pushes} <= {rank}
        for number, of in own:
            of_round[number] += len(of)
            assert all(version <= number for _, version in of)
    for _, number, _, weight in listening.heard:
        weights.setdefault(number, set()).add(weight)
    for number, found in weights.items():
        assert len(found) == 1, "all ranks applied the same sum"
        assert found.pop() == pytest.approx(of_round[number] / NUM_RANKS)
        assert of_round[number] >= 1
    if quorum == Quorum.ALL:
        assert set(of_round.values()) == {NUM_RANKS}


def test_every_quorum_is_among_the_laws() -> None:
    assert {item.quorum for item in variants() if isinstance(item, PartialAllReduce)} >= set(Quorum)
