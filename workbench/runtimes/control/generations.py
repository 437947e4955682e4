"""Generations of a run, and what follows at the boundary of each: decisions without communication, files or clocks.

A run is a sequence of generations. In a generation, every rank runs one program of the same algorithm, from one step to
another. A new generation begins when a setting changes, when ranks leave or join, and after a checkpoint for which
asynchronous ranks had to synchronize.

`decide` returns the instructions that follow at a boundary. It is a pure function, so ranks that know the same facts
make the same decision. Real and simulated ranks use the same function. Ranks *in step* end each step together.
*Asynchronous* ranks (`Algorithm.asynchronous`) meet only when all their programs have ended. Ranks *at their own pace*
(`is_at_own_pace`) are asynchronous, each with its own replica and step.

| boundary | ranks | what is known there | instructions |
|---|---|---|---|
| `StepEnded` | in step | an evaluation is due | `Evaluate`, then as below |
| | | commands were announced | `Agree` |
| | | otherwise | the *step table* |
| | asynchronous | an evaluation is due, no servers | `KeepForEvaluation`, then as below |
| | | replicas are never equal, a checkpoint is due | `Checkpoint`, then as below |
| | | commands were announced | `Continue`, and the next step is the program's last |
| | | otherwise | `Continue` |
| `ProgramEnded` | in step | a process waits to join, and steps are left | `Admit` |
| | | otherwise | `Finish` |
| | asynchronous | anything | `Agree` |
| `Agreed` | all | paused, not stopped | `Pause`, then agree again |
| | in step | stopped, and steps are left | `Checkpoint`, `Stop` |
| | asynchronous | stopped, and steps are left | `Stop` (the loop writes the checkpoint when the clocks are compared) |
| | all | a process asks to join, and steps are left | `AnswerRequests` |
| | in step | otherwise | the step table |
| | asynchronous | otherwise | the *meeting table* |
| `RequestsAnswered` | in step | anything | the step table |
| | asynchronous | anything | the meeting table |
| `Admitted` | all | the programs have ended | `BeginGeneration`, whether or not the process joined |
| | in step | the programs have not ended, the process joined | `BeginGeneration` from the step's state |
| | | the programs have not ended, it did not join | `Continue` |
| `MembersLeft` | all | a process waited to join | `RetryJoin`, then as below |
| | | anything | `BeginGeneration` without state, up to the next sync point |

Step table, for ranks in step (the first row that applies; a due `Checkpoint` comes before the last four):

| what is known | instructions |
|---|---|
| it is the step after which the run is to stop | `Checkpoint`, `Stop` |
| a process waits to join, and the program cannot end early (`Algorithm.restart`) | `Admit`, with the state that the program keeps |
| the algorithm has other settings | `BeginGeneration` from the step's state |
| a process waits to join | `Continue`, and the next step is the program's last |
| otherwise | `Continue` |

Meeting table, for asynchronous ranks (the first row that applies):

| what is known | instructions |
|---|---|
| at their own pace, a process waits to join, and steps are left | the *admission table* |
| no command was given, and it is a sync point before the run's end | `Checkpoint`, `BeginGeneration` up to the next one |
| commands were given, and steps are left | `BeginGeneration` up to the same sync point |
| the run was to stop before its last step | `Stop` |
| otherwise | `Finish` |

Admission table, for ranks at their own pace. A second process must ask again (`RetryJoin`).

| what is known | instructions |
|---|---|
| all ranks have finished the same step, and nothing else has changed | a due `Checkpoint`, `Admit` |
| otherwise | `BeginGeneration` up to the step of the furthest rank |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from workbench.ops import EndStep, State
from workbench.program import Algorithm, Replicas, Restart
from workbench.runtimes.control.commands import Command

# -- a generation ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One program on each rank, from one step to another.

    Attributes:
        algorithm: makes the programs.
        num_ranks: how many ranks there are.
        first_step: where the programs begin.
        end_step: the step before which they end. It can become smaller while they run.
        num_steps: the steps of the whole run, with these ranks.
        sync_point: the step before which asynchronous ranks meet next; at the latest the end of the run.
        state: the state of the last `EndStep` before the first step. The programs continue from it.
        waiting: a rank whose new process waits to join, and the number of its earlier requests.
        stop_after: the step after which the run is to stop.
        checkpoint_every: steps from one checkpoint to the next.
    """

    algorithm: Algorithm
    num_ranks: int
    first_step: int
    end_step: int
    num_steps: int
    sync_point: int
    state: State | None = None
    waiting: tuple[int, int] | None = None
    stop_after: int | None = None
    checkpoint_every: int | None = None

    @property
    def end_of_run(self) -> int:
        """The step before which the run ends. A stop of asynchronous ranks is an early end."""
        if self.algorithm.asynchronous and self.stop_after is not None:
            return min(self.num_steps, self.stop_after + 1)
        return self.num_steps

    def has_steps_left(self, rank: int, step: int) -> bool:
        """Return True if that rank computes gradients and the run has that step."""
        return rank in self.algorithm.roles(self.num_ranks).computing and step < self.end_of_run

    def checkpoint_due(self, step: int) -> bool:
        """Return True if a checkpoint follows that step."""
        every = self.checkpoint_every
        return every is not None and (step + 1) % every == 0 and step + 1 < self.num_steps

    def continues_after(self, step: int) -> bool:
        """Return True if `decide` returns only `Continue` after that step, without commands and evaluations.

        A cheap test for a caller with many ranks. If it returns False, call `decide`.
        """
        return not (self.checkpoint_due(step) or step == self.stop_after or self.waiting)

    def ending_after(self, step: int) -> Generation:
        """Return this generation with `step` as its last step, unless it ends earlier."""
        return replace(self, end_step=min(self.end_step, step + 1))

    def following(self, end: EndStep, **changes: Any) -> Generation:
        """Return the generation that begins after a step, with its state.

        If a process waits to join and the programs can end early, the generation has one step. All programs then end at
        a known step, with nothing in flight.
        """
        end_step = changes.get("sync_point", self.sync_point)
        new = replace(self, first_step=end.step + 1, state=end.state, end_step=end_step, **changes)
        return new.ending_after(end.step + 1) if new.waiting and new.algorithm.restart == Restart.ANYWHERE else new


