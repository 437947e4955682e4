"""Stopping and going on: a run stopped at the end of any step and resumed is the unbroken one, to the last bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.laws import tiny
from tests.laws.train import assert_same, on_all_runtimes, on_real_runtimes, train
from tests.laws.variants import name_of, variants
from workbench.algorithms import ApplyOrder, LayerwiseSGD, PipeSGD, SynchronousSGD
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.settings import Settings

STEPS = 7
settings = partial(Settings, steps=STEPS, batch_size=3, timeout_s=30, seed=3)
HOW = {
    "momentum": (tiny.problem(), settings(optimizer=tiny.momentum, schedule=tiny.step_lr)),
    "adam, dropout": (tiny.problem(tiny.dropout_mlp), settings(optimizer=tiny.adam, schedule=tiny.one_cycle)),
    "batchnorm": (tiny.problem(tiny.batchnorm_mlp, batch_size=4), settings(optimizer=tiny.momentum, batch_size=4)),
}


def check(runtime: str, algorithm: Algorithm, problem: Problem, how: Settings, stops: list[int]) -> None:
    """Train unbroken; then stop after each of `stops` in turn, each time going on from there."""
    unbroken = train(runtime, 3, algorithm, problem, how)
    for stop in stops:
        first = train(runtime, 3, algorithm, problem, how, stop_after=stop)
        assert first.run.info["status"] == "stopped"
        assert first.run.info["result"]["last_step"] == stop
        second = train(runtime, 3, algorithm, problem, how, resume=first.checkpoint)
        assert second.run.info["status"] == "finished"
        for rank in range(3):
            assert_same([*first.parameters[rank], *second.parameters[rank]], unbroken.parameters[rank], 0)
            rows = [*first.rows(rank), *second.rows(rank)]
            for name in ("step", "loss", "lr", "samples", "staleness"):
                assert [row[name] for row in rows] == [row[name] for row in unbroken.rows(rank)], name


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("algorithm", variants(), ids=name_of)
def test_resumed_at_any_step_is_unbroken(algorithm: Algorithm, how: str) -> None:
    check("simulated", algorithm, *HOW[how], list(range(STEPS)) if how == "adam, dropout" else [2, STEPS - 1])


@pytest.mark.parametrize("how", HOW)
@on_real_runtimes
@pytest.mark.parametrize(
    "algorithm", [SynchronousSGD(), LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.ANY), PipeSGD(width=3)], ids=name_of
)
def test_resumed_from_files_is_unbroken(algorithm: Algorithm, runtime: str, how: str) -> None:
    check(runtime, algorithm, *HOW[how], [0, 3, STEPS - 1] if how == "adam, dropout" else [3])


@on_all_runtimes
def test_stopped_twice(runtime: str) -> None:
    problem, how = HOW["adam, dropout"]
    algorithm = PipeSGD(width=3)
    unbroken = train(runtime, 3, algorithm, problem, how)
    first = train(runtime, 3, algorithm, problem, how, stop_after=1)
    second = train(runtime, 3, algorithm, problem, how, resume=first.checkpoint, stop_after=3)
    third = train(runtime, 3, algorithm, problem, how, resume=second.checkpoint)
    parts = [part.parameters[0] for part in (first, second, third)]
    assert_same([item for part in parts for item in part], unbroken.parameters[0], 0)


@on_all_runtimes
def test_resumed_with_a_smaller_width(runtime: str) -> None:
    """Four gradients were in flight for a width of 5; a width of 2 applies at once what is then overdue, and stays one step late."""
    problem, how = tiny.problem(), settings(steps=9, optimizer=tiny.momentum, schedule=tiny.step_lr)
    first = train(runtime, 3, PipeSGD(width=5), problem, how, stop_after=4)
    second = train(runtime, 3, PipeSGD(width=2), problem, how, resume=first.checkpoint)
    rows = second.rows(0)
    assert [row["staleness"] for row in rows] == [4, 4, 1, 1], "the gradient of step 5 was taken before the four overdue ones were applied"
    assert [row["lr"] for row in rows] == pytest.approx([0.05 * 0.5 ** (num_applied // 3) for num_applied in (5, 6, 7, 8)])


@on_real_runtimes
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), PipeSGD(width=3)], ids=name_of)
def test_a_run_stopped_by_hand_goes_on_to_its_end(algorithm: Algorithm, runtime: str) -> None:
    """The word that stopped it travels in gradients; those still in flight must not stop the resumed run too."""
    problem, how = HOW["momentum"]
    unbroken = train(runtime, 3, algorithm, problem, how)
    first = train(runtime, 3, algorithm, problem, how, control=[{"stop": True}])
    stopped_at = first.run.info["result"]["last_step"]
    assert first.run.info["status"] == "stopped"
    assert stopped_at < STEPS - 1
    second = train(runtime, 3, algorithm, problem, how, resume=first.checkpoint)
    assert second.run.info["status"] == "finished"
    for rank in range(3):
        assert_same([*first.parameters[rank], *second.parameters[rank]], unbroken.parameters[rank], 0)


def test_a_checkpoint_says_what_it_holds() -> None:
    """Each rank's file is read without unpickling code."""
    import torch

    first = train("torch", 3, PipeSGD(width=3), *HOW["momentum"], stop_after=3)
    for rank in range(3):
        saved = torch.load(Path(first.checkpoint) / f"checkpoint-{rank:05d}.pt", weights_only=True)
        assert saved["step"] == 3
        assert [item["value"]["step"] for item in saved["program"]] == [2, 3]
    assert json.loads((Path(first.checkpoint) / "run.json").read_text())["status"] == "stopped"
