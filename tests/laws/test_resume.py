"""Stop and resume: a run stopped at the end of any step and resumed is bit-identical to the unbroken one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.laws import tiny
from tests.laws.train import assert_same, by_turns, on_all_runtimes, on_real_runtimes, train
from tests.laws.variants import in_step, name_of, representatives, runs_on, variants
from workbench.algorithms import PipeSGD, SynchronousSGD
from workbench.codecs import ErrorFeedback, TopK
from workbench.collectives import Once, PowerSGD
from workbench.laws.resume import check_stops
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
    """Train unbroken; then stop after each of `stops` in turn, and resume each time."""
    check_stops(partial(train, runtime, 3), algorithm, 3, problem, how, stops)


@pytest.mark.parametrize("algorithm", in_step(representatives()), ids=name_of)
def test_resumed_at_any_step_is_unbroken(algorithm: Algorithm) -> None:
    for how in HOW:
        check("simulated", algorithm, *HOW[how], list(range(STEPS)) if how == "momentum" else [2])


@pytest.mark.parametrize(
    "algorithm", [item for item in in_step(variants()) if item not in representatives()], ids=name_of
)
def test_resumed_is_unbroken_in_every_setting(algorithm: Algorithm) -> None:
    check("simulated", algorithm, *HOW["momentum"], [0, 3])


WITH_MEMORY = [
    SynchronousSGD(collective=Once(codec=ErrorFeedback(codec=TopK(k=5)))),
    SynchronousSGD(collective=PowerSGD(rank=1)),
]


@by_turns([*in_step(representatives()), PipeSGD(width=3), *WITH_MEMORY], turn=1)
def test_resumed_from_files_is_unbroken(algorithm: Algorithm, runtime: str) -> None:
    check(runtime, algorithm, *HOW["adam, dropout"], [3])


@on_real_runtimes
def test_resumed_from_files_is_unbroken_whatever_they_hold_and_when(runtime: str) -> None:
    """With two gradients in flight: the first step, one in the midst and the last; which training has which depends on the runtime."""
    stops = [0, 3, STEPS - 1] if runtime == "torch" else [3, STEPS - 1, 0]
    for how, stop in zip(HOW, stops, strict=True):
        check(runtime, PipeSGD(width=3), *HOW[how], [stop])


def test_what_a_codec_remembers_is_in_the_checkpoint() -> None:
    """The law above would not hold without it."""
    problem, how = HOW["momentum"]
    for algorithm in WITH_MEMORY:
        unbroken = train("simulated", 3, algorithm, problem, how)
        first = train("simulated", 3, algorithm, problem, how, stop_after=3)
        assert first.checkpoint[0]["memory"]
        forgetful = [{**saved, "memory": {}} for saved in first.checkpoint]
        second = train("simulated", 3, algorithm, problem, how, resume=forgetful)
        assert not torch.equal(second.final, unbroken.final)


@pytest.mark.parametrize("algorithm", [item for item in in_step(variants(1)) if not runs_on(item, 3)], ids=name_of)
def test_alone_too(algorithm: Algorithm) -> None:
    problem, how = HOW["adam, dropout"]
    unbroken = train("simulated", 1, algorithm, problem, how)
    for stop in range(STEPS):
        first = train("simulated", 1, algorithm, problem, how, stop_after=stop)
        second = train("simulated", 1, algorithm, problem, how, resume=first.checkpoint)
        assert_same([*first.parameters[0], *second.parameters[0]], unbroken.parameters[0], 0)


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
    assert [row["staleness"] for row in rows] == [4, 4, 1, 1], (
        "the gradient of step 5 was taken before the four overdue ones were applied"
    )
    assert [row["lr"] for row in rows] == pytest.approx(
        [0.05 * 0.5 ** (num_applied // 3) for num_applied in (4, 5, 6, 7)]
    )


@on_real_runtimes
@pytest.mark.parametrize("algorithm", [SynchronousSGD(), PipeSGD(width=3)], ids=name_of)
def test_a_run_stopped_by_hand_goes_on_to_its_end(algorithm: Algorithm, runtime: str) -> None:
    """The request to stop travels in gradients; those still in flight must not stop the resumed run too."""
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
    first = train("torch", 3, PipeSGD(width=3), *HOW["momentum"], stop_after=3)
    for rank in range(3):
        saved = torch.load(Path(first.checkpoint) / f"checkpoint-{rank:05d}.pt", weights_only=True)
        assert saved["step"] == 3
        assert [item["value"]["step"] for item in saved["program"]["fields"]["in_flight"]] == [2, 3]
    assert json.loads((Path(first.checkpoint) / "run.json").read_text())["status"] == "stopped"
