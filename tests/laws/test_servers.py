"""Algorithms with parameter servers: the state after a stop, the case of one worker, and the limits of the synchronous ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.laws import tiny
from tests.laws.reference import serial
from tests.laws.train import (
    COMPUTE,
    NETWORK,
    REAL,
    RUNTIMES,
    Trained,
    assert_same,
    by_turns,
    on_all_runtimes,
    relative_error,
    train,
)
from tests.laws.variants import name_of, representatives, variants
from workbench.algorithms import AsyncSGD, BackupSGD, DelayCompensatedSGD, ParameterServerSGD
from workbench.algorithms.parameter_server import LAST, stamp_of
from workbench.errors import ConfigError
from workbench.gradients import Gradient, build_layout, trainable
from workbench.laws.sentences import assert_near
from workbench.ops import Apply, Local, Message, PackParameters, Recv
from workbench.problems.base import Problem
from workbench.program import Algorithm, Context
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings

ROUNDING = 1e-12
STEPS = 7
settings = partial(Settings, steps=STEPS, batch_size=3, timeout_s=30, optimizer=tiny.momentum, seed=3)
WITH_SERVERS = [item for item in variants() if item.requires.servers]


def skips_steps(algorithm: Algorithm) -> bool:
    """Whether a late worker leaves steps out: where staleness is bounded by 0, it must."""
    return algorithm.max_staleness == 0


def check_stop(runtime: str, algorithm: Algorithm, how: Settings, first: Trained) -> None:
    """A stopped run says so, and resumed it takes the steps that are left, once each."""
    num_workers, law = algorithm.roles(3).num_computing, f"{name_of(algorithm)}: replicas are equal at an end"
    assert first.run.info["status"] == "stopped"
    for rank in range(num_workers):
        assert_near(law, first.parameters[rank][-1], first.final, 0.0, f"at the early end, rank {rank} unlike rank 0")
    second = train(runtime, 3, algorithm, tiny.problem(), how, resume=first.checkpoint)
    assert second.run.info["status"] == "finished"
    for rank in range(num_workers):
        assert_near(law, second.parameters[rank][-1], second.final, 0.0, f"at the end, rank {rank} unlike rank 0")
        steps = [row["step"] for part in (first, second) for row in part.rows(rank)]
        assert steps == sorted(set(steps)) if skips_steps(algorithm) else steps == list(range(STEPS))
    shards = {update["bucket"] for update in first.run.updates()}
    for shard in shards:
        mine = [[update for update in part.run.updates() if update["bucket"] == shard] for part in (first, second)]
        assert [update["update"] for part in mine for update in part] == list(range(1, sum(map(len, mine)) + 1))
        if skips_steps(algorithm):
            assert sum(map(len, mine)) == STEPS, "one update a step"
        for part in mine:
            for update in part:
                for late in update["staleness"]:
                    assert 0 <= late < len(part), "staleness is not counted from before the stop"


@pytest.mark.parametrize("algorithm", WITH_SERVERS, ids=name_of)
def test_a_stopped_run_goes_on_to_its_end(algorithm: Algorithm) -> None:
    for stop in (0, 3, STEPS - 2):
        check_stop(
            "simulated",
            algorithm,
            settings(),
            train("simulated", 3, algorithm, tiny.problem(), settings(), stop_after=stop),
        )


@by_turns([*(item for item in representatives() if item.requires.servers), BackupSGD(dedicated=True)], turn=0)
def test_on_real_ranks_too(algorithm: Algorithm, runtime: str) -> None:
    """Stopped after a step, and by a command in the run's folder, which finds ranks at different steps."""
    check_stop(runtime, algorithm, settings(), train(runtime, 3, algorithm, tiny.problem(), settings(), stop_after=3))
    first = train(runtime, 3, algorithm, tiny.problem(), settings(), control=[{"stop": True}])
    assert len(first.rows(0)) < STEPS, "it ended early"
    check_stop(runtime, algorithm, settings(), first)


@pytest.mark.parametrize("algorithm", WITH_SERVERS, ids=name_of)
def test_a_run_stopped_at_its_last_step_has_nothing_left_to_do(algorithm: Algorithm) -> None:
    first = train("simulated", 3, algorithm, tiny.problem(), settings(), stop_after=STEPS - 1)
    second = train("simulated", 3, algorithm, tiny.problem(), settings(), resume=first.checkpoint)
    assert not second.run.updates()
    for rank in range(algorithm.roles(3).num_computing):
        law = f"{name_of(algorithm)}: what is over stays as it is"
        assert_near(law, second.parameters[rank][-1], first.final, 0.0, f"after the last step, rank {rank}")


