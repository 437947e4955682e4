"""Ranks of a run that has shrunk admit a process in the place of a rank that left.

The process asks by a command to the run (`join`). When all synchronous ranks have agreed on it at one step's end, each
program takes one more step. It knows that this step is its last, so it applies gradients in flight. Then all ranks have
what the process needs: the lowest rank's parameters, optimizer and position in the data, and the memories of
collectives that are equal on all ranks. Some programs can end only at a step that was known when they began
(`Algorithm.restart`). They continue from the end of the first step, where nothing is in flight.

Ranks at their own pace (AD-PSGD) agree on the command at different steps. They continue up to the step of the furthest
rank, as to a checkpoint. There they have equal parameters, and no step or minibatch is left out or taken twice.
"""

from __future__ import annotations

from typing import Any

from workbench.collectives.memory import of_all_ranks
from workbench.errors import ConfigError
from workbench.ops import EndStep, State
from workbench.program import Algorithm, Context
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint.rank_state import resume, take_checkpoint
from workbench.runtimes.control.controller import RETRY_JOIN, RunController
from workbench.runtimes.elastic.admission import JoinState, admit
from workbench.runtimes.elastic.shrink import renumber_ranks
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import Membership


def join_refusal(rank: int, waiting: tuple[int, int] | None, members: Membership | None) -> str | None:
    """Return why a process may not join as that rank; None if it is to wait until the programs end.

    All ranks call it after the same step.

    Args:
        waiting: the rank of another process that waits to join.
    """
    if members is None or not members.shrinks:
        return "this run does not continue without a killed rank: use on_failure='shrink'"
    members.departures(now=True)
    if not 0 <= rank < members.num_ranks or not members.has_left(rank):
        return f"rank {rank} has not left"
    return RETRY_JOIN if waiting is not None else None


def admit_waiting(
    waiting: tuple[int, int],
    worker: LocalTraining,
    ctx: Context,
    interpreter: Interpreter,
    controller: RunController,
    here: JoinState,
    kept: State | None,
) -> bool:
    """Meet the process that waits.

    Return True if it joined. All ranks call it after the same step, with nothing in flight.

    Args:
        waiting: its rank, and the number of its earlier requests.
        kept: the state with which this rank's next program continues.
    """
    (rank, number), sampler, clock = waiting, worker.sampler, interpreter.clock
    memory = of_all_ranks(ctx.memory)
    saved = take_checkpoint(
        controller.algorithm, worker.replica, interpreter.transport.num_workers, EndStep(here.step), memory, sampler
    )
    saved["first_loss"] = worker.loss_watch.first(worker.rank)
    # Background work of a program that may continue must not time out. Asynchronous ranks have none.
    clock.set_paused(not controller.algorithm.asynchronous)
    try:
        refused = admit(rank, number, here, interpreter, worker.settings.timeout_s, saved)
    finally:
        clock.set_paused(False)
    if refused is not None:
        controller.refuse(rank, refused)
        return False
    renumber_ranks(worker, ctx, interpreter.transport, here.step, sampler.samples_before(here.step + 1), kept)
    ctx.link = None  # measured again, with the rank that joined
    return True


def begin_joined(
    worker: LocalTraining, ctx: Context, saved: dict[str, Any], algorithm: Algorithm, interpreter: Interpreter
) -> None:
    """On the process that joins: begin from the state that the lowest rank wrote.

    Raises:
        ConfigError: the state is of another number of ranks, or of another model.
    """
    if saved["num_workers"] != interpreter.transport.num_workers:
        raise ConfigError(
            f"this process expected a run of {saved['num_workers']} ranks, and found "
            f"{interpreter.transport.num_workers}: start it again"
        )
    renumber_ranks(worker, ctx, interpreter.transport, saved["step"], saved["data"]["samples"])
    worker.loss_watch.begin(worker.rank, saved["first_loss"])
    resume(saved, algorithm, worker.replica, ctx)
    ctx.resumed, ctx.num_steps = None, worker.num_steps
