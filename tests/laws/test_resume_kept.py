"""Checkpoints written during a run: a run resumed from any of them is bit-identical to the unbroken one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from tests.laws import tiny
from tests.laws.train import COMPUTE, NETWORK, by_turns, on_real_runtimes, train
from tests.laws.variants import name_of, representatives, variants
from workbench.algorithms import (
    AsyncSGD,
    BackupSGD,
    NoCommunication,
    PartialAllReduce,
    PipeSGD,
    Quorum,
    StaleSynchronousSGD,
    SynchronousSGD,
)
from workbench.codecs import ErrorFeedback, TopK
from workbench.collectives import Once
from workbench.costs import Compute, free
from workbench.laws.sentences import assert_near, assert_same_rows
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.replica.local_training import run_info
from workbench.runtimes.checkpoint.files import Checkpoint, complete_checkpoints
from workbench.runtimes.simulator.replay import replay
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

STEPS, EVERY = 7, 3
settings = partial(Settings, steps=STEPS, batch_size=3, timeout_s=30, seed=3, checkpoint_every=EVERY)
HOW = {
    "momentum": (tiny.problem(), settings(optimizer=tiny.momentum, schedule=tiny.step_lr)),
    "adam, dropout": (tiny.problem(tiny.dropout_mlp), settings(optimizer=tiny.adam, schedule=tiny.one_cycle)),
}
REAL = [*representatives(), PipeSGD(width=3), SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(k=5))))]


EQUAL = [
    *(item for item in REAL if not (item.depends_on_timing or item.requires.servers)),
    PartialAllReduce(quorum=Quorum.ALL),
]


def simulate(algorithm: Algorithm, problem: Problem, how: Settings, resume: Any = None) -> Simulation:
    simulation = Simulation(algorithm, problem, how, 3, network=NETWORK, compute=COMPUTE, check_in_flight=True)
    simulation.run(resume=resume)
    return simulation


def rows_of(run: Run, rank: int, first: int = 0) -> list[tuple[Any, ...]]:
    """What a rank's rows say of its steps from the first one on, times apart."""
    names = ("step", "samples", "loss", "lr", "staleness")
    return [
        tuple(row[name] for name in names)
        for row in run.metrics[rank]
        if "evaluation" not in row and row["step"] >= first
    ]


@pytest.mark.parametrize("algorithm", variants(), ids=name_of)
def test_going_on_from_any_checkpoint_is_unbroken(algorithm: Algorithm) -> None:
    """Also of algorithms whose ranks are at different steps: after a checkpoint all begin at one time.

    An algorithm that does not depend on time computes the same numbers as without checkpoints. A server adds gradients
    in order of arrival, and a checkpoint changes that order. Then the ends differ by rounding: by at most 6e-17 over 40
    seeds.
    """
    problem, how = HOW["momentum"]
    unbroken = simulate(algorithm, problem, how)
    assert sorted(unbroken.checkpoints.kept) == [2, 5]
    if not algorithm.depends_on_timing:
        without = simulate(algorithm, problem, replace(how, checkpoint_every=None))
        assert_same_end(UNCHANGED, without, unbroken, 1e-15 if algorithm.requires.servers else 0.0)
    for kept in unbroken.checkpoints.kept.values():
        again = simulate(algorithm, problem, how, kept)
        if algorithm.asynchronous or not algorithm.depends_on_timing:
            assert_same_end(UNBROKEN, again, unbroken)
            for ours, theirs in zip(again.workers, unbroken.workers, strict=True):
                rows = [row for row in theirs.recorder.rows if "loss" in row]
                assert [row["loss"] for row in ours.recorder.rows if "loss" in row] == [
                    row["loss"] for row in rows if row["step"] > kept[ours.rank]["step"]
                ]
        assert [worker.last_step for worker in again.workers] == [worker.last_step for worker in unbroken.workers]


UNBROKEN = "a run from a kept checkpoint is the unbroken one"
UNCHANGED = "a run without checkpoints is the one with them"


def assert_same_end(law: str, ours: Simulation, theirs: Simulation, tolerance: float = 0.0) -> None:
    for mine, its in zip(ours.workers, theirs.workers, strict=True):
        where = f"at the end, rank {mine.rank}"
        assert_near(law, mine.trained.read_parameters(), its.trained.read_parameters(), tolerance, where)


def forget(folder: str, step: int) -> None:
    """As if the ranks had been killed before the last of them had written its part of that checkpoint."""
    Checkpoint(Path(folder), step, 3).rank_file(2).with_suffix(".json").unlink()


@by_turns(EQUAL, turn=0)
def test_going_on_from_files_is_unbroken(algorithm: Algorithm, runtime: str) -> None:
    problem, how = HOW["adam, dropout"]
    unbroken = train(runtime, 3, algorithm, problem, how)
    assert [checkpoint.step for checkpoint in complete_checkpoints(Path(unbroken.checkpoint))] == [5, 2]
    for step in (5, 2):
        again = train(runtime, 3, algorithm, problem, how, resume=unbroken.checkpoint)
        for rank in range(algorithm.roles(3).num_computing):
            where = f"from the checkpoint of step {step}, rank {rank}"
            assert_same_rows(UNBROKEN, rows_of(again.run, rank), rows_of(unbroken.run, rank, step + 1), where)
            assert_near(
                UNBROKEN, again.parameters[rank][-1], unbroken.parameters[rank][-1], 0.0, f"{where}, at the end"
            )
        forget(unbroken.checkpoint, step)


