"""A real run of an asynchronous algorithm, run again in one process with its messages in the same order, is bit-identical."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.laws import tiny
from tests.laws.train import Trained, by_turns, on_all_runtimes, on_real_runtimes, train
from tests.laws.variants import name_of, representatives
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    OnlineBackupSGD,
    PartialAllReduce,
    StaleSynchronousSGD,
    SynchronousSGD,
)
from workbench.errors import ConfigError, Stalled
from workbench.laws.sentences import assert_near, assert_same_rows
from workbench.program import Algorithm
from workbench.replica.local_training import run_info
from workbench.runtimes.simulator.replay import Replay, replay
from workbench.settings import OptimizerFactory, Settings
from workbench.trace.run import Run

NUM_RANKS = 3
settings = partial(Settings, steps=6, batch_size=3, timeout_s=30, optimizer=tiny.momentum, schedule=tiny.step_lr)
MORE = [
    AsyncSGD(shards=3),
    AsyncSGD(shards=2, cutoff=1, clip_norm=0.1),
    AsyncSGD(dedicated=True),
    BackupSGD(backups=1),
    OnlineBackupSGD(),
    BackupSGD(backups=0, timeout_s=0.002),
    StaleSynchronousSGD(bound=0),
]
REPLAYED = [*(item for item in representatives() if item.requires.servers), *MORE]


def of(run: Run, algorithm: Algorithm, how: Settings) -> Run:
    """The run as it would be recorded without the test's wrapper around the algorithm."""
    plain = run_info(algorithm, tiny.problem(), how, "", 1)
    return replace(run, info={**run.info, "algorithm": plain["algorithm"], "content": plain["content"]})


def again(trained: Trained, algorithm: Algorithm, how: Settings) -> Replay:
    return replay(of(trained.run, algorithm, how), algorithm, tiny.problem(), how)


def made_of(run: Run) -> Counter[str]:
    """What each update of each server was made of."""
    names = ("rank", "bucket", "update", "sources", "staleness", "dropped")
    return Counter(str([update[name] for name in names]) for update in run.updates())


@on_real_runtimes
@pytest.mark.parametrize("algorithm", REPLAYED, ids=name_of)
def test_a_replay_is_the_run(algorithm: Algorithm, runtime: str) -> None:
    trained = train(runtime, NUM_RANKS, algorithm, tiny.problem(), settings())
    replayed = again(trained, algorithm, settings())
    law = f"{name_of(algorithm)}: a replay is the run that {runtime} recorded"
    assert made_of(replayed.run) == made_of(trained.run)
    for rank in range(algorithm.roles(NUM_RANKS).num_computing):
        rows = [row for row in replayed.run.metrics[rank] if "evaluation" not in row]
        kept = [[{"step": row["step"], "loss": row["loss"]} for row in found] for found in (rows, trained.rows(rank))]
        assert_same_rows(law, *kept, f"rank {rank}")
        assert_near(law, replayed.parameters[rank], trained.parameters[rank][-1], 0.0, f"at the end, rank {rank}")


@by_turns([AsyncSGD(), AsyncSGD(shards=2), StaleSynchronousSGD(bound=1), BackupSGD(shards=2)], turn=1)
def test_a_stopped_run_is_replayed_to_where_it_stopped(algorithm: Algorithm, runtime: str) -> None:
    trained = train(runtime, NUM_RANKS, algorithm, tiny.problem(), settings(steps=12), control=[{"stop": True}])
    assert trained.run.info["status"] == "stopped"
    replayed = again(trained, algorithm, settings(steps=12))
    assert made_of(replayed.run) == made_of(trained.run)
    for rank in range(NUM_RANKS):
        law = f"{name_of(algorithm)}: a replay ends where the run was stopped"
        assert_near(law, replayed.parameters[rank], trained.parameters[rank][-1], 0.0, f"at the end, rank {rank}")


@on_all_runtimes
def test_another_order_is_another_run(runtime: str) -> None:
    """Two messages that the server received one after the other, swapped: other numbers, or an impossible order."""
    if runtime == "simulated":
        return  # it records no order: it is the same run whenever it is run
    how = settings()
    trained = train(runtime, NUM_RANKS, AsyncSGD(), tiny.problem(), how)
    events = deepcopy(trained.run.events)
    heard = sorted((row for row in events[0] if "any" in row), key=lambda row: row["any"])
    position = next(at for at in range(4, len(heard)) if heard[at]["source"] != heard[at + 1]["source"])
    heard[position]["source"], heard[position + 1]["source"] = heard[position + 1]["source"], heard[position]["source"]
    swapped = replace(of(trained.run, AsyncSGD(), how), folder=None, recorded_events=events)
    try:
        found = replay(swapped, AsyncSGD(), tiny.problem(), how)
    except (ConfigError, Stalled):
        return
    assert not torch.equal(found.parameters[0], trained.final)


def test_what_was_not_recorded_cannot_be_replayed() -> None:
    how = settings()
    trained = train("torch", NUM_RANKS, AsyncSGD(), tiny.problem(), how)
    recorded = of(trained.run, AsyncSGD(), how)
    with pytest.raises(ConfigError, match="AsyncSGD"):
        replay(recorded, BackupSGD(), tiny.problem(), how)
    with pytest.raises(ConfigError, match="cutoff"):
        replay(recorded, AsyncSGD(cutoff=1), tiny.problem(), how)
    with pytest.raises(ConfigError, match="seed"):
        replay(recorded, AsyncSGD(), tiny.problem(), replace(how, seed=1))
    with pytest.raises(ConfigError, match="continued from"):
        replay(replace(recorded, info={**recorded.info, "resumed": "yesterday"}), AsyncSGD(), tiny.problem(), how)
    partial_run = replace(
        recorded,
        info={**recorded.info, "algorithm": run_info(PartialAllReduce(), tiny.problem(), how, "", 1)["algorithm"]},
    )
    with pytest.raises(ConfigError, match="cannot be replayed: its workers contribute gradients"):
        replay(partial_run, PartialAllReduce(), tiny.problem(), how)
    for row in ({"number": 1, "set": {"lr": 0.1}, "step": 3}, {"number": 1, "pause": True, "step": 3}):
        with pytest.raises(ConfigError, match=r"was steered.*cannot be replayed"):
            replay(replace(recorded, info={**recorded.info, "steering": [row]}), AsyncSGD(), tiny.problem(), how)
    with pytest.raises(ConfigError, match="no events"):
        replay(replace(recorded, folder=None, recorded_events={}), AsyncSGD(), tiny.problem(), how)


def test_a_lambda_is_known_by_its_content() -> None:
    """Two lambdas have one name, and the record of a run has no other description."""

    def optimizer(lr: float) -> OptimizerFactory:
        return lambda parameters: torch.optim.SGD(parameters, lr=lr)

    how = Settings(steps=2, batch_size=3, optimizer=optimizer(0.1))
    run = train("simulated", 2, SynchronousSGD(), tiny.problem(), how).run
    same, other = (replace(how, optimizer=optimizer(lr)) for lr in (0.1, 0.2))
    again_with_same = replay(of(run, SynchronousSGD(), how), SynchronousSGD(), tiny.problem(), same)
    assert [row["loss"] for row in again_with_same.run.steps()] == [row["loss"] for row in run.steps()]
    with pytest.raises(ConfigError, match="had another optimizer of the same name"):
        replay(of(run, SynchronousSGD(), how), SynchronousSGD(), tiny.problem(), other)