@pytest.mark.parametrize("algorithm", [item for item in WITH_SERVERS if not skips_steps(item)], ids=name_of)
def test_a_worker_at_its_end_does_not_keep_the_others_from_going_on(algorithm: Algorithm) -> None:
    """A stop by hand finds workers at steps of their own: here rank 0 has taken them all and rank 1 half of them."""
    ends = [train("simulated", 3, algorithm, tiny.problem(), settings(), stop_after=stop) for stop in (STEPS - 1, 2)]
    later, earlier = (end.checkpoint for end in ends)
    mixed = [later[0], {**later[1], "step": earlier[1]["step"]}, *later[2:]]
    second = train("simulated", 3, algorithm, tiny.problem(), settings(), resume=mixed)
    assert [row["step"] for row in second.rows(1)] == list(range(3, STEPS))
    assert not second.rows(0)
    for rank in range(algorithm.roles(3).num_computing):
        law = f"{name_of(algorithm)}: replicas are equal at the end"
        assert_near(law, second.parameters[rank][-1], second.final, 0.0, f"at the end, rank {rank} unlike rank 0")


DETERMINISTIC = (BackupSGD(backups=0), BackupSGD(backups=0, shards=3), BackupSGD(backups=0, dedicated=True))


@on_all_runtimes
@pytest.mark.parametrize("algorithm", DETERMINISTIC, ids=name_of)
def test_resumed_is_unbroken_where_everybody_is_waited_for(algorithm: Algorithm, runtime: str) -> None:
    unbroken = train(runtime, 3, algorithm, tiny.problem(), settings())
    first = train(runtime, 3, algorithm, tiny.problem(), settings(), stop_after=3)
    second = train(runtime, 3, algorithm, tiny.problem(), settings(), resume=first.checkpoint)
    for rank in range(algorithm.roles(3).num_computing):
        joined = [*first.parameters[rank][:-1], *second.parameters[rank]]
        assert_same(joined, unbroken.parameters[rank], ROUNDING)


@pytest.mark.parametrize("algorithm", [item for item in variants(1) if item.asynchronous], ids=name_of)
def test_one_worker_resumed_is_unbroken(algorithm: Algorithm) -> None:
    unbroken = train("simulated", 1, algorithm, tiny.problem(), settings())
    first = train("simulated", 1, algorithm, tiny.problem(), settings(), stop_after=3)
    second = train("simulated", 1, algorithm, tiny.problem(), settings(), resume=first.checkpoint)
    assert_same([*first.parameters[0][:-1], *second.parameters[0]], unbroken.parameters[0], 0)


ONE_WORKER = [item for item in variants(1) if item.requires.servers and getattr(item, "clip_norm", None) is None]


@pytest.mark.parametrize("algorithm", ONE_WORKER, ids=name_of)
def test_one_worker_is_serial_sgd(algorithm: Algorithm) -> None:
    """No other worker moves the parameters: no gradient is late, and none is compensated, divided or dropped."""
    for optimizer in (tiny.sgd, tiny.momentum, tiny.adam):
        how = settings(optimizer=optimizer, schedule=tiny.step_lr)
        found = train("simulated", 1, algorithm, tiny.problem(), how)
        assert_same(found.parameters[0], serial(tiny.problem(), how, 1), ROUNDING)


@by_turns([item for item in representatives(1) if item in ONE_WORKER], turn=1)
def test_one_real_worker_is_too(algorithm: Algorithm, runtime: str) -> None:
    found = train(runtime, 1, algorithm, tiny.problem(), settings())
    assert_same(found.parameters[0], serial(tiny.problem(), settings(), 1), ROUNDING)


@pytest.mark.mpi
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [tiny.sgd, tiny.momentum, tiny.adam], ids=["sgd", "momentum", "adam"])
def test_without_backups_it_is_the_synchronous_algorithm(shards: int, optimizer: object) -> None:
    """Servers sum in order of arrival; three numbers in another order differ by rounding.

    The last batch of an epoch is short.
    """
    how = settings(optimizer=optimizer)
    for runtime in RUNTIMES:
        found = train(runtime, 3, ParameterServerSGD(shards=shards), tiny.problem(), how)
        for rank in range(3):
            assert_same(found.parameters[rank], serial(tiny.problem(), how, 3), ROUNDING)


@on_all_runtimes
def test_dedicated_servers_take_no_samples(runtime: str) -> None:
    """Two of three ranks compute: the update is that of two workers' batches."""
    found = train(runtime, 3, ParameterServerSGD(dedicated=True), tiny.problem(), settings())
    for rank in range(2):
        assert_same(found.parameters[rank], serial(tiny.problem(), settings(), 2), ROUNDING)
    assert not found.rows(2)


