"""A simulated worker: the state of a rank. Its gradients are real, or (timing only) tensors without content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from workbench.costs import AnyNetwork, Compute
from workbench.errors import ConfigError
from workbench.gradients import Gradient, Layout, build_layout, trainable
from workbench.ops import EndStep
from workbench.problems.base import Problem, Sampler
from workbench.problems.loading import Source
from workbench.program import Algorithm, shares_buffers
from workbench.replica.backward import Hooks
from workbench.replica.local_training import LocalTraining, num_steps_of, sampler_of, trace_note
from workbench.replica.module_state import FirstBuffers
from workbench.replica.replica import Replica
from workbench.settings import Settings
from workbench.trace.recorder import MemoryRecorder
from workbench.trace.weights import State


@final
class SimWorker:
    """One simulated worker's replica, counts and recorder."""

    __slots__ = (
        "_first_buffers",
        "_loss",
        "_staleness",
        "_taken",
        "_worker",
        "bytes_sent",
        "has_values",
        "last_end",
        "last_step",
        "num_steps",
        "rank",
        "recorder",
        "replica",
        "sampler",
        "step",
        "traced",
    )

    def __init__(
        self,
        rank: int,
        settings: Settings,
        worker: LocalTraining | None,
        replica: Replica | MetaReplica,
        sampler: Sampler,
        taken: SampleCounts,
        first_buffers: FirstBuffers | None = None,
    ) -> None:
        self.rank = rank
        self.num_steps = num_steps_of(settings, sampler)
        self.replica = replica
        self.recorder = MemoryRecorder(rank, settings.trace_steps)
        self.traced = settings.trace_steps != 0  # any span is kept
        self.step = 0
        self.last_step = -1
        self.has_values = worker is not None
        self.last_end = EndStep(-1)
        self.bytes_sent = 0.0
        self._staleness: int | None = None
        self._loss: Tensor | None = None
        self._worker, self.sampler, self._taken = worker, sampler, taken
        self._first_buffers = first_buffers

    @property
    def trained(self) -> Replica:
        """The replica, if there is one.

        Raises:
            ConfigError: in a timing-only simulation.
        """
        if isinstance(self.replica, Replica):
            return self.replica
        raise ConfigError("a timing-only simulation has no parameters: it has no checkpoints and cannot be resumed")

    def backward(self, step: int) -> Gradient:
        if self._worker is None:
            assert isinstance(self.replica, MetaReplica)
            return self.replica.backward(step)
        assert isinstance(self.replica, Replica)
        if self._first_buffers is not None:
            self._first_buffers.copy_to(self.replica.module_state, step)
        gradient, self._loss = self.replica.backward(step, self._worker.minibatch(step), Hooks())
        return gradient

    def bucket_view(self, gradient: Gradient, bucket: int) -> Gradient:
        """One bucket of a whole gradient."""
        return (
            self.replica.bucket_view(gradient, bucket)
            if isinstance(self.replica, MetaReplica)
            else gradient.bucket_view(bucket)
        )

    def apply(self, gradient: Gradient, lr_scale: float, local: bool) -> None:
        staleness = self.replica.apply(gradient, lr_scale, local=local)
        self._staleness = staleness if self._staleness is None else max(staleness, self._staleness)

    def apply_to_server_copy(self, gradient: Gradient, lr_scale: float) -> int:
        """Update the server's copy; return the number of the update."""
        server_copy, bucket = self.replica.server_copy, gradient.bucket
        if self.has_values or bucket is None:
            server_copy.apply(gradient, lr_scale)
        else:
            server_copy.updates[bucket] += 1  # timing only: updates are only counted
        return max(server_copy.updates) if bucket is None else server_copy.updates[bucket]

    def end_step(self, end: EndStep, now_s: float) -> bool:
        """Record the step; return True if an evaluation is due."""
        step = self.last_step = end.step
        self.last_end = end
        if self._worker is not None:
            self._worker.replica.end_step()
            numbers = (step, now_s, self.bytes_sent, self._staleness, self._loss, self._worker.gradient_reports())
            self.recorder.metrics(self._worker.metrics(*numbers, dropped=end.dropped))
            self._staleness = None
            return self._worker.evaluates_after(step)
        samples, base, extra = self._taken[step]
        row: dict[str, Any] = {
            "step": step,
            "seconds": now_s,
            "bytes_sent": int(self.bytes_sent),
            "staleness": self._staleness,
            "samples": samples,
            "num_samples": base + (self.rank < extra),
            "loss": None,
            "lr": None,
        }
        if end.dropped:
            row["dropped"] = True
        self.recorder.rows.append(row)
        self._staleness = None
        return False

    def evaluated_parameters(self) -> Tensor | None:
        """The parameters to evaluate; None in a timing-only simulation."""
        return self._worker.evaluated_parameters() if self._worker is not None else None

    def due_steps(self) -> list[int]:
        """The steps after which an evaluation is due, except the last; none in a timing-only simulation."""
        return self._worker.due_steps() if self._worker is not None else []

    def join_shards(self, parts: dict[int, Tensor]) -> Tensor:
        """The parameters of all shards, in the layout of `evaluated_parameters`."""
        assert self._worker is not None
        return self._worker.join_shards(parts)

    def weights(self, parameters: Tensor | None = None, average: Tensor | None = None) -> dict[str, State] | None:
        """Return the trained weights, by file; None if only the timing is simulated. See `LocalTraining.weights`."""
        return None if self._worker is None else self._worker.weights(parameters, average)

    def evaluate(
        self, step: int, now_s: float, parameters: Tensor, bytes_sent: int, distance: Mapping[str, Any]
    ) -> None:
        """Evaluate these parameters on the whole test set, in no virtual time.

        Args:
            step: the step.
            now_s: its end.
            parameters: flat.
            bytes_sent: the sum over workers.
            distance: what `distance_from_mean` returns, or nothing.
        """
        if self._worker is not None and self._worker.can_evaluate:
            samples = self._worker.sampler.samples_before(step + 1)
            row = {"step": step, "seconds": now_s, "samples": samples, "bytes_sent": bytes_sent}
            self.recorder.metrics({**row, "evaluation": {**self._worker.evaluate_at(parameters, 0, 1), **distance}})


