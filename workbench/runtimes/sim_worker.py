"""A simulated worker: what a rank holds, with real gradients or, timing only, with shapes alone."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from workbench.backward import Hooks
from workbench.errors import ConfigError
from workbench.gradients import Gradient, build_layout, trainable
from workbench.problems.base import Problem, Sampler
from workbench.program import Algorithm
from workbench.replica import Replica
from workbench.runtimes.worker import Worker, num_steps_of
from workbench.settings import Settings
from workbench.trace.recorder import MemoryRecorder


@final
class SimWorker:
    """One simulated worker's replica, ledger and recorder."""

    def __init__(self, rank: int, settings: Settings, worker: Worker | None, replica: Replica | Shapes, sampler: Sampler) -> None:
        self.rank = rank
        self.num_steps = num_steps_of(settings, sampler)
        self.replica = replica
        self.recorder = MemoryRecorder(rank, settings.trace_steps)
        self.step = 0
        self.last_step = -1
        self.bytes_sent = 0.0
        self._staleness: int | None = None
        self._loss: Tensor | None = None
        self._worker, self._sampler = worker, sampler

    @property
    def trained(self) -> Replica:
        """The replica, where there is one.

        Raises:
            ConfigError: in a timing-only simulation.
        """
        if isinstance(self.replica, Replica):
            return self.replica
        raise ConfigError("a timing-only simulation holds no parameters: there is nothing to keep or to resume")

    def fraction_of_batch(self, step: int) -> float:
        """This worker's samples in this step over a full minibatch."""
        return self._sampler.share_size(step, self.rank) / self._sampler.batch_size

    def backward(self, step: int) -> Gradient:
        if self._worker is None:
            assert isinstance(self.replica, Shapes)
            return self.replica.backward(step)
        assert isinstance(self.replica, Replica)
        gradient, self._loss = self.replica.backward(step, self._worker.minibatch(step), Hooks())
        return gradient

    def apply(self, gradient: Gradient, lr_scale: float) -> None:
        staleness = self.replica.apply(gradient, lr_scale)
        self._staleness = staleness if self._staleness is None else max(staleness, self._staleness)

    def end_step(self, step: int, now_s: float) -> None:
        """Book the step; rank 0 evaluates for all, in no virtual time."""
        self.last_step = step
        if self._worker is None:
            row: dict[str, Any] = {"step": step, "seconds": now_s, "bytes_sent": int(self.bytes_sent), "staleness": self._staleness}
            taken = {"samples": self._sampler.samples_before(step + 1), "num_samples": self._sampler.share_size(step, self.rank)}
            self.recorder.metrics({**row, **taken, "loss": None, "lr": None})
        else:
            self.recorder.metrics(self._worker.metrics(step, now_s, self.bytes_sent, self._staleness, self._loss))
            if self.rank == 0 and self._worker.evaluates_after(step):
                self.evaluate(step, now_s)
        self._staleness = None

    def evaluate(self, step: int, now_s: float) -> None:
        """The whole test set on this worker's parameters."""
        if self._worker is not None and self._worker.can_evaluate:
            samples = self._worker.sampler.samples_before(step + 1)
            row = {"step": step, "seconds": now_s, "samples": samples, "bytes_sent": int(self.bytes_sent)}
            self.recorder.metrics({**row, "evaluation": self._worker.evaluate(0, 1)})


@final
class Shapes:
    """In place of a replica where only time matters: gradients on the meta device, which have a size and no content."""

    def __init__(self, problem: Problem, bucket_bytes: float | None) -> None:
        with torch.device("meta"):
            model = problem.model()
        self.layout = build_layout(trainable(model), bucket_bytes)
        self._updates = [0] * len(self.layout.buckets)

    def backward(self, step: int) -> Gradient:
        flat = torch.empty(self.layout.numel, dtype=self.layout.dtype, device="meta")
        return Gradient(flat, self.layout, step, min(self._updates))

    def apply(self, gradient: Gradient, lr_scale: float) -> int:
        buckets = range(len(self._updates)) if gradient.bucket is None else (gradient.bucket,)
        staleness = max(self._updates[bucket] for bucket in buckets) - gradient.version
        for bucket in buckets:
            self._updates[bucket] += 1
        return staleness

    def read_parameters(self) -> Tensor:
        return torch.empty(self.layout.parameter_numel, dtype=self.layout.dtype, device="meta")

    def write_parameters(self, value: Tensor) -> None:
        """Nothing is kept."""


def build_workers(algorithm: Algorithm, problem: Problem, settings: Settings, num_workers: int, timing_only: bool) -> list[SimWorker]:
    """All workers of a simulated cluster; they share one copy of the data."""
    if timing_only:
        sampler = Sampler(problem.num_samples(), settings.batch_size or problem.batch_size, num_workers, settings.seed)
        shapes = [Shapes(problem, algorithm.bucket_bytes) for _ in range(num_workers)]
        return [SimWorker(rank, settings, None, shapes[rank], sampler) for rank in range(num_workers)]
    data = (problem.train_data(), problem.test_data())
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        workers = [Worker(algorithm, problem, settings, rank, num_workers, cpu, data) for rank in range(num_workers)]
    return [SimWorker(worker.rank, settings, worker, worker.replica, worker.sampler) for worker in workers]
