"""All workers of a symmetric algorithm: one replica, vectors of seconds, one record for all."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from workbench import ops
from workbench.costs import Compute
from workbench.costs.stragglers import Array
from workbench.gradients import Gradient
from workbench.ops import Value
from workbench.problems.base import Problem
from workbench.program import Algorithm, shares_buffers
from workbench.replica.gradient_guard import entries_of
from workbench.replica.local_training import LocalTraining, num_steps_of, sampler_of
from workbench.replica.replica import Replica
from workbench.runtimes.execution.endpoint import bucket_of
from workbench.runtimes.simulator.lockstep.gradient_sum import GradientSum
from workbench.runtimes.simulator.pass_times import ready_shares
from workbench.runtimes.simulator.worker import MetaReplica, shape_of, sources_of
from workbench.settings import Settings
from workbench.trace.recorder import MemoryRecorder
from workbench.trace.weights import State

NUM_KEPT_ENDS = 4096  # ends of collectives that are kept: no worker lags by that many
SINGLE_WORKERS = 64  # workers with spans: a figure shows no more rows


@final
class WorkerGroup:
    """`num_workers` workers with equal parameters.

    Up to `SINGLE_WORKERS` workers have their own records. If there are more, rank 0's rows of metrics are for all
    workers: the mean loss over all samples, the bytes of all workers, the seconds of the worker that ended the step
    last. Only the first workers have spans.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        settings: Settings,
        num_workers: int,
        compute: Compute,
        *,
        timing_only: bool,
    ) -> None:
        self.num_workers, self.compute, self.settings = num_workers, compute, settings
        self._worker: LocalTraining | None = None
        self._summation: GradientSum | None = None
        self.replica: Replica | MetaReplica
        if timing_only:
            batch_size = settings.batch_size or problem.batch_size
            self.sampler = sampler_of(problem.train_source(), batch_size, num_workers, settings.seed)
            self.replica = MetaReplica(shape_of(problem, algorithm))
        else:
            with torch.random.fork_rng(devices=[]):
                data, cpu = sources_of(problem), torch.device("cpu")
                self._worker = LocalTraining(algorithm, problem, settings, 0, num_workers, cpu, data)
            self.sampler, self.replica = self._worker.sampler, self._worker.replica
            self._summation = GradientSum(self._worker.replica, self._worker.guard)
        self.num_steps = num_steps_of(settings, self.sampler)
        self.ready_shares = ready_shares(compute, self.replica.layout, settings)
        self.forward_parts = compute.forward_parts(self.replica.layout)
        self.recorders = [
            MemoryRecorder(rank, settings.trace_steps) for rank in range(min(num_workers, SINGLE_WORKERS))
        ]
        self._traced = settings.trace_steps != 0
        self.step, self.last_step = 0, -1
        self._sent = SentBytes()
        self.waited_s = np.zeros(num_workers)  # seconds that each worker waited
        self._staleness: int | None = None
        # Rank -> its buffers, unless all workers begin each step with rank 0's.
        self._states: dict[int, list[Tensor]] | None = None if shares_buffers(algorithm) else {}
        self._losses: list[float | None] = [None] * num_workers  # of the last minibatches
        self._entries: list[dict[str, Any]] = [{"loss": None}] * num_workers  # of their rows
        self._slow: tuple[int, Array] = (-1, np.ones(num_workers))

    # -- compute -----------------------------------------------------------------------------------------------

    def forward(self, step: int, now_s: Array, part: float) -> Array:
        """Return the time at which each worker ends this part of its forward pass."""
        return self._pass("forward", now_s, self.compute.forward_s * self._slowness(step) * part)

    def backward(self, step: int, now_s: Array) -> tuple[Gradient, Array, Array]:
        """Return the sum of all workers' gradients, and the times at which each begins and ends its backward pass."""
        end_s = self._pass("backward", now_s, self.compute.backward_s * self._slowness(step))
        return self._gradient(step), now_s, end_s

    def _slowness(self, step: int) -> Array:
        """Return (p,) factors: the time of each worker's minibatch, divided by the usual time of a full one."""
        if self._slow[0] != step:
            factors = self.compute.factors(self.settings.seed, step, self.num_workers)
            self._slow = (step, factors * self.compute.time_share(self.sampler.shares(step)))
        return self._slow[1]

    def _pass(self, kind: str, now_s: Array, seconds: Array) -> Array:
        end_s = now_s + seconds
        if self.compute.timed:
            seed, pairs = self.settings.seed, zip(now_s.tolist(), seconds.tolist(), strict=True)
            end_s = np.array(
                [self.compute.finish_s(seed, rank, begin, took) for rank, (begin, took) in enumerate(pairs)]
            )
        self._draw(kind, "compute", now_s, end_s, self.step)
        return end_s

    def _gradient(self, step: int) -> Gradient:
        if isinstance(self.replica, MetaReplica):
            return self.replica.backward(step)
        assert self._worker is not None and self._summation is not None
        state = self.replica.module_state
        before = state.copy()
        total, loss = self._summation.begin(step, self._worker.minibatch(step, 0))
        first = state.copy()
        losses = [loss]
        for rank in range(1, self.num_workers):
            if before:
                state.load(before if self._states is None else self._states.get(rank, before))
            losses.append(self._summation.add(total, partial(self._worker.minibatch, step, rank)))
            if before and self._states is not None:
                self._states[rank] = state.copy()
        self._summation.end(total)
        state.load(first)
        self._losses = losses
        return total

    def apply(self, request: ops.Apply, now_s: Array) -> Array:
        """Apply one update for all workers. Return the time at which each has applied it."""
        gradient = request.gradient
        end_s = now_s + self.compute.update_s * gradient.flat.numel() / gradient.layout.numel
        self._draw(
            "apply", "compute", now_s, end_s, gradient.step if gradient.step >= 0 else self.step, bucket_of(gradient)
        )
        staleness = self.replica.apply(gradient, request.lr_scale)
        self._staleness = staleness if self._staleness is None else max(staleness, self._staleness)
        return end_s

    # -- the record --------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the record."""
        self._sent.settle(np.inf)

    def waited(self, begin_s: Array, end_s: Array) -> None:
        """Record that workers were idle between these times."""
        self.waited_s += end_s - begin_s
        self._draw("wait", "compute", begin_s, end_s, self.step)

    def communicated(self, kind: str, value: Value | None, begin_s: Array, end_s: float, num_bytes: float) -> None:
        """Record a collective of all workers that ended at `end_s`; one worker sends `num_bytes`."""
        self._sent.book(end_s, num_bytes)
        step = value.step if isinstance(value, Gradient) and value.step >= 0 else self.step
        self._draw(kind, "comm", begin_s, np.full(self.num_workers, end_s), step, bucket_of(value), int(num_bytes))

    def _draw(
        self, kind: str, lane: str, begin_s: Array, end_s: Array, step: int, bucket: int = -1, num_bytes: int = 0
    ) -> None:
        if not self._traced or (self.settings.trace_steps is not None and step >= self.settings.trace_steps):
            return
        many = len(self.recorders)
        for recorder, begin, end in zip(self.recorders, begin_s[:many].tolist(), end_s[:many].tolist(), strict=True):
            if kind != "wait" or end > begin:
                recorder.span(kind, lane, begin, end, step, bucket, num_bytes)

    def end_step(self, end: ops.EndStep, now_s: Array) -> None:
        """Record the step, and evaluate if an evaluation is due."""
        step = self.last_step = end.step
        samples = self.sampler.samples_before(step + 1)
        row: dict[str, Any] = {
            "step": step,
            "seconds": 0.0,
            "samples": samples,
            "bytes_sent": 0,
            "staleness": self._staleness,
        }
        row = {**row, "loss": None, "num_samples": 0, "lr": None}
        if self._worker is not None:
            self._worker.replica.end_step()
            self._collect_losses(self._worker, step)
            row = {**self._worker.row(step, 0.0, 0.0, self._staleness), "loss": self._mean_loss(step)}
        if len(self.recorders) == self.num_workers:
            for recorder, time_s, entries in zip(self.recorders, now_s.tolist(), self._entries, strict=True):
                seconds = time_s if self._worker is None else round(time_s, 6)
                mine = {**entries, "num_samples": self.sampler.share_size(step, recorder.rank), "seconds": seconds}
                self._add(recorder.rank, {**row, **mine}, np.array([time_s]))
        else:
            mine = {"num_samples": self.sampler.size(step), "seconds": round(float(now_s.max()), 6)}
            self._add(0, {**row, **mine, **self._joined()}, now_s)
        self._staleness = None
        if self._worker is not None and self._worker.evaluates_after(step):
            self.evaluate(step, now_s[0])

    def _collect_losses(self, worker: LocalTraining, step: int) -> None:
        """Collect the losses and the bad gradients of the step, and check the losses."""
        self._entries = [{"loss": loss} for loss in self._losses]
        for found in worker.gradient_reports():
            self._entries[found.rank] |= entries_of([found], self._losses[found.rank])
        self._losses = [entries["loss"] for entries in self._entries]
        for rank, loss in enumerate(self._losses):
            worker.loss_watch.check(loss, step, rank)

    def _joined(self) -> dict[str, Any]:
        """Return the bad gradients of all workers, for one row."""
        words = {
            "skipped": "; ".join(
                f"rank {rank}: {row['skipped']}" for rank, row in enumerate(self._entries) if "skipped" in row
            )
        }
        norms = [row["clipped"] for row in self._entries if "clipped" in row]
        return {**(words if words["skipped"] else {}), **({"clipped": max(norms)} if norms else {})}

    def _mean_loss(self, step: int) -> float | None:
        """Return the mean over all samples with a known loss."""
        known = [
            (loss, self.sampler.share_size(step, rank)) for rank, loss in enumerate(self._losses) if loss is not None
        ]
        return sum(loss * number for loss, number in known) / sum(number for _, number in known) if known else None

    def evaluate(self, step: int, now_s: float) -> None:
        """Evaluate on the whole test set, in no virtual time."""
        if self._worker is not None and self._worker.can_evaluate:
            row = {
                "step": step,
                "seconds": float(now_s),
                "samples": self.sampler.samples_before(step + 1),
                "bytes_sent": 0,
            }
            found = self._worker.evaluate_at(self._worker.evaluated_parameters(), 0, 1)
            self._add(0, {**row, "evaluation": found}, np.full(self.num_workers, now_s))

    def weights(self) -> dict[str, State] | None:
        """Return the trained weights, by file; None if only the timing is simulated."""
        return None if self._worker is None else self._worker.weights()

    def _add(self, rank: int, row: dict[str, Any], now_s: Array) -> None:
        self.recorders[rank].metrics(row)
        self._sent.note(row, now_s)