@final
class SampleCounts(dict[int, tuple[int, int, int]]):
    """step -> (samples of all workers up to its end, samples of each worker in it, remainder).

    The remainder is the number of workers that have one sample more.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def __missing__(self, step: int) -> tuple[int, int, int]:
        after = self._sampler.samples_before(step + 1)
        found = self[step] = (after, *divmod(self._sampler.size(step), self._sampler.num_workers))
        return found


class _Counted:
    """Counts updates of buckets, instead of an optimizer."""

    __slots__ = ("control_seen", "layout", "updates")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.updates = [0] * len(layout.buckets)
        self.control_seen = 0

    def apply(self, gradient: Gradient, lr_scale: float, *, local: bool = False) -> int:
        updates, bucket = self.updates, gradient.bucket
        if bucket is not None:
            updates[bucket] += 1
            return updates[bucket] - 1 - gradient.version
        staleness = max(updates) - gradient.version
        self.updates = [number + 1 for number in updates]
        return staleness


Buckets = dict[int | None, Tensor]


def without_content(layout: Layout) -> Buckets:
    """Return tensors on the meta device, for all workers: one for each bucket, and for None the whole gradient."""
    flat = torch.empty(layout.numel, dtype=layout.dtype, device="meta")
    return {None: flat, **{piece.index: flat[piece.start : piece.stop] for piece in layout.buckets}}


@final
class MetaReplica(_Counted):
    """The replica of a timing-only simulation: gradients on the meta device have a size and no content."""

    __slots__ = ("_buckets", "_server_copy", "control_out", "has_server_copy")

    def __init__(self, layout: Layout, buckets: Buckets | None = None) -> None:
        super().__init__(layout)
        self._buckets = without_content(layout) if buckets is None else buckets
        self._server_copy: _Counted | None = None
        self.control_out = 0
        self.has_server_copy = True

    @property
    def server_copy(self) -> _Counted:
        """The updates of the servers on this rank; made at first use, because few ranks have one."""
        if self._server_copy is None:
            self._server_copy = _Counted(self.layout)
        return self._server_copy

    def backward(self, step: int) -> Gradient:
        return Gradient(self._buckets[None], self.layout, step, min(self.updates))

    def bucket_view(self, gradient: Gradient, bucket: int) -> Gradient:
        """Do what `Gradient.bucket_view` does, without slicing a meta tensor, which takes microseconds."""
        return Gradient(self._buckets[bucket], self.layout, gradient.step, gradient.version, bucket, owner=gradient)

    def discard(self, gradient: Gradient) -> None:
        """Do nothing: no value is kept."""

    def read_parameters(self) -> Tensor:
        return torch.empty(self.layout.parameter_numel, dtype=self.layout.dtype, device="meta")

    def write_parameters(self, value: Tensor) -> None:
        """Do nothing: no value is kept."""

    def pack_parameters(self, bucket: int | None, *, server_copy: bool, step: int = -1) -> Gradient:
        updates = self.server_copy.updates if server_copy else self.updates
        return Gradient(
            self._buckets[bucket], self.layout, step, max(updates) if bucket is None else updates[bucket], bucket
        )

    def unpack_parameters(self, packed: Gradient) -> None:
        """Do nothing: no value is kept."""


def shape_of(problem: Problem, algorithm: Algorithm) -> Layout:
    """Return the layout of the problem's gradients for the algorithm, without memory for them."""
    with torch.device("meta"):
        model = problem.model()
    buckets = algorithm.requires.buckets
    return build_layout(trainable(model), buckets.max_bytes, buckets.count)


