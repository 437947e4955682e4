"""The simulator carries out what `decide` says: one table of runs, for the decisions alone and for simulated runs.

The expected steps and checkpoints are written by hand, so a wrong decision fails in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.laws import tiny
from tests.unit.test_generations import ROWS, SYNC, after, generation, walk
from workbench.algorithms import AsyncSGD, NoCommunication, PipeSGD
from workbench.costs import Compute, Network, SlowMachines
from workbench.program import Algorithm
from workbench.runtimes.control.generations import (
    Boundary,
    Continue,
    Generation,
    Instruction,
    StepEnded,
    Stop,
    decide,
    first_sync_point,
)
from workbench.runtimes.simulator.simulation import Simulation
from workbench.settings import Settings
from workbench.trace.run import Run

WORKERS, STEPS = 3, 7
PIPE, ASYNC, ALONE = PipeSGD(width=3), AsyncSGD(), NoCommunication()
NETWORK = Network(latency_s=0.5, bandwidth_bytes_per_s=1e6)  # sums are in flight when a step ends
SLOW = SlowMachines(factor_of=((2, 6.0),))  # rank 2 ends a step long after the others have ended two
COMPUTE = Compute(forward_s=0.3, backward_s=0.7, update_s=0.01, stragglers=(SLOW,))

RUNS: list[
    tuple[str, Algorithm, dict[str, int], int, list[int], bool]
] = [  # steps taken, places of checkpoints, stopped
    ("nothing is due", SYNC, {}, 7, [], False),
    ("checkpoints", SYNC, {"every": 3}, 7, [2, 5], False),
    ("checkpoints with sums in flight", PIPE, {"every": 3}, 7, [2, 5], False),
    ("no checkpoint after the last step", SYNC, {"every": 7}, 7, [], False),
    ("a stop", SYNC, {"stop": 4}, 5, [], True),
    ("a stop with sums in flight", PIPE, {"stop": 4}, 5, [], True),
    ("a stop after the first step", PIPE, {"stop": 0}, 1, [], True),
    ("a stop where a checkpoint is due", PIPE, {"every": 3, "stop": 5}, 6, [2], True),
    ("a stop after the last step", SYNC, {"stop": 6}, 7, [], True),
    ("a stop after a step that the run does not have", SYNC, {"stop": 9}, 7, [], False),
    ("asynchronous", ASYNC, {}, 7, [], False),
    ("sync points", ASYNC, {"every": 3}, 7, [2, 5], False),
    ("a sync point after each step", ASYNC, {"every": 1}, 7, [0, 1, 2, 3, 4, 5], False),
    ("no sync point after the last step", ASYNC, {"every": 7}, 7, [], False),
    ("an early end", ASYNC, {"stop": 4}, 5, [], True),
    ("an early end at a sync point", ASYNC, {"every": 3, "stop": 5}, 6, [2], True),
    ("an early end between sync points", ASYNC, {"every": 3, "stop": 3}, 4, [2], True),
    ("an early end after the last step", ASYNC, {"stop": 6}, 7, [], False),
    ("an early end after a step that the run does not have", ASYNC, {"stop": 9}, 7, [], False),
    ("checkpoints without sync points", ALONE, {"every": 3}, 7, [2, 5], False),
    ("an early end where a checkpoint is due", ALONE, {"every": 3, "stop": 5}, 6, [2, 5], True),
]
runs = pytest.mark.parametrize(
    ("algorithm", "known", "num_steps", "places", "stopped"),
    [pytest.param(*run[1:], id=f"{run[1]}: {run[0]}") for run in RUNS],
)


def settings(**how: Any) -> Settings:
    return Settings(steps=STEPS, batch_size=3, seed=3, evaluate_every=2, **how)


def simulation(algorithm: Algorithm, **how: Any) -> Simulation:
    problem = tiny.problem()
    return Simulation(
        algorithm, problem, settings(**how), WORKERS, network=NETWORK, compute=COMPUTE, check_in_flight=True
    )


def steps_of(run: Run, rank: int) -> list[int]:
    return [row["step"] for row in run.metrics[rank] if "evaluation" not in row]


@runs
def test_decisions(
    algorithm: Algorithm, known: dict[str, int], num_steps: int, places: list[int], stopped: bool
) -> None:
    whole: dict[str, Any] = {"end_step": STEPS, "num_steps": STEPS, "sync_point": STEPS}
    start = generation(algorithm, **whole, stop_after=known.get("stop"), checkpoint_every=known.get("every"))
    start = replace(start, sync_point=first_sync_point(start, 0)).following(after(-1))
    steps, written, outcome = walk(start)
    assert (steps, [place for place in written if place is not None]) == (list(range(num_steps)), places)
    assert isinstance(outcome, Stop) == stopped


@runs
def test_simulated_run(
    algorithm: Algorithm, known: dict[str, int], num_steps: int, places: list[int], stopped: bool
) -> None:
    simulated = simulation(algorithm, checkpoint_every=known.get("every"))
    run = simulated.run(stop_after=known.get("stop"))
    for rank in range(WORKERS):
        assert steps_of(run, rank) == list(range(num_steps))
    kept = simulated.checkpoints.kept
    assert {place: [saved["step"] for saved in ranks] for place, ranks in kept.items()} == {
        place: [place] * WORKERS for place in places
    }
    assert run.info["status"] == ("stopped" if stopped else "finished")
    assert run.info["result"]["last_step"] == num_steps - 1
    if stopped:
        assert [saved["step"] for saved in simulated.checkpoints.at_stop] == [num_steps - 1] * WORKERS
    evaluated = {row["step"] for row in run.metrics[0] if "evaluation" in row}
    last = set() if stopped and not algorithm.asynchronous else {num_steps - 1}
    assert evaluated == {step for step in (1, 3, 5) if step < num_steps} | last


def step_times(algorithm: Algorithm, **how: Any) -> list[list[float]]:
    """[rank][step] of the virtual seconds at which the step ended."""
    run = simulation(algorithm, **how).run()
    return [[row["seconds"] for row in run.metrics[rank] if "evaluation" not in row] for rank in range(WORKERS)]


def ended_together(ended: list[list[float]]) -> set[int]:
    """The steps that all workers end within one second, though rank 2 computes for five seconds longer."""
    return {step for step, times in enumerate(zip(*ended, strict=True)) if max(times) - min(times) < 1.0}


def test_workers_with_servers_meet_at_sync_points_and_nowhere_else() -> None:
    """The last step before they meet ends when all have the same parameters."""
    assert ended_together(step_times(ASYNC)) == {6}
    assert ended_together(step_times(ASYNC, checkpoint_every=3)) == {2, 5, 6}


def test_a_late_failure_does_not_date_the_evaluation_of_a_stopped_run() -> None:
    """The clock runs on to the failure, when all programs have ended."""
    simulated = Simulation(
        ASYNC, tiny.problem(), settings(), WORKERS, network=NETWORK, compute=COMPUTE, failures={2: 1e6}
    )
    run = simulated.run(stop_after=3)
    *_, last = [row for row in run.metrics[0] if "evaluation" in row]
    assert (last["step"], last["seconds"]) == (3, run.info["result"]["seconds"])


def test_workers_that_share_nothing_do_not_wait_for_a_checkpoint() -> None:
    assert step_times(ALONE, checkpoint_every=3) == step_times(ALONE)


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize(
    ("announced", "last", "status"),
    [
        ({0: 2, 1: 2, 2: 4}, [3, 3, 5], "stopped"),  # the step after which a stop is announced is the last but one
        ({0: 4}, [5, 6, 6], "stopped"),
        ({0: 5, 1: 6, 2: 6}, [6, 6, 6], "finished"),  # no rank has steps left
    ],
)
def test_a_replay_is_stopped_where_the_record_says(
    announced: dict[int, int], last: list[int], status: str, every: int | None
) -> None:
    simulated = simulation(ALONE, checkpoint_every=every)
    simulated.cluster.recorded = {rank: [{"task": 0, "control": step}] for rank, step in announced.items()}
    run = simulated.run()
    assert [steps_of(run, rank)[-1] for rank in range(WORKERS)] == last
    assert run.info["status"] == status


BOUNDARIES = [row for row in ROWS if isinstance(row.values[1], StepEnded)]


@pytest.mark.parametrize(("before", "boundary", "instructions"), BOUNDARIES)
def test_the_cheap_test_agrees_with_decide(
    before: Generation, boundary: Boundary, instructions: list[Instruction]
) -> None:
    for step in range(20):
        if before.continues_after(step):
            (outcome,) = decide(before, StepEnded(end=after(step)))
            assert isinstance(outcome, Continue)
            assert outcome.generation is before


def test_the_cheap_test_answers_most_steps() -> None:
    start = generation(SYNC, checkpoint_every=5, stop_after=12)
    assert [step for step in range(20) if not start.continues_after(step)] == [4, 9, 12, 14]
