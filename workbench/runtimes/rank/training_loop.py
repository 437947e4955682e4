"""The loop around a rank's programs: it records their steps, and carries out what follows at their ends.

`runtimes/control/generations.py` decides what follows: this loop describes a boundary, and `decide` answers with
instructions.
"""

from __future__ import annotations

import time
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import Tensor

from workbench.ops import EndStep
from workbench.program import Algorithm, Context, Replicas, lower, shares_buffers
from workbench.replica.local_training import LocalTraining, distance_from_mean
from workbench.runtimes.checkpoint.rank_state import continue_from_state
from workbench.runtimes.checkpoint.writer import CheckpointWriter
from workbench.runtimes.control.controller import RETRY_JOIN, RunController
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
    Generation,
    Instruction,
    KeepForEvaluation,
    MembersLeft,
    Outcome,
    Pause,
    ProgramEnded,
    RequestsAnswered,
    RetryJoin,
    StepEnded,
    Stop,
    decide,
    first_sync_point,
    needs_sync_point,
)
from workbench.runtimes.elastic.admission import JoinState, admit
from workbench.runtimes.elastic.grow import admit_waiting, join_refusal
from workbench.runtimes.elastic.shrink import FAILURES, Shrinker
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.execution.shared_state import share_module_state
from workbench.runtimes.execution.slept_compute import gather_late_passes
from workbench.runtimes.liveness.membership import require_all
from workbench.runtimes.rank.async_evaluations import AsyncEvaluations
from workbench.runtimes.rank.callback_thread import CallbackThread
from workbench.runtimes.rank.replica_check import ReplicaCheck
from workbench.runtimes.transport.base import Deadline, offset_to_rank0
from workbench.runtimes.transport.measure_link import measure_link
from workbench.trace.recorder import Recorder
from workbench.trace.store import read_info, update_run
from workbench.trace.weights import State, write_weights

NEW_COMMANDS = 1  # message of asynchronous ranks to each other: there are new commands