def first_sync_point(generation: Generation, furthest_step: int) -> int:
    """Return the step before which asynchronous ranks meet first, in a run or after ranks have left.

    Args:
        furthest_step: the largest first step of any rank. A stop can leave asynchronous ranks at different steps.
    """
    every = generation.checkpoint_every if needs_sync_point(generation.algorithm) else None
    return sync_point_after(furthest_step, every, generation.end_of_run)


def needs_sync_point(algorithm: Algorithm) -> bool:
    """Return True if all ranks must meet for a checkpoint.

    This holds for asynchronous ranks whose replicas are equal when their programs end.
    """
    return algorithm.asynchronous and algorithm.replicas != Replicas.NEVER


def is_at_own_pace(algorithm: Algorithm) -> bool:
    """Return True if a run can shrink in which each rank has its own replica and its own step.

    Before such ranks admit a process, they must finish the same step.
    """
    return algorithm.asynchronous and algorithm.elasticity.shrinks


def sync_point_after(step: int, every: int | None, end: int) -> int:
    """Return the first step after `step` before which a checkpoint is due; at the latest the run's end.

    >>> sync_point_after(0, 4, 10), sync_point_after(4, 4, 10), sync_point_after(8, 4, 10), sync_point_after(0, None, 10)
    (4, 8, 10, 10)
    """
    return end if every is None else min((step // every + 1) * every, end)


# -- boundaries ------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A step of the generation's program has ended.

    Attributes:
        announced: this rank knows of commands that the ranks have not yet carried out.
        evaluates: an evaluation is due after this step.
    """

    end: EndStep
    announced: bool = False
    evaluates: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnded:
    """The program has ended by itself. `end` is of its last step; of the step before its first if it took none."""

    end: EndStep


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """All ranks have read the same commands, and have adopted changed settings.

    Attributes:
        algorithm: the algorithm with its settings after these commands.
        num_commands: number of commands since the ranks began this meeting.
        paused, stop: whether these commands together pause or stop the run.
        joining: a process that asks to join, and is answered now: its rank, and the number of earlier requests for its
            place.
        any_left: some rank has steps left.
        steps: each rank's next step.
    """

    end: EndStep
    algorithm: Algorithm
    num_commands: int = 0
    paused: bool = False
    stop: bool = False
    joining: tuple[int, int] | None = None
    any_left: bool = True
    steps: tuple[int, ...] = ()

    @property
    def holds(self) -> bool:
        """Return True if the run is to wait for more commands."""
        return self.paused and not self.stop

    def after(
        self,
        commands: list[Command],
        algorithm: Algorithm,
        *,
        any_left: bool,
        joining: tuple[int, int] | None = None,
        steps: tuple[int, ...] = (),
    ) -> Agreed:
        """Return what is agreed after more commands."""
        paused = self.paused
        for command in commands:
            paused = (paused or bool(command.get("pause"))) and not command.get("resume")
        return replace(
            self,
            algorithm=algorithm,
            num_commands=self.num_commands + len(commands),
            paused=paused,
            stop=self.stop or any(command.get("stop") for command in commands),
            joining=joining,
            any_left=any_left,
            steps=steps,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsAnswered:
    """Processes that asked to join were answered. `Generation.waiting` names one that joins when the programs end."""

    agreed: Agreed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The ranks have met the process that waited, or have failed to. `num_ranks` and `num_steps` hold from now on."""

    end: EndStep
    joined: bool
    num_ranks: int
    num_steps: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MembersLeft:
    """Ranks left. The remaining ranks have equal replicas, and have agreed on the step after which they continue."""

    step: int
    algorithm: Algorithm
    num_ranks: int
    num_steps: int


Boundary = StepEnded | ProgramEnded | Agreed | RequestsAnswered | Admitted | MembersLeft


# -- instructions ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Evaluate:
    """All ranks evaluate the model after this step. The time does not count as training."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class KeepForEvaluation:
    """Rank 0 keeps a copy of its parameters, and evaluates it after the run, so that no asynchronous rank waits."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write this rank's part of the checkpoint of step `place`. None: of the checkpoint of a stop."""

    place: int | None


@final
@dataclass(frozen=True, slots=True)
class Agree:
    """Read the same commands on all ranks, and adopt changed settings. Leads to `Agreed`."""


@final
@dataclass(frozen=True, slots=True)
class Pause:
    """Wait a short time for commands, then agree. Leads to `Agreed`."""


@final
@dataclass(frozen=True, slots=True)
class AnswerRequests:
    """Answer processes that ask to join. Asynchronous ranks admit one here. Leads to `RequestsAnswered`."""


@final
@dataclass(frozen=True, slots=True)
class Admit:
    """Meet the process that waits. `state`: what this rank's next program continues with. Leads to `Admitted`."""

    state: State | None


@final
@dataclass(frozen=True, slots=True)
class RetryJoin:
    """Tell the process that waits for this rank's place to ask again."""

    rank: int


@final
@dataclass(frozen=True, slots=True)
class Continue:
    """The program continues. The generation may end earlier than before."""

    generation: Generation


@final
@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """Close the program, and begin the next generation's."""

    generation: Generation


@final
@dataclass(frozen=True, slots=True)
class Stop:
    """The run is stopped here; it can be resumed."""


@final
@dataclass(frozen=True, slots=True)
class Finish:
    """The run has ended."""


Outcome = Continue | BeginGeneration | Stop | Finish
Instruction = Evaluate | KeepForEvaluation | Checkpoint | Agree | Pause | AnswerRequests | Admit | RetryJoin | Outcome


# -- decisions -------------------------------------------------------------------------------------------------


def decide(generation: Generation, boundary: Boundary) -> tuple[Instruction, ...]:
    """Return what follows at a boundary, in order, by the tables of this module.

    The last instruction is an `Outcome`, or it leads to another boundary.
    """
    match boundary:
        case StepEnded():
            return _step_ended(generation, boundary)
        case ProgramEnded():
            return _program_ended(generation, boundary.end)
        case Agreed():
            return _agreed(generation, boundary)
        case RequestsAnswered():
            return _commands_done(generation, boundary.agreed)
        case Admitted():
            return (_admitted(generation, boundary),)
        case MembersLeft():
            return _members_left(generation, boundary)


def _step_ended(generation: Generation, boundary: StepEnded) -> tuple[Instruction, ...]:
    end, algorithm = boundary.end, generation.algorithm
    instructions: list[Instruction] = []
    if not algorithm.asynchronous:
        if boundary.evaluates:
            instructions.append(Evaluate(end.step))
        if boundary.announced:
            return (*instructions, Agree())
        return (*instructions, *_in_step(generation, algorithm, end))
    if boundary.evaluates and not algorithm.requires.servers:
        instructions.append(KeepForEvaluation(end.step))
    if not needs_sync_point(algorithm) and generation.checkpoint_due(end.step):
        instructions.append(Checkpoint(end.step))
    return (*instructions, Continue(generation.ending_after(end.step + 1) if boundary.announced else generation))


def _in_step(generation: Generation, algorithm: Algorithm, end: EndStep) -> tuple[Instruction, ...]:
    """Apply the step table. `algorithm` has the settings for the next steps."""
    if end.step == generation.stop_after:
        return (Checkpoint(None), Stop())
    saved = (Checkpoint(end.step),) if generation.checkpoint_due(end.step) else ()
    if generation.waiting and algorithm.restart != Restart.ANYWHERE:
        return (*saved, Admit(end.state))
    if algorithm is not generation.algorithm:
        return (*saved, BeginGeneration(generation.following(end, algorithm=algorithm)))
    return (*saved, Continue(generation.ending_after(end.step + 1) if generation.waiting else generation))


def _program_ended(generation: Generation, end: EndStep) -> tuple[Instruction, ...]:
    if generation.algorithm.asynchronous:
        return (Agree(),)
    if generation.waiting and end.step + 1 < generation.num_steps:
        return (Admit(None),)
    return (Finish(),)


def _agreed(generation: Generation, agreed: Agreed) -> tuple[Instruction, ...]:
    if agreed.holds:
        return (Pause(),)
    if agreed.stop and agreed.any_left:
        return (Stop(),) if generation.algorithm.asynchronous else (Checkpoint(None), Stop())
    if agreed.joining and agreed.any_left:
        return (AnswerRequests(),)
    return _commands_done(generation, agreed)


def _commands_done(generation: Generation, agreed: Agreed) -> tuple[Instruction, ...]:
    """Return what follows after all commands, by the step table or the meeting table."""
    end = agreed.end
    if not generation.algorithm.asynchronous:
        return _in_step(generation, agreed.algorithm, end)
    if is_at_own_pace(agreed.algorithm) and (generation.waiting or agreed.joining) and agreed.any_left:
        return _joining_at_own_pace(generation, agreed)
    if not agreed.num_commands and generation.sync_point != generation.end_of_run:
        place = generation.sync_point
        following = sync_point_after(place, generation.checkpoint_every, generation.end_of_run)
        return (Checkpoint(place - 1), BeginGeneration(generation.following(end, sync_point=following)))
    if agreed.num_commands and agreed.any_left:
        return (BeginGeneration(generation.following(end, algorithm=agreed.algorithm)),)
    return (Stop(),) if generation.end_of_run < generation.num_steps else (Finish(),)


def _joining_at_own_pace(generation: Generation, agreed: Agreed) -> tuple[Instruction, ...]:
    """Return what follows while a process waits for ranks at their own pace, by the admission table."""
    waiting, joining, end = generation.waiting or agreed.joining, agreed.joining, agreed.end
    told: tuple[Instruction, ...] = ()
    if joining and waiting and joining[0] != waiting[0]:
        told = (RetryJoin(joining[0]),)
    elif joining:
        waiting = joining  # a process that asked earlier for the same rank has ended
    unchanged = waiting == generation.waiting and agreed.algorithm is generation.algorithm
    if unchanged and len(set(agreed.steps)) == 1:
        saved = (Checkpoint(end.step),) if generation.checkpoint_due(end.step) else ()
        return (*told, *saved, Admit(None))
    changes: dict[str, Any] = {"algorithm": agreed.algorithm, "waiting": waiting}
    return (*told, BeginGeneration(generation.following(end, sync_point=max(agreed.steps), **changes)))


def _admitted(generation: Generation, boundary: Admitted) -> Instruction:
    ended = generation.algorithm.asynchronous or generation.algorithm.restart == Restart.ANYWHERE
    new = replace(generation, num_ranks=boundary.num_ranks, num_steps=boundary.num_steps, waiting=None)
    if not ended and not boundary.joined:
        return Continue(replace(generation, waiting=None))
    end = EndStep(boundary.end.step) if ended else boundary.end
    return BeginGeneration(new.following(end, sync_point=first_sync_point(new, end.step + 1)))


def _members_left(generation: Generation, boundary: MembersLeft) -> tuple[Instruction, ...]:
    told = (RetryJoin(generation.waiting[0]),) if generation.waiting else ()
    changes: dict[str, Any] = {"algorithm": boundary.algorithm, "num_ranks": boundary.num_ranks, "waiting": None}
    fewer = replace(generation, num_steps=boundary.num_steps, **changes)
    sync_point = first_sync_point(fewer, boundary.step + 1)
    return (*told, BeginGeneration(fewer.following(EndStep(boundary.step), sync_point=sync_point)))
