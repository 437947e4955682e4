"""The loop around a rank's program: metrics, evaluation, control, and what is kept at the end."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any, final

import torch
from torch import Tensor

from workbench.ops import Apply, EndStep
from workbench.program import Algorithm, Context, Replicas, leaves, lower
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint.rank_state import begin_again
from workbench.runtimes.checkpoint.writer import CheckpointWriter
from workbench.runtimes.control.controller import RunController
from workbench.runtimes.elastic.admission import JoinState, admit
from workbench.runtimes.elastic.grow import Grower
from workbench.runtimes.elastic.shrink import FAILURES, Shrinker
from workbench.runtimes.execution.evaluation_schedule import EvaluationSchedule
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.runtimes.rank.consistency import share_tensors
from workbench.runtimes.rank.pending_evaluations import PendingEvaluations, evaluated
from workbench.runtimes.transport.base import Deadline, offset_to_rank0
from workbench.runtimes.transport.measure_link import measure_link
from workbench.trace.recorder import Recorder
from workbench.trace.store import update_run

PART_TAG = 987  # of the parameters that a server kept for an evaluation
NEWS = 1  # the control word of ranks at steps of their own: there is something to be read


@final
class TrainingLoop:
    """One rank's run, from the first step to what it leaves in the run's folder."""

    def __init__(
        self,
        controller: RunController,
        worker: LocalTraining,
        interpreter: Interpreter,
        recorder: Recorder,
        folder: Path,
        *,
        stop_after: int | None = None,
    ) -> None:
        self._controller, self._worker, self._interpreter = controller, worker, interpreter
        self._stop_after = stop_after
        self._recorder, self._folder = recorder, folder
        self._writer = CheckpointWriter(worker, interpreter, folder)
        self._shrinker = Shrinker(worker, interpreter, controller, folder)
        self._grower = Grower(worker, interpreter, controller)
        self._transport, self._replica = interpreter.transport, worker.replica
        self._peers = Deadline("", self._transport.peer_failure, None)  # asked now and then by a rank that waits for nobody
        self._paused_s = 0.0
        self._pending: tuple[tuple[Any, ...], Any] | None = None  # a step's row, and the event after which its loss is there
        self._due = PendingEvaluations(folder)  # evaluations that wait for the run's end
        self._parts: dict[int, dict[int, Tensor]] = {}  # step -> of the servers on this rank that have come to it, by number
        self._came_s: dict[int, float] = {}  # step -> when the last of them did
        self._updated_s: float | None = None  # the last update of a server on this rank
        self._keeping = Lock()  # servers run on threads of their own
        self._milestones = EvaluationSchedule(worker.due_steps()) if controller.algorithm.has_servers else None
        if self._milestones is not None and worker.can_evaluate:
            interpreter.on_update = self._on_update
        self._last_end = EndStep(-1)
        self._is_another = False  # the ranks, than those that the program began with
        self._ending = False  # this rank's next step is the last before all meet, because something was said
        self._rest: int | None = None  # where ranks at steps of their own next come to rest, or end
        self._lagging = self._transport.device.type == "cuda"  # reading a loss at once would make the host wait for the device

    def run(self, ctx: Context, at: list[int], late: JoinState | None = None) -> dict[str, Any]:
        """All of it, or from where a rank is taken in that comes `late`."""
        interpreter, transport = self._interpreter, self._transport
        shift = self._begin_together() if late is None else late.begin(interpreter.clock, self._controller, trained=ctx.may_shrink)
        interpreter.context = ctx
        last, stopped = self._take_steps(ctx, at, late)
        if not self._algorithm.asynchronous and not stopped:
            self._finish(last)
        self._flush_pending()
        seconds = self._seconds()
        interpreter.flush()
        offset_s = offset_to_rank0(transport, interpreter.clock.deadline("the clocks to be compared"))
        self._recorder.clock(interpreter.clock.now(), offset_s - shift)
        if self._algorithm.asynchronous:
            last_s = self._gather_parts() if self._milestones is not None and self._worker.can_evaluate else None
            last = self._worker.num_steps - 1 if self._milestones is not None and not stopped and ctx.rank == 0 else last
            self._finish_alone(last, seconds if last_s is None or stopped else last_s, stopped)
        self._writer.finish()
        self._keep(last, seconds, stopped)
        return {"rank": ctx.rank, "steps": last + 1, "seconds": seconds, "stopped": stopped}

    def _begin_together(self) -> float:
        """Rank 0's origin on rank 0's clock, minus ours on ours."""
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
        """The method as it is now."""
        return self._controller.algorithm

    def _seconds(self, at_s: float | None = None) -> float:
        """Of training, until now or a time: without evaluations, and without what the run was held for."""
        clock = self._interpreter.clock
        return (clock.now() if at_s is None else at_s) - self._paused_s - clock.held()

    def _take_steps(self, ctx: Context, at: list[int], late: JoinState | None) -> tuple[int, bool]:
        """All steps, by one program after the other where something is set; the last step, and whether the run was stopped there."""
        interpreter = self._interpreter
        end_of_run = ctx.num_steps
        if self._algorithm.asynchronous and self._stop_after is not None and end_of_run is not None:
            end_of_run = min(end_of_run, self._stop_after + 1)
        stopped, last = False, ctx.first_step - 1
        self._last_end = EndStep(last, state=ctx.resumed or ())
        at[0] = ctx.first_step  # the step under way, for the words of a failure
        if late is not None:
            self._paused_s = late.paused_s + (interpreter.clock.now() - late.seconds if ctx.may_shrink else 0.0)  # all were held
        goes_on, again = True, late is not None  # who comes late does as all others
        self._rest = late.rest if late is not None else self._writer.first_rest(self._algorithm, ctx.first_step, end_of_run)
        while goes_on:
            try:
                self._make_ready(ctx, again=again)
                ctx.num_steps = self._grower.end_of(self._algorithm, last, self._rest)
                method = self._algorithm
                with closing(lower(ctx, method.worker(ctx))) as program:
                    while not (stopped or self._closes(method, ctx)) and (end := interpreter.advance(program)) is not None:
                        last, self._last_end = end.step, end
                        stopped = self._end_step(end, ctx)
                        at[0] = last + 1
                goes_on = not stopped and self._goes_on_in_step(method, ctx)
            except FAILURES as error:
                last, again = self._shrinker.shrink(error, self._algorithm, ctx, last), False
                self._grower.forget()
                self._last_end, self._rest, end_of_run = EndStep(last), self._worker.num_steps, self._worker.num_steps
                continue
            if self._algorithm.asynchronous:
                num_taken = self._controller.num_taken
                goes_on, asked = self._meet(ctx, end_of_run)
                if (
                    self._controller.num_taken == num_taken and self._rest != end_of_run
                ):  # all are there, and not because something was said
                    self._rest, goes_on = self._writer.at_rest(self._algorithm, self._last_end, self._rest, end_of_run), True
                at_end = self._stop_after is not None and self._stop_after + 1 < self._worker.num_steps
                stopped = asked or (at_end and not goes_on)
            again = True
        return last, stopped

    def _closes(self, method: Algorithm, ctx: Context) -> bool:
        """Whether the program of that method is to be closed behind this step: another setting, or other ranks (`Algorithm.restart`)."""
        if self._grower.closes(method) and self._let_in(method, ctx, tuple(leaves(self._last_end.state))):
            self._is_another, self._rest = True, self._worker.num_steps
        return self._algorithm is not method or self._is_another

    def _goes_on_in_step(self, method: Algorithm, ctx: Context) -> bool:
        """The program has ended, or is closed: whether another goes on; where a process waits to be let in, with that one."""
        closed, self._is_another = self._closes(method, ctx), False
        if closed or self._grower.waiting is None or self._last_end.step + 1 >= self._worker.num_steps:
            return closed
        self._last_end = EndStep(self._last_end.step)  # it has come to its end, and has applied what was in flight
        self._let_in(method, ctx, ())
        self._rest = self._worker.num_steps
        return True

    def _let_in(self, method: Algorithm, ctx: Context, kept: tuple[Any, ...]) -> bool:
        """Nothing is under way: let in who waits; whether it came."""
        return self._grower.let_in(method, ctx, self._welcome(EndStep(self._last_end.step)), kept)

    def _welcome(self, end: EndStep) -> JoinState:
        return JoinState.now(self._interpreter.clock, self._controller, end, self._rest, self._paused_s)

    def _make_ready(self, ctx: Context, *, again: bool) -> None:
        """For the next program, which goes on from the last step's end (`again`: behind another one); every rank comes here."""
        if again:
            self._interpreter.begin_again(self._last_end.state)
            begin_again(ctx, self._last_end)
        self._transport.open_lanes(self._algorithm.requires.num_lanes)
        if self._algorithm.requires.link and ctx.link is None:
            ctx.link = measure_link(self._transport, self._interpreter.clock.deadline, self._worker.replica.layout.message_bytes)

    def _admit(self, rank: int, number: int) -> str | None:
        """All programs have ended: let a process in that has come in a rank's place; why not, or None."""
        return admit(rank, number, self._welcome(self._last_end), self._interpreter, self._worker.settings.timeout_s)

    def _meet(self, ctx: Context, end_of_run: int | None) -> tuple[bool, bool]:
        """Where ranks are at steps of their own all programs have ended: agree whether to go on, or to stop."""
        step = self._last_end.step + 1
        computes = ctx.rank < self._algorithm.num_computing(ctx.num_workers)
        left = computes and end_of_run is not None and step < end_of_run
        goes_on, stop = self._controller.take(step, left=left, admit=self._admit)
        self._replica.forget_words()
        self._ending = ctx.stopping = False
        return goes_on, stop

    def _origin_of_rank0(self) -> float:
        words = self._transport.gather_texts(
            repr(self._interpreter.clock.origin_s), self._interpreter.clock.deadline("the clocks to be compared")
        )
        return float(words[0])

    def _end_step(self, end: EndStep, ctx: Context) -> bool:
        """Book the step; True if all ranks stop here."""
        interpreter, worker = self._interpreter, self._worker
        self._peers.check()
        row = (end.step, self._seconds(), interpreter.bytes_sent, interpreter.staleness, interpreter.loss, worker.found())
        interpreter.staleness = None
        if end.dropped:
            self._flush_pending()
            self._recorder.metrics(worker.metrics(*row, dropped=True))
        elif self._lagging:
            self._flush_pending()
            self._pending = row, self._transport.streams.mark()
        else:
            self._recorder.metrics(worker.metrics(*row))
        if self._algorithm.asynchronous:
            self._end_step_alone(end, ctx)
            return False
        if worker.evaluates_after(end.step):
            self._evaluate(end.step)
        self._recorder.end_step()
        if self._transport.rank == 0:
            self._replica.control_out = self._controller.heard()
        stop = end.step == self._stop_after
        if self._replica.control_seen > self._controller.num_taken:
            self._interpreter.complete_all(end.state)  # nothing is under way while the run is held
            left = end.step + 1 < self._worker.num_steps
            stop = self._controller.take(end.step + 1, left=left, admit=self._grower.ask)[1] or stop
            ctx.num_steps = self._grower.end_of(self._algorithm, end.step, ctx.num_steps)
        if stop:
            self._writer.keep(self._algorithm, end, None)
        else:
            self._writer.after(self._algorithm, end)
        return stop

    def _end_step_alone(self, end: EndStep, ctx: Context) -> None:
        """Where ranks are at steps of their own: nobody waits for an evaluation, and whatever is said ends all programs early.

        Rank 0 keeps what is to be evaluated until the end, so that the others do not run ahead of it meanwhile. Where there are
        servers, these do, at their own updates.
        """
        if self._transport.rank == 0 and not self._algorithm.has_servers and self._worker.evaluates_after(end.step):
            self._due.add(self._row_of_evaluation(end.step), self._worker.snapshot())
        self._recorder.end_step()
        if self._algorithm.replicas == Replicas.NEVER:
            self._writer.after(self._algorithm, end)
        if not self._replica.control_out and self._controller.heard() > self._controller.num_taken:
            self._replica.control_out = NEWS
            self._recorder.event({"strand": 0, "control": end.step})
        alone = self._algorithm.replicas == Replicas.NEVER and self._replica.control_out >= NEWS  # nobody else need know
        if (alone or self._replica.control_seen >= NEWS) and not self._ending and ctx.num_steps is not None:
            self._ending = True
            ctx.num_steps = min(ctx.num_steps, end.step + 2)

    def _on_update(self, request: Apply, end_s: float) -> None:
        """A server on this rank has made an update: keep its shard for the evaluations that are due now."""
        assert self._milestones is not None
        master, algorithm, clock = self._replica.master, self._algorithm, self._interpreter.clock
        num_workers = algorithm.num_computing(self._transport.num_workers) - len(clock.left)
        with self._keeping:
            self._updated_s = max(end_s, self._updated_s or 0.0)
            for step in self._milestones.count(master.progress, request, algorithm, num_workers):
                bucket = request.gradient.bucket
                parts = self._parts.setdefault(step, {})
                for shard in range(len(master.updates)) if bucket is None else (bucket,):
                    parts.update(master.evaluated_shard(shard))
                self._came_s[step] = self._seconds(end_s)
                if self._transport.rank == 0 and len(parts) == len(self._replica.layout.slots):
                    buffers = [buffer.cpu().clone() for buffer in self._replica.float_buffers()]
                    row = {**self._row_of_evaluation(step), "seconds": round(self._came_s.pop(step), 6)}
                    self._due.add(row, (self._worker.joined(self._parts.pop(step)).cpu(), buffers))

    def _gather_parts(self) -> float | None:
        """Give rank 0 what servers on other ranks kept for evaluations; every rank comes here. When the last update was."""
        updated_s = None if self._updated_s is None else self._seconds(self._updated_s)
        mine = {"steps": {step: sorted(parts) for step, parts in self._parts.items()}, "came_s": self._came_s, "updated_s": updated_s}
        deadline = self._interpreter.clock.deadline("all ranks to say what servers kept for evaluations")
        texts = self._transport.gather_texts(json.dumps(mine), deadline)
        told = [json.loads(text) if text != LEFT_TEXT else None for text in texts]
        if self._transport.rank != 0:
            for parts in self._parts.values():
                for number in sorted(parts):
                    self._transport.start_send(0, parts[number].reshape(-1).contiguous(), PART_TAG).wait(deadline)
            self._parts.clear()
        else:
            self._take_parts(told, deadline)
        last = [one["updated_s"] for one in told if one is not None and one["updated_s"] is not None]
        return max(last, default=None)

    def _take_parts(self, told: list[dict[str, Any] | None], deadline: Deadline) -> None:
        """On rank 0: the other ranks' parts, in the order in which they send them."""
        parameters = self._replica.parameters
        for rank, one in enumerate(told):
            if rank == 0 or one is None:
                continue
            for word, numbers in one["steps"].items():
                step = int(word)
                for number in numbers:
                    value = torch.empty_like(parameters[number].detach()).reshape(-1)
                    self._transport.start_recv(rank, value, PART_TAG).wait(deadline)
                    self._parts.setdefault(step, {})[number] = value
                self._came_s[step] = max(self._came_s.get(step, 0.0), one["came_s"][word])
        buffers = [buffer.cpu().clone() for buffer in self._replica.float_buffers()]
        for step, parts in sorted(self._parts.items()):
            if len(parts) == len(parameters):
                row = {**self._row_of_evaluation(step), "seconds": round(self._came_s[step], 6)}
                self._due.add(row, (self._worker.joined(parts).cpu(), buffers))
        self._parts.clear()

    def _finish_alone(self, last: int, seconds: float, stopped: bool) -> None:
        """After the last step of all ranks, which now hold the same parameters. Nobody waits for rank 0 any more, which evaluates."""
        if stopped:
            self._writer.keep(self._algorithm, self._last_end, None)
        if self._transport.rank == 0 and self._worker.can_evaluate:
            newest = self._due.newest()
            for row, snapshot in self._due.take():
                self._recorder.metrics(evaluated(self._worker, row, snapshot))
                self._recorder.end_step()  # written before its snapshot goes
            if self._milestones is not None and not stopped:
                self._evaluate_what_is_left(seconds, newest)
            row = {**self._row_of_evaluation(last), "seconds": round(seconds, 6)}
            self._recorder.metrics({**row, "evaluation": self._worker.evaluate_at(self._worker.evaluated_parameters(), 0, 1)})
        self._recorder.end_step()

    def _evaluate_what_is_left(self, seconds: float, newest: int) -> None:
        """Due steps without an update after their gradients, which were dropped or lost: at the last parameters.

        Args:
            newest: the last step that was evaluated.
        """
        assert self._milestones is not None
        progress = self._replica.master.progress if self._replica.has_master else []
        left = self._milestones.left(min((steps for steps in progress if steps), default=0.0))
        for step in left:
            if step > newest:
                row = {**self._row_of_evaluation(step), "seconds": round(seconds, 6)}
                self._recorder.metrics({**row, "evaluation": self._worker.evaluate_at(self._worker.evaluated_parameters(), 0, 1)})

    def _row_of_evaluation(self, step: int) -> dict[str, Any]:
        interpreter, samples = self._interpreter, self._worker.sampler.samples_before(step + 1)
        seconds = round(self._seconds(), 6)
        return {"step": step, "seconds": seconds, "samples": samples, "bytes_sent": int(interpreter.bytes_sent)}

    def _flush_pending(self) -> None:
        if self._pending is not None:
            (row, event), self._pending = self._pending, None
            with self._transport.streams.after(event):  # the step that was enqueued since is not waited for
                self._recorder.metrics(self._worker.metrics(*row))

    def _finish(self, last: int) -> None:
        """After the last step, with everything in flight applied."""
        if self._worker.can_evaluate:
            self._evaluate(last)
        self._recorder.end_step()

    def _evaluate(self, step: int) -> None:
        interpreter, worker, transport = self._interpreter, self._worker, self._transport
        begin = interpreter.clock.now()
        share_tensors(worker.replica.float_buffers(), transport, interpreter)  # as torch DDP: rank 0's running statistics are the model's
        sums = worker.evaluate_at(self._evaluated(), transport.rank, transport.num_workers)
        end = interpreter.clock.now()
        self._paused_s += end - begin
        self._recorder.span("evaluate", "compute", begin, end, step)
        row = {"step": step, "seconds": round(self._seconds(end), 6), "samples": worker.sampler.samples_before(step + 1)}
        self._recorder.metrics({**row, "bytes_sent": int(interpreter.bytes_sent), "evaluation": sums})

    def _evaluated(self) -> Tensor:
        """The parameters to look at; where replicas differ between steps, their mean."""
        parameters = self._worker.evaluated_parameters()
        if self._algorithm.replicas == Replicas.AT_END and self._transport.num_workers > 1:
            self._transport.all_reduce(parameters, self._interpreter.clock.deadline("all ranks to evaluate"))
            parameters /= self._transport.num_workers
        return parameters

    def _keep(self, last: int, seconds: float, stopped: bool) -> None:
        if self._transport.rank != 0:
            return
        torch.save(self._replica.model.state_dict(), self._folder / "model.pt")
        if self._worker.settings.ema_decay is not None:
            torch.save(self._worker.evaluated_parameters(), self._folder / "average.pt")
        status = "stopped" if stopped else "finished"
        update_run(self._folder, status=status, result={"steps": last + 1, "seconds": seconds, "last_step": last})
