"""Decisions at the boundary of a generation: one case a row of the table, without a process, a file or a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench.algorithms import ADPSGD, AsyncSGD, NoCommunication, PartialAllReduce, PipeSGD, SynchronousSGD
from workbench.algorithms.parameter_server import WorkerState
from workbench.algorithms.pipe import PipeState
from workbench.ops import EndStep, State, Ticket
from workbench.program import Algorithm
from workbench.runtimes.control.commands import PAUSE, RESUME, STOP, Command
from workbench.runtimes.control.generations import (
    Admit,
    Admitted,
    Agree,
    Agreed,
    AnswerRequests,
    BeginGeneration,
    Boundary,
    Checkpoint,
    Continue,
    Evaluate,
    Finish,
    Generation,
    Instruction,
    KeepForEvaluation,
    MembersLeft,
    Pause,
    ProgramEnded,
    RequestsAnswered,
    RetryJoin,
    StepEnded,
    Stop,
    decide,
    first_sync_point,
)
from workbench.topologies import Star

STEPS = 20
SYNC, PIPE, QUORUM, ASYNC, ALONE = SynchronousSGD(), PipeSGD(width=2), PartialAllReduce(), AsyncSGD(), NoCommunication()
WIDER = PipeSGD(width=4)
GOSSIP = ADPSGD()
FASTER = AsyncSGD(clip_norm=0.1)
GOSSIP, STAR = ADPSGD(), ADPSGD(topology=Star())
STATE = PipeState(in_flight=(Ticket.completed("a gradient"),))
HERE = WorkerState(versions=(7,))


def generation(algorithm: Algorithm, **changes: Any) -> Generation:
    """Of three ranks and twenty steps, from the first."""
    whole: dict[str, Any] = {
        "num_ranks": 3,
        "first_step": 0,
        "end_step": STEPS,
        "num_steps": STEPS,
        "sync_point": STEPS,
    }
    return Generation(algorithm=algorithm, **{**whole, **changes})


def after(step: int, state: State | None = None) -> EndStep:
    return EndStep(step, state=state)


def ended(step: int, state: State | None = None, **known: Any) -> StepEnded:
    return StepEnded(end=after(step, state), **known)


def agreed(step: int, algorithm: Algorithm, state: State | None = None, *, num: int = 1, **known: Any) -> Agreed:
    return Agreed(end=after(step, state), algorithm=algorithm, num_commands=num, **known)


Row = tuple[str, Generation, Boundary, list[Instruction]]

IN_STEP: list[Row] = [
    ("nothing is due", generation(SYNC), ended(4), [Continue(generation(SYNC))]),
    ("an evaluation is due", generation(SYNC), ended(4, evaluates=True), [Evaluate(4), Continue(generation(SYNC))]),
    ("a checkpoint is due", generation(SYNC, checkpoint_every=5), ended(4),
     [Checkpoint(4), Continue(generation(SYNC, checkpoint_every=5))]),
    ("a checkpoint is not due", generation(SYNC, checkpoint_every=5), ended(5), [Continue(generation(SYNC, checkpoint_every=5))]),
    ("no checkpoint after the last step", generation(SYNC, checkpoint_every=5), ended(19),
     [Continue(generation(SYNC, checkpoint_every=5))]),
    ("commands were announced", generation(SYNC), ended(4, announced=True, evaluates=True), [Evaluate(4), Agree()]),
    ("the run is to stop after this step", generation(SYNC, stop_after=4), ended(4, evaluates=True),
     [Evaluate(4), Checkpoint(None), Stop()]),
    ("it is to stop where a checkpoint is due", generation(SYNC, stop_after=4, checkpoint_every=5), ended(4), [Checkpoint(None), Stop()]),
    ("it is to stop after the last step", generation(SYNC, stop_after=19), ended(19), [Checkpoint(None), Stop()]),
    ("the programs have ended", generation(SYNC), ProgramEnded(end=after(19)), [Finish()]),
    ("the programs of a run without steps have ended", generation(SYNC, end_step=0, num_steps=0, sync_point=0),
     ProgramEnded(end=after(-1)), [Finish()]),
]  # fmt: skip

COMMANDS: list[Row] = [
    ("a learning rate was set", generation(PIPE), agreed(4, PIPE, STATE), [Continue(generation(PIPE))]),
    ("nothing that can be done was asked for", generation(PIPE), agreed(4, PIPE), [Continue(generation(PIPE))]),
    ("other settings", generation(PIPE), agreed(4, WIDER, STATE),
     [BeginGeneration(generation(WIDER, first_step=5, state=STATE))]),
    ("equal settings are a new object", generation(PIPE), agreed(4, PipeSGD(width=2), STATE),
     [BeginGeneration(generation(PIPE, first_step=5, state=STATE))]),
    ("other settings after the last step", generation(PIPE), agreed(19, WIDER, STATE, any_left=False),
     [BeginGeneration(generation(WIDER, first_step=20, state=STATE))]),
    ("other settings where a checkpoint is due", generation(PIPE, checkpoint_every=5), agreed(4, WIDER, STATE),
     [Checkpoint(4), BeginGeneration(generation(WIDER, first_step=5, state=STATE, checkpoint_every=5))]),
    ("other settings where the run is to stop", generation(PIPE, stop_after=4), agreed(4, WIDER), [Checkpoint(None), Stop()]),
    ("a pause", generation(PIPE), agreed(4, PIPE, paused=True), [Pause()]),
    ("a pause after other settings", generation(PIPE), agreed(4, WIDER, paused=True, num=2), [Pause()]),
    ("a pause where the run is to stop", generation(PIPE, stop_after=4), agreed(4, PIPE, paused=True), [Pause()]),
    ("a stop", generation(PIPE), agreed(4, PIPE, STATE, stop=True), [Checkpoint(None), Stop()]),
    ("a stop while paused", generation(PIPE), agreed(4, PIPE, stop=True, paused=True, num=2), [Checkpoint(None), Stop()]),
    ("a stop after the last step stops nothing", generation(PIPE), agreed(19, PIPE, stop=True, any_left=False),
     [Continue(generation(PIPE))]),
    ("a pause after the last step holds", generation(PIPE), agreed(19, PIPE, paused=True, any_left=False), [Pause()]),
]  # fmt: skip

WAITS = (1, 0)
JOIN: list[Row] = [
    ("a process asks to join", generation(PIPE), agreed(4, PIPE, joining=WAITS), [AnswerRequests()]),
    ("a process asks to join a run that stops", generation(PIPE), agreed(4, PIPE, joining=WAITS, stop=True), [Checkpoint(None), Stop()]),
    ("a process asks to join after the last step", generation(PIPE), agreed(19, PIPE, joining=WAITS, any_left=False),
     [Continue(generation(PIPE))]),
    ("it was refused", generation(PIPE), RequestsAnswered(agreed=agreed(4, PIPE, joining=WAITS)), [Continue(generation(PIPE))]),
    ("it waits: one more step", generation(PIPE, waiting=WAITS), RequestsAnswered(agreed=agreed(4, PIPE, joining=WAITS)),
     [Continue(generation(PIPE, waiting=WAITS, end_step=6))]),
    ("it waits, one step before the end", generation(PIPE, waiting=WAITS), RequestsAnswered(agreed=agreed(18, PIPE, joining=WAITS)),
     [Continue(generation(PIPE, waiting=WAITS))]),
    ("it waits, and the run is to stop", generation(PIPE, waiting=WAITS, stop_after=4),
     RequestsAnswered(agreed=agreed(4, PIPE, joining=WAITS)), [Checkpoint(None), Stop()]),
    ("it waits, with other settings: these take the one step", generation(PIPE, waiting=WAITS),
     RequestsAnswered(agreed=agreed(4, WIDER, STATE, joining=WAITS)),
     [BeginGeneration(generation(WIDER, waiting=WAITS, first_step=5, end_step=6, state=STATE))]),
    ("the one more step, nothing else", generation(PIPE, waiting=WAITS, end_step=6), ended(5),
     [Continue(generation(PIPE, waiting=WAITS, end_step=6))]),
    ("the programs have ended for it", generation(PIPE, waiting=WAITS, end_step=6), ProgramEnded(end=after(5, STATE)), [Admit(None)]),
    ("the run has ended before it joined", generation(PIPE, waiting=WAITS), ProgramEnded(end=after(19)), [Finish()]),
    ("it joined: with other data, the run may have other steps", generation(PIPE, waiting=WAITS, end_step=6, num_ranks=2),
     Admitted(end=after(5, STATE), joined=True, num_ranks=3, num_steps=15),
     [BeginGeneration(generation(PIPE, first_step=6, end_step=15, num_steps=15, sync_point=15))]),
    ("it did not join", generation(PIPE, waiting=WAITS, end_step=6, num_ranks=2),
     Admitted(end=after(5), joined=False, num_ranks=2, num_steps=STEPS),
     [BeginGeneration(generation(PIPE, first_step=6, num_ranks=2))]),
    ("programs that cannot end early: at once", generation(QUORUM, waiting=WAITS, num_ranks=2),
     RequestsAnswered(agreed=agreed(4, QUORUM, STATE, joining=WAITS)), [Admit(STATE)]),
    ("the same where a checkpoint is due", generation(QUORUM, waiting=WAITS, checkpoint_every=5),
     RequestsAnswered(agreed=agreed(4, QUORUM, STATE, joining=WAITS)), [Checkpoint(4), Admit(STATE)]),
    ("it joined them: they begin from the step's state", generation(QUORUM, waiting=WAITS, num_ranks=2),
     Admitted(end=after(4, STATE), joined=True, num_ranks=3, num_steps=STEPS),
     [BeginGeneration(generation(QUORUM, first_step=5, state=STATE))]),
    ("it did not join them", generation(QUORUM, waiting=WAITS, num_ranks=2),
     Admitted(end=after(4, STATE), joined=False, num_ranks=2, num_steps=STEPS), [Continue(generation(QUORUM, num_ranks=2))]),
]  # fmt: skip

LEFT: list[Row] = [
    ("a rank left", generation(PIPE), MembersLeft(step=4, algorithm=PIPE, num_ranks=2, num_steps=STEPS),
     [BeginGeneration(generation(PIPE, num_ranks=2, first_step=5))]),
    ("a rank left after this one had read commands", generation(PIPE), MembersLeft(step=4, algorithm=WIDER, num_ranks=2, num_steps=30),
     [BeginGeneration(generation(WIDER, num_ranks=2, first_step=5, end_step=30, num_steps=30, sync_point=30))]),
    ("a rank left while a process waited to join", generation(PIPE, waiting=WAITS, end_step=6),
     MembersLeft(step=4, algorithm=PIPE, num_ranks=2, num_steps=STEPS),
     [RetryJoin(1), BeginGeneration(generation(PIPE, num_ranks=2, first_step=5))]),
    ("a rank left asynchronous ones: the others write the next checkpoint",
     generation(GOSSIP, checkpoint_every=5, sync_point=5, end_step=5),
     MembersLeft(step=6, algorithm=GOSSIP, num_ranks=2, num_steps=STEPS),
     [BeginGeneration(generation(GOSSIP, checkpoint_every=5, num_ranks=2, first_step=7, sync_point=10, end_step=10))]),
    ("a rank left asynchronous ones without checkpoints", generation(GOSSIP),
     MembersLeft(step=6, algorithm=GOSSIP, num_ranks=2, num_steps=30),
     [BeginGeneration(generation(GOSSIP, num_ranks=2, first_step=7, end_step=30, num_steps=30, sync_point=30))]),
]  # fmt: skip

ASYNCHRONOUS: list[Row] = [
    ("nothing is due", generation(ASYNC), ended(4), [Continue(generation(ASYNC))]),
    ("an evaluation is due: servers do it", generation(ASYNC), ended(4, evaluates=True), [Continue(generation(ASYNC))]),
    ("an evaluation is due: there are no servers", generation(ALONE), ended(4, evaluates=True),
     [KeepForEvaluation(4), Continue(generation(ALONE))]),
    ("a checkpoint is due: at a sync point", generation(ASYNC, checkpoint_every=5, sync_point=10, end_step=10), ended(4),
     [Continue(generation(ASYNC, checkpoint_every=5, sync_point=10, end_step=10))]),
    ("a checkpoint is due, and no rank needs another", generation(ALONE, checkpoint_every=5), ended(4),
     [Checkpoint(4), Continue(generation(ALONE, checkpoint_every=5))]),
    ("commands were announced: one more step", generation(ASYNC), ended(4, announced=True), [Continue(generation(ASYNC, end_step=6))]),
    ("they were announced a step before", generation(ASYNC, end_step=6), ended(5, announced=True),
     [Continue(generation(ASYNC, end_step=6))]),
    ("it is to stop: the run ends early", generation(ASYNC, stop_after=4), ended(4), [Continue(generation(ASYNC, stop_after=4))]),
    ("the programs have ended", generation(ASYNC), ProgramEnded(end=after(5, HERE)), [Agree()]),
    ("at the run's end", generation(ASYNC), agreed(19, ASYNC, num=0, any_left=False), [Finish()]),
    ("at an early end", generation(ASYNC, stop_after=9, sync_point=10), agreed(9, ASYNC, num=0, any_left=False), [Stop()]),
    ("at a stop after the last step", generation(ASYNC, stop_after=19), agreed(19, ASYNC, num=0, any_left=False), [Finish()]),
    ("at a sync point", generation(ASYNC, checkpoint_every=5, sync_point=10, end_step=10), agreed(9, ASYNC, HERE, num=0),
     [Checkpoint(9), BeginGeneration(generation(ASYNC, checkpoint_every=5, first_step=10, sync_point=15, end_step=15, state=HERE))]),
    ("at the last sync point", generation(ASYNC, checkpoint_every=15, sync_point=15, end_step=15), agreed(14, ASYNC, num=0),
     [Checkpoint(14), BeginGeneration(generation(ASYNC, checkpoint_every=15, first_step=15))]),
    ("a rank that skipped the last step before a sync point", generation(ASYNC, checkpoint_every=5, sync_point=10, end_step=10),
     agreed(8, ASYNC, num=0),
     [Checkpoint(9), BeginGeneration(generation(ASYNC, checkpoint_every=5, first_step=9, sync_point=15, end_step=15))]),
    ("commands at a sync point: the checkpoint follows", generation(ASYNC, checkpoint_every=5, sync_point=10, end_step=10),
     agreed(9, FASTER), [BeginGeneration(generation(FASTER, checkpoint_every=5, first_step=10, sync_point=10, end_step=10))]),
    ("other settings", generation(ASYNC, end_step=6), agreed(5, FASTER, HERE),
     [BeginGeneration(generation(FASTER, first_step=6, state=HERE))]),
    ("a learning rate was set: the programs had ended", generation(ASYNC, end_step=6), agreed(5, ASYNC, HERE),
     [BeginGeneration(generation(ASYNC, first_step=6, state=HERE))]),
    ("commands, and no rank has steps left", generation(ASYNC), agreed(19, FASTER, any_left=False), [Finish()]),
    ("commands, and no rank has steps left before an early end", generation(ASYNC, stop_after=9, sync_point=10),
     agreed(9, FASTER, any_left=False), [Stop()]),
    ("a pause", generation(ASYNC, end_step=6), agreed(5, ASYNC, paused=True), [Pause()]),
    ("a stop: the loop writes the checkpoint", generation(ASYNC, end_step=6), agreed(5, ASYNC, stop=True), [Stop()]),
    ("a stop, and no rank has steps left", generation(ASYNC), agreed(19, ASYNC, stop=True, any_left=False), [Finish()]),
    ("a process asks to join", generation(ASYNC, end_step=6), agreed(5, ASYNC, joining=WAITS), [AnswerRequests()]),
    ("it was answered", generation(ASYNC, end_step=6), RequestsAnswered(agreed=agreed(5, ASYNC, HERE, joining=WAITS)),
     [BeginGeneration(generation(ASYNC, first_step=6, state=HERE))]),
    ("a process asks to join a run that stops", generation(ASYNC, end_step=6), agreed(5, ASYNC, joining=WAITS, stop=True), [Stop()]),
]  # fmt: skip

TO_9: dict[str, Any] = {"sync_point": 9, "end_step": 9, "num_ranks": 2}
AT_9: dict[str, Any] = {"num": 0, "steps": (9, 9)}
OWN_PACE: list[Row] = [
    ("a process asks to join", generation(GOSSIP, end_step=6), agreed(5, GOSSIP, joining=WAITS, steps=(6, 9)), [AnswerRequests()]),
    ("it waits: all go to the step of the furthest rank", generation(GOSSIP, num_ranks=2),
     RequestsAnswered(agreed=agreed(5, GOSSIP, joining=WAITS, steps=(6, 9))),
     [BeginGeneration(generation(GOSSIP, first_step=6, waiting=WAITS, **TO_9))]),
    ("the same before a sync point", generation(GOSSIP, num_ranks=2, checkpoint_every=10, sync_point=10, end_step=10),
     RequestsAnswered(agreed=agreed(5, GOSSIP, joining=WAITS, steps=(6, 9))),
     [BeginGeneration(generation(GOSSIP, first_step=6, waiting=WAITS, checkpoint_every=10, **TO_9))]),
    ("all are there", generation(GOSSIP, waiting=WAITS, **TO_9), agreed(8, GOSSIP, **AT_9), [Admit(None)]),
    ("all are there, where a checkpoint is due", generation(GOSSIP, waiting=WAITS, checkpoint_every=3, **TO_9), agreed(8, GOSSIP, **AT_9),
     [Checkpoint(8), Admit(None)]),
    ("a rank is not, because there were commands", generation(GOSSIP, waiting=WAITS, **TO_9), agreed(6, GOSSIP, steps=(7, 9)),
     [BeginGeneration(generation(GOSSIP, first_step=7, waiting=WAITS, **TO_9))]),
    ("all are there, with other settings", generation(GOSSIP, waiting=WAITS, **TO_9), agreed(8, STAR, steps=(9, 9)),
     [BeginGeneration(generation(STAR, first_step=9, waiting=WAITS, **TO_9))]),
    ("all are there, and another process asks", generation(GOSSIP, waiting=WAITS, **TO_9),
     RequestsAnswered(agreed=agreed(8, GOSSIP, joining=(2, 0), steps=(9, 9))), [RetryJoin(2), Admit(None)]),
    ("all are there, and another process asks for the same rank", generation(GOSSIP, waiting=WAITS, **TO_9),
     RequestsAnswered(agreed=agreed(8, GOSSIP, joining=(1, 1), steps=(9, 9))),
     [BeginGeneration(generation(GOSSIP, first_step=9, waiting=(1, 1), **TO_9))]),
    ("a stop", generation(GOSSIP, waiting=WAITS, **TO_9), agreed(6, GOSSIP, stop=True, steps=(7, 9)), [Stop()]),
    ("the run has ended before it joined", generation(GOSSIP, waiting=WAITS), agreed(19, GOSSIP, num=0, any_left=False, steps=(20, 20)),
     [Finish()]),
    ("it joined: with other data, the run may have other steps", generation(GOSSIP, waiting=WAITS, checkpoint_every=10, **TO_9),
     Admitted(end=after(8), joined=True, num_ranks=3, num_steps=15),
     [BeginGeneration(generation(GOSSIP, first_step=9, num_steps=15, checkpoint_every=10, sync_point=10, end_step=10))]),
    ("it did not join", generation(GOSSIP, waiting=WAITS, **TO_9), Admitted(end=after(8), joined=False, num_ranks=2, num_steps=STEPS),
     [BeginGeneration(generation(GOSSIP, first_step=9, num_ranks=2))]),
    ("a rank left: checkpoints are written as before", generation(GOSSIP, checkpoint_every=5, sync_point=5, end_step=5),
     MembersLeft(step=6, algorithm=GOSSIP, num_ranks=2, num_steps=STEPS),
     [BeginGeneration(generation(GOSSIP, num_ranks=2, first_step=7, checkpoint_every=5, sync_point=10, end_step=10))]),
    ("a rank left while a process waited to join", generation(GOSSIP, waiting=WAITS, **TO_9),
     MembersLeft(step=6, algorithm=GOSSIP, num_ranks=1, num_steps=STEPS),
     [RetryJoin(1), BeginGeneration(generation(GOSSIP, num_ranks=1, first_step=7))]),
]  # fmt: skip

TABLES = {
    "in step": IN_STEP,
    "commands": COMMANDS,
    "join": JOIN,
    "left": LEFT,
    "asynchronous": ASYNCHRONOUS,
    "own pace": OWN_PACE,
}
ROWS = [pytest.param(*row, id=f"{name}: {what}") for name, table in TABLES.items() for what, *row in table]


@pytest.mark.parametrize(("before", "boundary", "instructions"), ROWS)
def test_what_follows(before: Generation, boundary: Boundary, instructions: list[Instruction]) -> None:
    assert list(decide(before, boundary)) == instructions


def test_only_the_last_instruction_is_an_outcome_or_leads_to_another_boundary() -> None:
    """In the tables, which are what `decide` returns."""
    for table in TABLES.values():
        for what, _, _, (*first, last) in table:
            assert all(isinstance(one, Evaluate | KeepForEvaluation | Checkpoint | RetryJoin) for one in first), what
            assert not isinstance(last, Evaluate | KeepForEvaluation | Checkpoint | RetryJoin), what


def test_other_settings_are_another_object_and_not_unequal_ones() -> None:
    """A rank compares by identity: whether two settings are equal must not decide whether a program is closed."""
    (same,) = decide(generation(PIPE), agreed(4, PIPE))
    (other,) = decide(generation(PIPE), agreed(4, PipeSGD(width=2)))
    assert (type(same), type(other)) == (Continue, BeginGeneration)


FOLDED: list[tuple[list[list[Command]], bool, bool]] = [
    ([[PAUSE]], True, False),
    ([[PAUSE, RESUME]], False, False),
    ([[RESUME, PAUSE]], True, False),
    ([[PAUSE], [{"set": {"lr": 0.1}}]], True, False),
    ([[PAUSE], [], [RESUME]], False, False),
    ([[PAUSE], [STOP]], True, True),
    ([[STOP, RESUME]], False, True),
    ([[{"pause": True, "resume": True}]], False, False),
    ([[{}]], False, False),
]


@pytest.mark.parametrize(("meetings", "paused", "stop"), FOLDED)
def test_commands_add_up_over_the_beats_of_a_pause(meetings: list[list[Command]], paused: bool, stop: bool) -> None:
    found = Agreed(end=after(4), algorithm=PIPE)
    for commands in meetings:
        found = found.after(commands, PIPE, any_left=True)
    assert (found.paused, found.stop, found.num_commands) == (paused, stop, sum(map(len, meetings)))
    assert not found.joining
    assert found.after([{"join": 0}], PIPE, any_left=True, joining=(0, 0)).joining


# ---------------------------------------------------------------- whole runs, step by step


def walk(
    start: Generation, commands: dict[int, Agreed] | None = None
) -> tuple[list[int], list[int | None], Instruction]:
    """One rank's steps, the places of its checkpoints, and how it ends. `commands`: step -> what is agreed after it."""
    now, commands = start, commands or {}
    steps: list[int] = []
    places: list[int | None] = []
    for _ in range(100):
        end = after(now.first_step - 1)
        outcome: Instruction | None = None
        while not isinstance(outcome, BeginGeneration | Stop | Finish):
            if end.step + 1 < now.end_step:
                end = after(end.step + 1)
                steps.append(end.step)
                boundary: Boundary = ended(end.step, announced=end.step in commands)
            else:
                boundary = ProgramEnded(end=end)
            while not isinstance(
                outcome := _carry_out(now, boundary, places), Continue | BeginGeneration | Stop | Finish
            ):
                none = Agreed(end=end, algorithm=now.algorithm, any_left=now.has_steps_left(0, end.step + 1))
                boundary = replace(commands.pop(end.step, none), end=end)
            now = getattr(outcome, "generation", now)
        if not isinstance(outcome, BeginGeneration):
            return steps, places, outcome
    raise AssertionError("no end")


