"""A run that is stopped at the end of any step and resumed is the unbroken run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from workbench.laws import tiny
from workbench.laws.declared import grouped
from workbench.laws.sentences import assert_equal_ranks, assert_holds, assert_near, assert_same_rows, name_of
from workbench.laws.training import Trained, train_simulated
from workbench.problems.base import Problem
from workbench.program import Algorithm, Replicas
from workbench.settings import Settings

STEPS = 9


def check_resume(algorithm: Algorithm, num_ranks: int) -> None:
    """With momentum and two parameter groups: a stop after each step, also inside a period and at the last one."""
    settings = Settings(steps=STEPS, batch_size=3, seed=3, optimizer=grouped, schedule=tiny.step_lr, evaluate_every=0)
    check_stops(
        partial(train_simulated, num_ranks), algorithm, num_ranks, tiny.problem(test=None), settings, range(STEPS)
    )


def check_stops(
    train: Callable[..., Trained],
    algorithm: Algorithm,
    num_ranks: int,
    problem: Problem,
    settings: Settings,
    stops: Sequence[int],
) -> None:
    """Train unbroken; then stop after each of `stops` in turn, and resume each time.

    An algorithm that depends on timing may continue differently; it still takes every step once on all ranks.

    Args:
        train: (algorithm, problem, settings, resume=..., stop_after=...) -> a run.
    """
    unbroken = train(algorithm, problem, settings)
    same, law = not algorithm.depends_on_timing, f"{name_of(algorithm)}: a resumed run is the unbroken one"
    in_step = not algorithm.asynchronous
    for stop in stops:
        first = train(algorithm, problem, settings, stop_after=stop)
        assert not in_step or first.run.info["result"]["last_step"] == stop, (
            f"{law}: it does not stop after step {stop}"
        )
        second = train(algorithm, problem, settings, resume=first.checkpoint)
        assert_holds(law, second.run.info["status"] == "finished", f"when stopped after step {stop}: it does not end")
        for rank in range(algorithm.roles(num_ranks).num_computing):
            if same and in_step:
                joined = [*first.parameters[rank], *second.parameters[rank]]
                _assert_same_steps(law, joined, unbroken.parameters[rank], f"rank {rank}, stopped after step {stop}")
            names = ("step", "samples", *(("loss", "lr", "staleness") if same and in_step else ()))
            ours, theirs = (
                [{name: row[name] for name in names} for row in rows]
                for rows in ([*first.rows(rank), *second.rows(rank)], unbroken.rows(rank))
            )
            if not algorithm.requires.servers:  # a worker may skip steps
                assert_same_rows(law, ours, theirs, f"stopped after step {stop}, rank {rank}")
        if algorithm.replicas != Replicas.NEVER:
            ends = [steps[-1] for steps in second.parameters[: algorithm.roles(num_ranks).num_computing]]
            assert_equal_ranks(
                f"{name_of(algorithm)}: replicas are equal", ends, f"at the end of a run stopped after step {stop}"
            )


def _assert_same_steps(law: str, found: Sequence, expected: Sequence, where: str) -> None:  # type: ignore[type-arg]
    assert_holds(law, len(found) == len(expected), f"{where}: {len(found)} steps in place of {len(expected)}")
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        when = f"after step {step}" if step < len(found) - 1 else "at the end"
        assert_near(law, ours, theirs, 0.0, f"{where}: {when}")
