"""Ranks that went on as fewer take a process in that has come in the place of one that left: they are one more again.

It says so by a word to the run (`join`), as in `rejoin`. Where all have taken it, at one step's end, each takes one more step, the last of
its program, which so applies what is in flight; then all hold what a newcomer can be given: the parameters, optimizer and place in the
data of the lowest rank, and what collectives remember that is no rank's own. A method whose programs cannot end at a step that
nobody knew before (`Algorithm.restart`) goes on from that step's end itself: nothing is under way there, since all have met.
"""

from __future__ import annotations

from typing import Any, final

from workbench.collectives.memory import of_all_ranks
from workbench.errors import ConfigError
from workbench.ops import EndStep
from workbench.program import Algorithm, Context, Restart
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint.rank_state import resume, take_checkpoint
from workbench.runtimes.control.controller import ASK_AGAIN, RunController
from workbench.runtimes.elastic.admission import JoinState, admit
from workbench.runtimes.elastic.shrink import number_anew
from workbench.runtimes.execution.interpreter import Interpreter


@final
class Grower:
    """Kept by a session.

    Attributes:
        waiting: a rank that has asked to be let in, and is to be where all programs have ended.
    """

    def __init__(self, worker: LocalTraining, interpreter: Interpreter, controller: RunController) -> None:
        self._worker, self._interpreter, self._controller = worker, interpreter, controller
        self._transport = interpreter.transport
        self.waiting: tuple[int, int] | None = None  # and which time it asks

    def ask(self, rank: int, number: int) -> str | None:
        """A process has come in that rank's place: why it is not let in, or None. Every rank is asked at the same step's end."""
        members = self._transport.members
        if members is None or not members.shrinks:
            return "these ranks do not go on without one that is killed: on_failure='shrink' lets them"
        members.look(now=True)
        if not 0 <= rank < members.num_ranks or not members.has_left(rank):
            return f"rank {rank} has not left"
        if self.waiting is not None:
            return ASK_AGAIN
        self.waiting = (rank, number)
        return None

    def closes(self, algorithm: Algorithm) -> bool:
        """Whether a program of this method is to be closed at a step's end, and not to come to its own."""
        return self.waiting is not None and algorithm.restart != Restart.ANYWHERE

    def end_of(self, algorithm: Algorithm, last: int, end: int | None) -> int | None:
        """Where a program of this method ends, behind whose step `last` all are: sooner than `end`, where somebody waits for it."""
        return end if self.waiting is None or end is None or algorithm.restart != Restart.ANYWHERE else min(last + 2, end)

    def forget(self) -> None:
        """Another has left: who waits is to ask again."""
        if self.waiting is not None:
            self._controller.refuse(self.waiting[0], ASK_AGAIN)
            self.waiting = None

    def let_in(self, algorithm: Algorithm, ctx: Context, here: JoinState, kept: tuple[Any, ...]) -> bool:
        """Nothing is under way: meet who waits, and go on with it; whether it came. Every rank comes here, behind the same step.

        `kept`: gradients of this rank with which its program goes on.
        """
        assert self.waiting is not None
        (rank, number), sampler, settings = self.waiting, self._worker.sampler, self._worker.settings
        memory = of_all_ranks(ctx.memory)
        saved = take_checkpoint(algorithm, self._worker.replica, self._transport.num_workers, EndStep(here.step), memory, sampler)
        saved["first_loss"] = self._worker.loss_watch.first(self._worker.rank)
        clock = self._interpreter.clock
        clock.hold(True)  # what waits beside this, of a program that may go on, is not to give up
        try:
            refused = admit(rank, number, here, self._interpreter, settings.timeout_s, saved)
        finally:
            clock.hold(False)
        self.waiting = None
        if refused is not None:
            self._controller.refuse(rank, refused)
            return False
        number_anew(self._worker, ctx, self._transport, here.step, sampler.samples_before(here.step + 1), kept)
        ctx.link = None  # measured anew, with who has come
        return True


def begin_as(worker: LocalTraining, ctx: Context, saved: dict[str, Any], algorithm: Algorithm, interpreter: Interpreter) -> None:
    """The same in the rank that comes.

    Raises:
        ConfigError: what it was given is another model's.
    """
    if saved["num_workers"] != interpreter.transport.num_workers:
        raise ConfigError(f"it was told of {saved['num_workers']} ranks, and met {interpreter.transport.num_workers}")
    number_anew(worker, ctx, interpreter.transport, saved["step"], saved["data"]["samples"])
    worker.loss_watch.begin(worker.rank, saved["first_loss"])
    resume(saved, algorithm, worker.replica, ctx)
    ctx.resumed, ctx.num_steps = None, worker.num_steps