def test_without_compensation_it_is_asynchronous_sgd() -> None:
    """The same messages in the same order, so the same numbers."""
    for shards in (1, 2):
        one = train("simulated", 3, DelayCompensatedSGD(strength=0, shards=shards), tiny.problem(), settings())
        two = train("simulated", 3, AsyncSGD(shards=shards), tiny.problem(), settings())
        for rank in range(3):
            assert_same(one.parameters[rank], two.parameters[rank], 0)
        other = train("simulated", 3, DelayCompensatedSGD(strength=1.0, shards=shards), tiny.problem(), settings())
        assert relative_error(other.final, two.final) > 1e-9, "compensation does something"


@pytest.mark.parametrize("algorithm", WITH_SERVERS, ids=name_of)
def test_a_worker_holds_a_gradient_only_while_it_is_sent(algorithm: Algorithm) -> None:
    """It is discarded when the reply is there: one buffer, however many steps.

    Servers' sums are memory of their own.
    """
    how = replace(settings(), steps=25)
    simulation = Simulation(algorithm, tiny.problem(), how, 3, network=NETWORK, compute=COMPUTE)
    simulation.run()
    for worker in simulation.workers[: algorithm.roles(3).num_computing]:
        assert worker.trained.pool.num_allocated == 1
        assert not worker.trained.pool._out


FEATURES: dict[str, tuple[Problem, Settings]] = {
    "accumulation": (tiny.problem(), settings(num_micro=3)),
    "frozen parameters": (tiny.problem(tiny.frozen_mlp), settings()),
    "shared parameters": (tiny.problem(tiny.TiedMLP), settings()),
    "a layer used by some": (tiny.problem(tiny.PartlyUsed), settings(steps=12, batch_size=1)),
    "step schedule": (tiny.problem(), settings(schedule=tiny.step_lr)),
    "one-cycle schedule": (tiny.problem(), settings(schedule=tiny.one_cycle)),
    "ranks without samples": (tiny.problem(num_samples=11), settings()),
    "channels last": (tiny.images(), settings()),
    "sparse gradients": (tiny.words(), settings()),
}


@on_all_runtimes
@pytest.mark.parametrize("feature", FEATURES)
def test_is_one_process_with_the_whole_batch(feature: str, runtime: str) -> None:
    """On real ranks with one shard or with two, by turns."""
    problem, how = FEATURES[feature]
    expected = serial(problem, how, 3)
    place = list(FEATURES).index(feature)
    for shards in (1, 2) if runtime == "simulated" else (1 + (place + REAL.index(runtime)) % 2,):
        found = train(runtime, 3, ParameterServerSGD(shards=shards), problem, how)
        for rank in range(3):
            assert_same(found.parameters[rank], expected, ROUNDING)


@on_all_runtimes
def test_each_worker_has_its_own_statistics_and_dropout(runtime: str) -> None:
    for model in (tiny.batchnorm_mlp, tiny.dropout_mlp):
        problem, how = tiny.problem(model, num_samples=22), settings(batch_size=4)
        found = train(runtime, 3, ParameterServerSGD(), problem, how)
        assert_same(found.parameters[0], serial(problem, how, 3, by_share=True), ROUNDING)


@pytest.mark.parametrize(
    ("how", "words"),
    [({"clip_norm": 1.0}, "clip_norm"), ({"ema_decay": 0.5}, "shards=1")],
    ids=["clipping", "averages of a part"],
)
def test_what_servers_cannot_do_is_refused(how: dict[str, object], words: str) -> None:
    for algorithm in (AsyncSGD(shards=2), BackupSGD(backups=0, shards=2)):
        with pytest.raises(ConfigError, match=words):
            Simulation(algorithm, tiny.problem(), settings(**how), 3, network=NETWORK, compute=COMPUTE)


def test_compensation_by_hand() -> None:
    """w was 1 when worker 1 read it and is 4 when its gradient 2 comes, of half the batch: 2 + 0.5 * 2 * 2 * (4 - 1) = 8 on the mean."""
    layout = build_layout(trainable(torch.nn.Linear(1, 1, bias=False)))

    def message(value: float, weight: float) -> Gradient:
        return Gradient(torch.tensor([value * weight, weight, 0.0, 1.0]), layout, -1, 0, 0)

    program = DelayCompensatedSGD(strength=0.5).serve(Context(0, 2, num_steps=1, layout=layout), 0)
    assert isinstance(next(program), PackParameters)
    request, applied = program.send(message(1.0, 1.0)), []
    present, pushes = {0: 1.0, 1: 4.0}, iter([(0, 0.0), (1, 2.0)])
    while len(applied) < 2:
        match request:
            case Recv():
                source, value = next(pushes)
                request = program.send(Message(source, message(value, 0.5).flat, stamp_of(0, LAST)))
            case PackParameters():
                request = program.send(message(present[len(applied)], 1.0))
            case Local(action=action):
                request = program.send(action())
            case Apply(gradient):
                applied.append(float(gradient.flat[0]) / 0.5)
                request = program.send(None)
    assert applied == [0.0, 8.0]