@final
class SentBytes:
    """Counts the bytes that workers had sent by the end of their steps.

    Programs run ahead of the network, so the number is known later.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []  # ascending: collectives run one after the other
        self._totals: list[float] = [0.0]  # by one worker, before the first end and after each
        self._rows: deque[tuple[Array, float, dict[str, Any]]] = deque()

    def note(self, row: dict[str, Any], now_s: Array) -> None:
        """Complete this row later with the bytes that workers had sent by these times."""
        self._rows.append((now_s, float(now_s.max()), row))

    def book(self, end_s: float, num_bytes: float) -> None:
        """Count `num_bytes` more of every worker, sent by `end_s`."""
        self.settle(end_s)
        self._ends.append(end_s)
        self._totals.append(self._totals[-1] + num_bytes)

    def settle(self, now_s: float) -> None:
        """Complete the rows with known numbers."""
        while self._rows and self._rows[0][1] < now_s:
            times, _, row = self._rows.popleft()
            # Nearly always the same.
            low, high = bisect_right(self._ends, float(times.min())), bisect_right(self._ends, float(times.max()))
            counts = np.searchsorted(self._ends[low:high], times, side="right")
            row["bytes_sent"] = int(np.floor(np.array(self._totals[low : high + 1]))[counts].sum())
        if len(self._ends) > 2 * NUM_KEPT_ENDS:
            del self._ends[:NUM_KEPT_ENDS], self._totals[:NUM_KEPT_ENDS]