def sources_of(problem: Problem) -> tuple[Source, Source | None]:
    """Return the training and test samples, which this process reads for all workers."""
    return problem.train_source().without_processes(), problem.test_source()


def check_num_workers(num_workers: int) -> None:
    """Raise `ConfigError` unless this is a number of workers."""
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ConfigError(f"workers={num_workers}: a simulated cluster has at least 1")


def build_workers(
    algorithm: Algorithm, problem: Problem, settings: Settings, num_workers: int, timing_only: bool
) -> list[SimWorker]:
    """Build the workers of a simulated cluster; they share one copy of the data."""
    if timing_only:
        batch_size = settings.batch_size or problem.batch_size
        num_computing = algorithm.roles(num_workers).num_computing
        sampler = sampler_of(problem.train_source(), batch_size, num_computing, settings.seed)
        layout, taken = shape_of(problem, algorithm), SampleCounts(sampler)
        buckets = without_content(layout)
        return [
            SimWorker(rank, settings, None, MetaReplica(layout, buckets), sampler, taken) for rank in range(num_workers)
        ]
    data = sources_of(problem)
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        workers = [
            LocalTraining(algorithm, problem, settings, rank, num_workers, cpu, data) for rank in range(num_workers)
        ]
    first = FirstBuffers(workers[0].replica.module_state) if shares_buffers(algorithm) else None
    return [
        SimWorker(worker.rank, settings, worker, worker.replica, worker.sampler, SampleCounts(worker.sampler), first)
        for worker in workers
    ]


def simulation_notes(
    settings: Settings, sampler: Sampler, network: AnyNetwork, compute: Compute, *, timing_only: bool
) -> list[str]:
    """Return notes for the run's record: what was simulated, and what differs from real ranks."""
    notes = [
        *trace_note(settings, num_steps_of(settings, sampler)),
        f"simulated: {network}",
        f"simulated: {compute}",
    ]
    num_processes = 0 if timing_only or sampler.source is None else sampler.source.num_processes
    if num_processes:
        notes.append(
            f"loader processes of each simulated worker: {num_processes}, as of a real rank, because the loader has a "
            "worker_init_fn, or a function of the rank returned it"
        )
    if sampler.num_samples < sampler.global_batch:
        share = sampler.num_samples / sampler.global_batch
        notes.append(
            f"one step takes all {sampler.num_samples} samples: a worker computes {share:.2g} of a full minibatch"
        )
    return notes