def _carry_out(now: Generation, boundary: Boundary, places: list[int | None]) -> Instruction:
    *first, last = decide(now, boundary)
    places.extend(one.place for one in first if isinstance(one, Checkpoint))
    return last


@pytest.mark.parametrize("algorithm", [PIPE, ASYNC, ALONE], ids=["in step", "servers", "alone"])
@pytest.mark.parametrize("every", [None, 1, 3, 7])
@pytest.mark.parametrize("stop_after", [None, 0, 8, 19])
def test_every_step_is_taken_once_and_each_due_checkpoint_is_written(
    algorithm: Algorithm, every: int | None, stop_after: int | None
) -> None:
    start = generation(algorithm, stop_after=stop_after, checkpoint_every=every)
    start = replace(start, sync_point=first_sync_point(start, 0)).following(after(-1))
    steps, places, outcome = walk(start)
    last = STEPS if stop_after is None else stop_after + 1
    assert steps == list(range(last))
    assert isinstance(outcome, Stop) == (stop_after is not None and (last < STEPS or not algorithm.asynchronous))
    within = [place for place in places if place is not None]
    due = [step for step in range(last) if every and (step + 1) % every == 0 and step + 1 < STEPS]
    stops_there = isinstance(outcome, Stop) and last - 1 in due
    assert within == [step for step in due if not (stops_there and step == last - 1 and algorithm is not ALONE)]


@pytest.mark.parametrize("stop_after", [None, 14, 19])
@pytest.mark.parametrize("step", [0, 4, 13, 14, 18, 19])
@pytest.mark.parametrize(("algorithm", "other"), [(PIPE, WIDER), (ASYNC, FASTER)], ids=["in step", "servers"])
def test_other_settings_leave_no_step_out_and_move_no_stop(
    algorithm: Algorithm, other: Algorithm, step: int, stop_after: int | None
) -> None:
    start = generation(algorithm, stop_after=stop_after)
    start = replace(start, sync_point=first_sync_point(start, 0)).following(after(-1))
    end = STEPS if stop_after is None else stop_after + 1
    # Asynchronous ranks take one more step before they meet
    where = step if algorithm is PIPE else min(step + 1, end - 1)
    given = agreed(where, other, any_left=where + 1 < start.end_of_run)
    steps, _, outcome = walk(start, {step: given, where: given})
    stops = end < STEPS or (algorithm is PIPE and stop_after is not None)
    assert (steps, outcome) == (list(range(end)), Stop() if stops else Finish())