@on_real_runtimes
def test_averages_batchnorm_and_what_the_problem_draws_go_on(runtime: str) -> None:
    """Samples with noise of Python's, NumPy's and torch's generators, which no test seeds."""
    problem = tiny.problem(tiny.batchnorm_mlp, train=Noisy(*tiny.data()), batch_size=4)
    how = settings(optimizer=tiny.adam, batch_size=4, ema_decay=0.5, evaluate_every=3)
    unbroken = train(runtime, 3, PipeSGD(), problem, how)
    forget(unbroken.checkpoint, 5)
    again = train(runtime, 3, PipeSGD(), problem, how, resume=unbroken.checkpoint)
    for rank in range(3):
        where = f"from the checkpoint of step 2, rank {rank}"
        assert_same_rows(UNBROKEN, rows_of(again.run, rank), rows_of(unbroken.run, rank, 3), where)
        assert_near(UNBROKEN, again.parameters[rank][-1], unbroken.parameters[rank][-1], 0.0, f"{where}, at the end")
    averages = [load_file(Path(one.checkpoint) / "model-average.safetensors") for one in (again, unbroken)]
    assert averages[0].keys() == averages[1].keys()
    assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())
    evaluated = [
        [row["evaluation"] for row in one.run.metrics[0] if "evaluation" in row and row["step"] > 2]
        for one in (again, unbroken)
    ]
    assert evaluated[0] == evaluated[1] != []


@final
@dataclass
class Noisy(Dataset[Any]):
    """Samples that are otherwise each time."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.gauss(0, 1) + np.random.normal() + torch.randn(()).item()  # noqa: NPY002 - as users do
        return self.x[index] + 0.1 * noise, self.y[index]


# -- ranks at steps of their own -------------------------------------------------------------------------------

ASYNCHRONOUS = [
    AsyncSGD(),
    AsyncSGD(shards=2),
    AsyncSGD(dedicated=True),
    StaleSynchronousSGD(bound=1),
    BackupSGD(backups=1),
    BackupSGD(backups=0, shards=3),  # whose sums are taken in order of arrival
]


@by_turns(ASYNCHRONOUS, turn=1)
def test_asynchronous_ones_go_on_to_the_same_where_messages_come_in_the_same_order(
    algorithm: Algorithm, runtime: str
) -> None:
    """A replay of the whole run, and one that begins at the ranks' files and is given the messages that came after."""
    problem, how = HOW["momentum"]
    trained = train(runtime, 3, algorithm, problem, how)
    plain = run_info(algorithm, problem, how, "", 1)  # the ranks' algorithm was the test's wrapper
    own = {name: plain[name] for name in ("algorithm", "content")}
    recorded = replace(trained.run, info={**trained.run.info, **own})
    whole = replay(recorded, algorithm, problem, how)
    forget(trained.checkpoint, 5)
    (checkpoint,) = complete_checkpoints(Path(trained.checkpoint))
    simulation = Simulation(algorithm, problem, how, 3, network=free, compute=Compute(forward_s=0.0, backward_s=0.0))
    simulation.cluster.recorded = {rank: behind(trained.run.events[rank], 2) for rank in range(3)}
    parts = [torch.load(checkpoint.rank_file(rank), weights_only=True) for rank in range(3)]
    # The ranks' was the test's wrapper
    simulation.run(resume=[{**part, "algorithm": type(algorithm).__name__} for part in parts])
    for rank in range(algorithm.roles(3).num_computing):
        law = f"{name_of(algorithm)}: a replay is the run"
        assert_near(
            law, whole.parameters[rank], trained.parameters[rank][-1], 0.0, f"from the begin to the end, rank {rank}"
        )
        found = simulation.workers[rank].trained.read_parameters()
        assert_near(
            law, found, trained.parameters[rank][-1], 0.0, f"from the checkpoint of step 2 to the end, rank {rank}"
        )


def behind(events: list[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    """The rows that a rank recorded after the checkpoint of that place, its programs numbered from there."""
    cut = next(number for number, row in enumerate(events) if row.get("place") == place)
    before = max((row.get("task", 0) for row in events[:cut]), default=0)
    return [{**row, "task": row["task"] - before} if row.get("task", 0) > 0 else row for row in events[cut + 1 :]]


@on_real_runtimes
@pytest.mark.parametrize("algorithm", [AsyncSGD(), BackupSGD(backups=1), NoCommunication()], ids=name_of)
def test_asynchronous_ones_go_on_to_their_end(algorithm: Algorithm, runtime: str) -> None:
    problem, how = HOW["momentum"]
    first = train(runtime, 3, algorithm, problem, how)
    second = train(runtime, 3, algorithm, problem, how, resume=first.checkpoint)
    assert second.run.info["status"] == "finished"
    for rank in range(3):
        assert rows_of(second.run, rank)[-1][0] == STEPS - 1
        assert all(step >= 5 for step, *_ in rows_of(second.run, rank))


@on_real_runtimes
def test_a_word_that_ends_all_programs_early_is_no_checkpoint(runtime: str) -> None:
    """Ranks then meet at their present steps, continue, and reach the same sync points."""
    problem, how = HOW["momentum"]
    trained = train(runtime, 3, AsyncSGD(), problem, how, control=[{"set": {"lr": 0.02}}])
    assert trained.run.info["status"] == "finished"
    assert [checkpoint.step for checkpoint in complete_checkpoints(Path(trained.checkpoint))] == [5, 2]
