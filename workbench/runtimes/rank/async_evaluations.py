"""Evaluations of asynchronous ranks: parameters are kept during the training, and rank 0 evaluates them after the run.

If there are servers, these keep their shards at their own updates (`EvaluationSchedule`). Otherwise rank 0 keeps its
own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, final

import torch
from torch import Tensor

from workbench.ops import Apply
from workbench.program import Algorithm
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.execution.evaluation_schedule import EvaluationSchedule
from workbench.runtimes.execution.interpreter import Interpreter
from workbench.runtimes.liveness.membership import LEFT_TEXT
from workbench.runtimes.rank.pending_evaluations import PendingEvaluations, evaluated
from workbench.runtimes.transport.base import Deadline
from workbench.trace.recorder import Recorder

SHARD_TAG = 987  # tag of messages with parameters that a server kept for an evaluation


@final
class AsyncEvaluations:
    """The evaluations of one rank.

    Args:
        algorithm: returns the algorithm with its present settings.
        seconds: returns the seconds of training, until now or until a time on the rank's clock.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        worker: LocalTraining,
        interpreter: Interpreter,
        recorder: Recorder,
        folder: Path,
        seconds: Callable[[float | None], float],
    ) -> None:
        self._worker, self._interpreter, self._recorder = worker, interpreter, recorder
        self._transport, self._replica = interpreter.transport, worker.replica
        self._seconds = seconds
        self._num_computing = algorithm.roles(self._transport.num_workers).num_computing
        self._pending = PendingEvaluations(folder)
        self._newest = -1  # the last step whose kept parameters were evaluated
        self._schedule = EvaluationSchedule(worker.due_steps()) if algorithm.requires.servers else None
        self._lock = Lock()  # servers run on separate threads
        # step -> shard -> parameters, of servers here that have reached it.
        self._shards: dict[int, dict[int, Tensor]] = {}
        self._reached_s: dict[int, float] = {}  # step -> when the last of these servers reached it
        self._updated_s: float | None = None  # the last update of a server on this rank
        if self._schedule is not None and worker.can_evaluate:
            interpreter.on_update = self._on_update

    @property
    def has_servers(self) -> bool:
        """Return True if servers keep the parameters."""
        return self._schedule is not None

    def keep(self, step: int) -> None:
        """Keep this rank's parameters: those after `step`."""
        self._pending.add(self._row(step), self._worker.snapshot())

    def gather(self) -> float | None:
        """Send the parameters that servers on other ranks kept to rank 0.

        All ranks call it. Return the time of the last update; None without an update.
        """
        if self._schedule is None or not self._worker.can_evaluate:
            return None
        updated_s = None if self._updated_s is None else self._seconds(self._updated_s)
        steps = {step: sorted(shards) for step, shards in self._shards.items()}
        mine = {"steps": steps, "came_s": self._reached_s, "updated_s": updated_s}
        deadline = self._interpreter.clock.deadline("all ranks to report what servers kept for evaluations")
        texts = self._transport.gather_texts(json.dumps(mine), deadline)
        theirs = [json.loads(text) if text != LEFT_TEXT else None for text in texts]
        if self._transport.rank == 0:
            self._receive(theirs, deadline)
        else:
            for shards in self._shards.values():
                for number in sorted(shards):
                    self._transport.start_send(0, shards[number].reshape(-1).contiguous(), SHARD_TAG).wait(deadline)
        self._shards.clear()
        last = [one["updated_s"] for one in theirs if one is not None and one["updated_s"] is not None]
        return max(last, default=None)

    def make(self, last: int, seconds: float, *, stopped: bool) -> None:
        """On rank 0: evaluate the kept parameters, and those after the `last` step."""
        if self._transport.rank != 0 or not self._worker.can_evaluate:
            return
        self.make_pending()
        steps = [] if stopped else [step for step in self._left() if step > self._newest]
        for step in [*steps, last]:
            row = {**self._row(step), "seconds": round(seconds, 6)}
            self._recorder.metrics(
                {**row, "evaluation": self._worker.evaluate_at(self._worker.evaluated_parameters(), 0, 1)}
            )

    def make_pending(self) -> bool:
        """Evaluate the kept parameters, on rank 0. Return whether there were any."""
        made = False
        for row, snapshot in self._pending.take():
            self._recorder.metrics(evaluated(self._worker, row, snapshot))
            self._recorder.end_step()  # written before its snapshot is removed
            self._newest, made = max(self._newest, row["step"]), True
        return made

    def _left(self) -> list[int]:
        """Return due steps that no update completed, because their gradients were dropped or lost.

        These steps are evaluated at the last parameters.
        """
        if self._schedule is None:
            return []
        progress = self._replica.server_copy.progress if self._replica.has_server_copy else []
        return self._schedule.left(min((steps for steps in progress if steps), default=0.0))

    def _on_update(self, request: Apply, end_s: float) -> None:
        """A server on this rank has made an update: keep its shard for the evaluations that are due."""
        assert self._schedule is not None
        server_copy, clock = self._replica.server_copy, self._interpreter.clock
        num_workers = self._num_computing - len(clock.left)
        with self._lock:
            self._updated_s = max(end_s, self._updated_s or 0.0)
            for step in self._schedule.count(server_copy.progress, request, num_workers):
                bucket = request.gradient.bucket
                shards = self._shards.setdefault(step, {})
                for shard in range(len(server_copy.updates)) if bucket is None else (bucket,):
                    shards.update(server_copy.evaluated_shard(shard))
                self._reached_s[step] = self._seconds(end_s)
                if self._transport.rank == 0 and len(shards) == len(self._replica.layout.slots):
                    self._add(step, self._reached_s.pop(step), self._shards.pop(step), self._buffers())

    def _receive(self, theirs: list[dict[str, Any] | None], deadline: Deadline) -> None:
        """Receive the other ranks' shards on rank 0, in the order in which they send them."""
        parameters = self._replica.parameters
        for rank, one in enumerate(theirs):
            if rank == 0 or one is None:
                continue
            for text, numbers in one["steps"].items():
                step = int(text)
                for number in numbers:
                    value = torch.empty_like(parameters[number].detach()).reshape(-1)
                    self._transport.start_recv(rank, value, SHARD_TAG).wait(deadline)
                    self._shards.setdefault(step, {})[number] = value
                self._reached_s[step] = max(self._reached_s.get(step, 0.0), one["came_s"][text])
        buffers = self._buffers()
        for step, shards in sorted(self._shards.items()):
            if len(shards) == len(parameters):
                self._add(step, self._reached_s[step], shards, buffers)

    def _add(self, step: int, seconds: float, shards: dict[int, Tensor], buffers: list[Tensor]) -> None:
        row = {**self._row(step), "seconds": round(seconds, 6)}
        self._pending.add(row, (self._worker.join_shards(shards).cpu(), buffers))

    def _buffers(self) -> list[Tensor]:
        return [value.cpu() for value in self._replica.module_state.copy()]

    def _row(self, step: int) -> dict[str, Any]:
        seconds, samples = round(self._seconds(None), 6), self._worker.sampler.samples_before(step + 1)
        return {"step": step, "seconds": seconds, "samples": samples, "bytes_sent": int(self._interpreter.bytes_sent)}