@final
class TrainingLoop:
    """One rank's training, from its first step to its files in the run's folder.

    Args:
        stop_after: stop the run after this step, with a checkpoint.
    """

    def __init__(
        self,
        controller: RunController,
        worker: LocalTraining,
        interpreter: Interpreter,
        recorder: Recorder,
        folder: Path,
        callbacks: CallbackThread,
        *,
        stop_after: int | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._controller, self._worker, self._interpreter = controller, worker, interpreter
        self._recorder, self._folder, self._stop_after = recorder, folder, stop_after
        self._writer = CheckpointWriter(worker, interpreter, folder)
        self._shrinker = Shrinker(worker, interpreter, controller, folder)
        self._transport, self._replica = interpreter.transport, worker.replica
        # Checked at each step, because some ranks never wait for a peer.
        self._peers = Deadline("", self._transport.peer_failure, None)
        self._evaluations: AsyncEvaluations | None = None
        if controller.algorithm.asynchronous:
            self._evaluations = AsyncEvaluations(
                controller.algorithm, worker, interpreter, recorder, folder, self._seconds
            )
        self._evaluates_now = self._evaluates_during_training(callbacks)
        self._lagging = self._transport.device.type == "cuda"  # reading a loss would wait for the device
        self._generation: Generation
        self._end = EndStep(-1)  # end of the last step that this rank has finished
        self._paused_s = 0.0  # of evaluations
        self._replica_check = ReplicaCheck(worker.replica, interpreter, worker.settings.check_replicas)
        self._pending: tuple[tuple[Any, ...], Any] | None = None  # a step's row, and the event of its loss

    def run(self, ctx: Context, at: list[int], late: JoinState | None = None) -> dict[str, Any]:
        """Train until the end or a stop, and write the model and the record into the run's folder.

        Args:
            at: a list with the current step, for the report of a failure.
            late: the run's position, if this rank joins later; None: it takes part from the beginning.

        Returns:
            {"rank", "steps", "seconds", "stopped"}.
        """
        interpreter, transport = self._interpreter, self._transport
        in_step = not self._algorithm.asynchronous
        shift = (
            self._begin_together() if late is None else late.begin(interpreter.clock, self._controller, trained=in_step)
        )
        interpreter.context = ctx
        stopped = self._take_steps(ctx, at, late)
        last = self._end.step
        if not stopped:
            self._paused_s += self._replica_check.end_run(self._algorithm, last + 1)
        if self._evaluations is None and not stopped:
            if self._worker.can_evaluate:
                self._evaluate(last)  # all gradients in flight have been applied
            self._recorder.end_step()
        self._flush_pending()
        seconds = self._seconds()
        interpreter.flush()
        offset_s = offset_to_rank0(transport, interpreter.clock.deadline("the clocks to be compared"))
        self._recorder.clock(interpreter.clock.now(), offset_s - shift)
        if self._evaluations is not None:
            last = self._finish_asynchronous(self._evaluations, seconds, stopped=stopped)
        self._writer.finish()
        self._report_late_passes()
        self._write_result(last, seconds, stopped=stopped)
        return {"rank": ctx.rank, "steps": last + 1, "seconds": seconds, "stopped": stopped}

    def _finish_asynchronous(self, evaluations: AsyncEvaluations, seconds: float, *, stopped: bool) -> int:
        """Write the checkpoint of a stop, and evaluate: all ranks have equal parameters, and none waits.

        Returns the run's last step.
        """
        last = self._end.step
        updated_s = evaluations.gather()
        if evaluations.has_servers and not stopped and self._transport.rank == 0:
            last = self._worker.num_steps - 1  # this rank may have skipped its last steps
        if stopped:
            self._writer.keep(self._algorithm, self._end, None)
        evaluations.make(last, seconds if updated_s is None or stopped else updated_s, stopped=stopped)
        self._recorder.end_step()
        return last

    def _begin_together(self) -> float:
        """Begin with all ranks. Return rank 0's origin on its clock, minus this rank's origin on its own clock."""
        interpreter, transport = self._interpreter, self._transport
        transport.barrier(interpreter.clock.deadline("all ranks to begin"))
        offset_s = offset_to_rank0(transport, interpreter.clock.deadline("the clocks to be compared"))
        transport.barrier(interpreter.clock.deadline("all ranks to begin"))
        origin = interpreter.clock.origin_s = time.perf_counter()
        shift = self._origin_of_rank0() - origin
        self._recorder.clock(0.0, offset_s - shift)
        return shift

    @property
    def _algorithm(self) -> Algorithm:
        """Return the algorithm with its present settings."""
        return self._controller.algorithm

    def _seconds(self, at_s: float | None = None) -> float:
        """Return the seconds of training, until now or until a time: without evaluations and pauses."""
        clock = self._interpreter.clock
        return (clock.now() if at_s is None else at_s) - self._paused_s - clock.pause_seconds()

    def _take_steps(self, ctx: Context, at: list[int], late: JoinState | None) -> bool:
        """Train, one generation after the other; return True if the run was stopped."""
        self._begin(self._first_generation(ctx, late))
        at[0] = ctx.first_step  # the current step, for the message of a failure
        if late is not None:
            self._paused_s = late.paused_s
            if not self._algorithm.asynchronous:  # all ranks were paused
                self._paused_s += self._interpreter.clock.now() - late.seconds
        resumes = late is not None  # a rank that joins begins as all others begin the next generation
        while True:
            try:
                self._make_ready(ctx, resumes=resumes)
                outcome = self._run_generation(ctx, at)
                resumes = True
            except FAILURES as error:
                step = self._shrinker.shrink(error, self._algorithm, ctx, self._end.step)
                known: dict[str, Any] = {"num_ranks": ctx.num_workers, "num_steps": self._worker.num_steps}
                outcome = self._follow(MembersLeft(step=step, algorithm=self._algorithm, **known), ctx)
                resumes = False  # `shrink` has set where the next programs begin
            if not isinstance(outcome, BeginGeneration):
                return isinstance(outcome, Stop)
            self._begin(outcome.generation)

    def _first_generation(self, ctx: Context, late: JoinState | None) -> Generation:
        settings, num_steps = self._worker.settings, self._worker.num_steps
        generation = Generation(
            algorithm=self._algorithm,
            num_ranks=ctx.num_workers,
            first_step=ctx.first_step,
            end_step=num_steps,
            num_steps=num_steps,
            sync_point=num_steps,
            stop_after=self._stop_after,
            checkpoint_every=settings.checkpoint_every,
        )
        sync_point = first_sync_point(generation, self._furthest_step(ctx)) if late is None else late.sync_point
        return generation.following(EndStep(ctx.first_step - 1, state=ctx.resumed), sync_point=sync_point)

    def _furthest_step(self, ctx: Context) -> int:
        """Return the largest first step of any rank. All ranks call it."""
        if self._worker.settings.checkpoint_every is None or not needs_sync_point(self._algorithm):
            return ctx.first_step
        deadline = self._interpreter.clock.deadline("all ranks to agree on the step of the next checkpoint")
        steps = require_all(self._transport.gather_texts(str(ctx.first_step), deadline), "the beginning of a run")
        return max(map(int, steps))

    def _begin(self, generation: Generation) -> None:
        self._generation = generation
        self._end = EndStep(generation.first_step - 1, state=generation.state)

    def _make_ready(self, ctx: Context, *, resumes: bool) -> None:
        """Prepare the generation's program (`resumes`: from the state of the one before). All ranks call it."""
        self._callbacks.follow_as(self._transport.rank)
        if resumes:
            self._interpreter.continue_from_state(self._end.state)
            continue_from_state(ctx, self._end)
        self._transport.open_lanes(self._algorithm.requires.num_lanes)
        self._interpreter.shares_buffers = shares_buffers(self._algorithm)
        if self._algorithm.requires.link and ctx.link is None:
            ctx.link = measure_link(
                self._transport, self._interpreter.clock.deadline, self._worker.replica.layout.message_bytes
            )
        ctx.num_steps = self._generation.end_step

    def _run_generation(self, ctx: Context, at: list[int]) -> Outcome:
        """Run the program until it ends or its generation does."""
        with closing(lower(ctx, self._generation.algorithm.worker(ctx))) as program:
            while (end := self._interpreter.advance(program)) is not None:
                self._end = end
                outcome = self._follow(self._end_step(end), ctx)
                at[0] = end.step + 1
                if not isinstance(outcome, Continue):
                    return outcome
        return self._follow(ProgramEnded(end=self._end), ctx)

    def _follow(self, boundary: Boundary, ctx: Context) -> Outcome:
        """Carry out what `decide` returns, until it is known how this rank continues."""
        while True:
            *instructions, last = decide(self._generation, boundary)
            for instruction in instructions:
                self._carry_out(instruction)
            if isinstance(last, Continue):
                self._generation = last.generation
                ctx.num_steps = last.generation.end_step
            if isinstance(last, Outcome):
                return last
            boundary = self._boundary_after(last, boundary, ctx)

    def _carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction that is not the last of its list."""
        match instruction:
            case Evaluate(step):
                self._evaluate(step)
                self._recorder.end_step()
            case KeepForEvaluation(step):
                if self._transport.rank == 0 and self._evaluations is not None:
                    self._evaluations.keep(step)
                    self._make_pending(step)
            case Checkpoint(place):
                self._writer.keep(self._algorithm, self._end, place)
            case RetryJoin(rank):
                self._controller.refuse(rank, RETRY_JOIN)
            case _:
                raise AssertionError(instruction)

    def _boundary_after(self, instruction: Instruction, boundary: Boundary, ctx: Context) -> Boundary:
        """Carry out an instruction that leads to another boundary, and return it."""
        end, controller = self._end, self._controller
        left = self._generation.has_steps_left(ctx.rank, end.step + 1)
        match instruction, boundary:
            case Agree(), _:
                self._interpreter.complete_all(end.state)  # nothing may be in flight while the run is paused
                agreed = controller.agree(end, left=left)
            case Pause(), Agreed():
                agreed = controller.pause(boundary, left=left)
            case AnswerRequests(), Agreed():
                controller.answer_requests(self._admit if self._algorithm.asynchronous else self._ask)
                return RequestsAnswered(agreed=boundary)
            case Admit(state), _:
                assert self._generation.waiting is not None
                here = self._join_state(EndStep(end.step))
                joined = admit_waiting(
                    self._generation.waiting, self._worker, ctx, self._interpreter, controller, here, state
                )
                return Admitted(end=end, joined=joined, num_ranks=ctx.num_workers, num_steps=self._worker.num_steps)
            case _:
                raise AssertionError((instruction, boundary))
        if self._algorithm.asynchronous and not agreed.holds:
            self._replica.clear_control()
        return agreed

    def _ask(self, rank: int, number: int) -> str | None:
        """Let a process that asks to join as that rank wait until all programs end. Return why not, or None."""
        refused = join_refusal(rank, self._generation.waiting, self._transport.members)
        if refused is None:
            self._generation = replace(self._generation, waiting=(rank, number))
        return refused

    def _admit(self, rank: int, number: int) -> str | None:
        """Admit a process as that rank, or let it wait. All programs have ended. Return why that failed, or None."""
        return admit(rank, number, self._join_state(self._end), self._interpreter, self._worker.settings.timeout_s)

    def _join_state(self, end: EndStep) -> JoinState:
        return JoinState.now(
            self._interpreter.clock, self._controller, end, self._generation.sync_point, self._paused_s
        )

    def _origin_of_rank0(self) -> float:
        clock = self._interpreter.clock
        texts = self._transport.gather_texts(repr(clock.origin_s), clock.deadline("the clocks to be compared"))
        return float(texts[0])

    def _end_step(self, end: EndStep) -> StepEnded:
        """Record the step; return what is known at its end."""
        interpreter, worker, replica = self._interpreter, self._worker, self._replica
        self._peers.check()
        row = (
            end.step,
            self._seconds(),
            interpreter.bytes_sent,
            interpreter.staleness,
            interpreter.loss,
            worker.gradient_reports(),
        )
        interpreter.staleness = None
        if end.dropped:
            self._flush_pending()
            self._recorder.metrics(worker.metrics(*row, dropped=True))
        elif self._lagging:
            self._flush_pending()
            self._pending = row, self._transport.streams.record_event()
        else:
            self._recorder.metrics(worker.metrics(*row))
        self._recorder.end_step()
        self._paused_s += self._replica_check.end_step(self._algorithm, end.step + 1)
        if self._algorithm.asynchronous:
            self._make_pending(end.step)
            announced = self._relay_commands(end.step)
        else:
            if self._transport.rank == 0:
                replica.control_out = self._controller.num_commands_read()
            announced = replica.control_seen > self._controller.num_taken
        return StepEnded(end=end, announced=announced, evaluates=worker.evaluates_after(end.step))

    def _relay_commands(self, step: int) -> bool:
        """Tell the servers of new commands. Return True if this rank's program is to end early because of one."""
        replica = self._replica
        if not replica.control_out and self._controller.num_commands_read() > self._controller.num_taken:
            replica.control_out = NEW_COMMANDS
            self._recorder.event({"task": 0, "control": step})
        alone = (
            self._algorithm.replicas == Replicas.NEVER and replica.control_out >= NEW_COMMANDS
        )  # no other rank needs to know
        return alone or replica.control_seen >= NEW_COMMANDS

    def _flush_pending(self) -> None:
        if self._pending is not None:
            (row, event), self._pending = self._pending, None
            # Waits for this step's loss, not for the step that was enqueued since.
            with self._transport.streams.after(event):
                self._recorder.metrics(self._worker.metrics(*row))

    def _evaluates_during_training(self, callbacks: CallbackThread) -> bool:
        """Return True if asynchronous rank 0 evaluates between its steps, because a callback may stop the run then."""
        if self._evaluations is None or not (callbacks.stops_at_evaluations and self._worker.can_evaluate):
            return False
        elsewhere = any(rank > 0 for rank in self._algorithm.roles(self._transport.num_workers).serving)
        if elsewhere and self._transport.rank == 0:
            callbacks.note(
                f"on_evaluation cannot stop this run: servers of {self._algorithm} are not on rank 0 alone, so the "
                "evaluations are made after the training. Use shards=1 and dedicated=False"
            )
        return self._transport.rank == 0 and not elsewhere

    def _make_pending(self, step: int) -> None:
        """Make the evaluations that are due, if a callback may stop the run because of one. Other ranks continue."""
        if not self._evaluates_now or self._evaluations is None:
            return
        clock = self._interpreter.clock
        begin = clock.now()
        with clock.doing("in the evaluation"):
            made = self._evaluations.make_pending()
        if made:
            self._recorder.span("evaluate", clock.compute_lane, begin, clock.now(), step)

    def _evaluate(self, step: int) -> None:
        interpreter, worker, transport = self._interpreter, self._worker, self._transport
        begin = interpreter.clock.now()
        with interpreter.clock.doing("in the evaluation"), worker.replica.module_state.kept():
            # As in torch DDP, rank 0's running statistics are evaluated.
            share_module_state(worker.replica.module_state, transport, interpreter.clock)
            parameters, distance = self._evaluated()
            sums = worker.evaluate_at(parameters, transport.rank, transport.num_workers) | distance
        end = interpreter.clock.now()
        self._paused_s += end - begin
        self._recorder.span("evaluate", interpreter.clock.compute_lane, begin, end, step)
        row = {
            "step": step,
            "seconds": round(self._seconds(end), 6),
            "samples": worker.sampler.samples_before(step + 1),
        }
        self._recorder.metrics({**row, "bytes_sent": int(interpreter.bytes_sent), "evaluation": sums})

    def _evaluated(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the parameters to evaluate, equal on all ranks, and this replica's distance from them.

        Where replicas are equal after every step, or never, no distance is recorded.
        """
        own = self._worker.evaluated_parameters()
        parameters = self._common(own)
        has_mean = self._algorithm.replicas == Replicas.AT_END and self._transport.num_workers > 1
        return parameters, distance_from_mean([own], parameters) if has_mean else {}

    def _common(self, own: Tensor) -> Tensor:
        """Return what stands for this value of every rank: parameters, or their moving average. All ranks call it.

        Where replicas differ between steps, it is their mean. Where they never become equal, it is rank 0's, as in the
        simulator.
        """
        replicas, transport = self._algorithm.replicas, self._transport
        if replicas.equal_parameters or transport.num_workers == 1:
            return own
        deadline = self._interpreter.clock.deadline("all ranks to evaluate")
        common = own.clone()
        if replicas == Replicas.NEVER:
            transport.broadcast(common, 0, deadline)
        else:
            transport.all_reduce(common, deadline)
            common /= transport.num_workers
        return common

    def _report_late_passes(self) -> None:
        """Note in the run's record if the compute of ranks took longer than the slept time. All ranks call it."""
        slept = self._interpreter.slept
        if slept is None:
            return
        deadline = self._interpreter.clock.deadline("all ranks to report how long their compute took")
        late = gather_late_passes(slept.late, self._transport, deadline)
        if self._transport.rank == 0 and late.note:
            update_run(self._folder, notes=[*read_info(self._folder).get("notes", ()), late.note])
            if late.loud:
                warnings.warn(late.note, RuntimeWarning, stacklevel=2)

    def _common_weights(self, *, stopped: bool) -> dict[str, State]:
        """Return the weights of ranks in step. At the end of a run their parameters are equal, but not their averages."""
        replica, average = self._replica, None
        parameters = self._common(replica.read_parameters()) if stopped else None
        if replica.average is not None:
            average = self._common(self._worker.evaluated_parameters())
        return self._worker.weights(parameters, average)

    def _write_result(self, last: int, seconds: float, *, stopped: bool) -> None:
        """Write the model that was evaluated, or would be, and how the run has ended. All ranks call it."""
        weights = self._worker.weights() if self._evaluations is not None else self._common_weights(stopped=stopped)
        if self._transport.rank != 0:
            return
        write_weights(self._folder, weights)
        status = "stopped" if stopped else "finished"
        update_run(self._folder, status=status, result={"steps": last + 1, "seconds": seconds, "last_step": last})
