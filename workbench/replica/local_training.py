"""What every runtime builds for one rank from a problem and settings: replica, minibatches, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from workbench.errors import ConfigError
from workbench.gradients import Layout
from workbench.machine import num_cores
from workbench.problems.base import Problem, Sampler, accuracy, fetch, to_device
from workbench.program import Algorithm, Replicas, defaults_of
from workbench.replica.backward import Micro
from workbench.replica.build import build_replica
from workbench.replica.gradient_guard import guard_of
from workbench.replica.gradient_report import GradientReport, LossWatch, entries_of
from workbench.replica.replica import evaluation_mode
from workbench.rng import derive_seed
from workbench.settings import Settings, describe

EVALUATION_BATCH = 256


@final
class LocalTraining:
    """One rank's side of a run that does not depend on how ranks communicate."""

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        settings: Settings,
        rank: int,
        num_workers: int,
        device: torch.device,
        data: tuple[Dataset[Any], Dataset[Any] | None] | None = None,
    ) -> None:
        self.problem, self.settings = problem, settings
        self.rank, self.device = rank, device
        self.batch_size = settings.batch_size or problem.batch_size
        self._served = algorithm.has_servers
        self._data, self._test = data or (problem.train_data(), problem.test_data())
        self.sampler = Sampler(len(self._data), self.batch_size, algorithm.num_computing(num_workers), settings.seed)  # type: ignore[arg-type]
        self.num_steps = num_steps_of(settings, self.sampler)
        self.replica = build_replica(algorithm, problem, settings, device)
        self.replica.total_weight = lambda step: self.sampler.total_weight(step)  # of the sampler as it is then
        self.guard = self.replica.guard = guard_of(self.replica, settings, rank)
        self.loss_watch = LossWatch(settings.divergence_ratio, lambda: self.replica.lr)
        _check_accuracy(problem, self._test)
        self.replica.compiled = settings.compile
        self._forward: nn.Module = torch.compile(self.replica.model) if settings.compile else self.replica.model  # type: ignore[assignment]  # it is one
        for module in (self.replica.model, self._forward):
            if not module.training:  # a constructor may freeze parts (BatchNorm), and not the whole
                module.train()

    def minibatch(self, step: int, rank: int | None = None) -> list[Micro]:
        """This rank's micro-batches of a step (or another's, for whom it stands); none if it has no samples in it.

        Seeds dropout for that rank and step.
        """
        rank = self.rank if rank is None else rank
        if self.guard is not None:
            self.guard.rank = rank
        indices = self.sampler.share(step, rank)
        seed = derive_seed(self.settings.seed, "dropout", rank, step)
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # all that torch.manual_seed does for the CPU; for CUDA it keeps a stack: 0.4 ms
        else:
            torch.manual_seed(seed)
        parts = torch.tensor_split(indices, self.settings.num_micro) if self.settings.num_micro > 1 else (indices,)
        return [self._micro(part) for part in parts if len(part)]

    def _micro(self, indices: Tensor) -> Micro:
        batch = to_device(fetch(self._data, indices), self.device)
        return Micro(lambda: self.problem.batch_loss(self._forward, batch), len(indices) / self.sampler.global_batch, len(indices))

    def evaluates_after(self, step: int) -> bool:
        """Whether the test data are due at the end of this step (the last one is evaluated when everything is applied)."""
        every = self.settings.evaluate_every
        due = self.sampler.ends_epoch(step) if every is None else every > 0 and (step + 1) % every == 0
        return self._test is not None and due and step + 1 < self.num_steps

    def due_steps(self) -> list[int]:
        """The steps after which the test data are due, but for the last."""
        return [step for step in range(self.num_steps) if self.evaluates_after(step)]

    def deal_anew(self, origin: tuple[int, int]) -> None:
        """From a step on, behind so many samples, deal the data in the batches of these ranks: see `Sampler.origin`."""
        self.sampler = replace(self.sampler, origin=origin)
        self.num_steps = num_steps_of(self.settings, self.sampler)

    def number(self, rank: int, num_workers: int, origin: tuple[int, int]) -> None:
        """Be that rank of so many from a step on, behind so many samples."""
        self.loss_watch.begin(rank, self.loss_watch.first(self.rank))
        self.rank = rank
        self.sampler = replace(self.sampler, num_workers=num_workers)
        self.deal_anew(origin)

    @property
    def can_evaluate(self) -> bool:
        return self._test is not None

    def evaluated_parameters(self) -> Tensor:
        """What an evaluation looks at, flat: the server's copy where this rank holds a whole one, and averages where they are kept."""
        replica = self.replica
        if replica.has_master and all(replica.master.updates):
            values = replica.master.evaluated()
        else:
            values = replica.average.values if replica.average else [param.detach() for param in replica.parameters]
        return torch.cat([value.reshape(-1).to(replica.layout.dtype) for value in values])

    def snapshot(self) -> tuple[Tensor, list[Tensor]]:
        """What an evaluation looks at, kept for one that comes later: parameters, and buffers such as BatchNorm's."""
        return self.evaluated_parameters().cpu(), [buffer.cpu().clone() for buffer in self.replica.float_buffers()]

    def joined(self, parts: dict[int, Tensor]) -> Tensor:
        """The shards' parameters, by their numbers, as `evaluated_parameters` lays them out."""
        return torch.cat([parts[number].reshape(-1).to(self.replica.layout.dtype) for number in sorted(parts)])

    @torch.no_grad()
    def evaluate_snapshot(self, snapshot: tuple[Tensor, list[Tensor]]) -> dict[str, Any]:
        """The whole test set at a snapshot."""
        buffers = self.replica.float_buffers()
        kept = [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, snapshot[1], strict=True):
            buffer.copy_(value)
        try:
            return self.evaluate_at(snapshot[0].to(self.device), 0, 1)
        finally:
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)

    @torch.no_grad()
    def evaluate_at(self, parameters: Tensor, share: int, num_shares: int) -> dict[str, Any]:
        """`evaluate` with other parameters than the replica's, which it keeps."""
        kept = self.replica.read_parameters()
        self.replica.write_parameters(parameters)
        try:
            return self.evaluate(share, num_shares)
        finally:
            self.replica.write_parameters(kept)

    @torch.no_grad()
    def evaluate(self, share: int, num_shares: int) -> dict[str, Any]:
        """Sums over one share of the test data, so that shares of several ranks add up to the whole."""
        with evaluation_mode(self.replica.model) as model:
            return self._sums(model, share, num_shares)

    def _sums(self, model: nn.Module, share: int, num_shares: int) -> dict[str, Any]:
        assert self._test is not None
        sums: dict[str, Any] = {"loss_sum": 0.0, "correct": None, "judged": None, "count": 0, "shares": num_shares}
        indices = torch.arange(share, len(self._test), num_shares)  # type: ignore[arg-type]
        for part in torch.split(indices, EVALUATION_BATCH):
            if not len(part):
                continue
            batch = to_device(fetch(self._test, part), self.device)
            sums["loss_sum"] += float(self.problem.batch_loss(model, batch)) * len(part)
            sums["count"] += len(part)
            if self.problem.correct is not None:
                correct, judged = self.problem.correct(model, batch)
                sums["correct"] = (sums["correct"] or 0) + int(correct)
                sums["judged"] = (sums["judged"] or 0) + judged
        return sums

    def _lr(self) -> float | None:
        """Of the optimizer that counts; None on a rank that serves nothing, of a method with servers."""
        if self.replica.has_master:
            return self.replica.master.lr
        return None if self._served else self.replica.lr

    @property
    def data(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        """For training, and for evaluation."""
        return self._data, self._test

    def found(self) -> tuple[GradientReport, ...]:
        """What was wrong with gradients since the last time."""
        return () if self.guard is None else self.guard.take()

    def metrics(
        self,
        step: int,
        seconds: float,
        bytes_sent: float,
        staleness: int | None,
        loss: Tensor | None,
        found: Sequence[GradientReport] = (),
        *,
        dropped: bool = False,
    ) -> dict[str, Any]:
        """A step's row for the record; `found`: what `found()` gave at its end.

        Raises:
            Diverged: the loss is not a finite number, or too large, or a gradient was to be stopped at.
        """
        entries = entries_of(found, None if loss is None else float(loss))
        self.loss_watch.check(entries["loss"], step, self.rank)
        return {**self.row(step, seconds, bytes_sent, staleness), **entries, **({"dropped": True} if dropped else {})}

    def row(self, step: int, seconds: float, bytes_sent: float, staleness: int | None) -> dict[str, Any]:
        """The same without what is of one minibatch."""
        return {
            "step": step,
            "seconds": round(seconds, 6),
            "samples": self.sampler.samples_before(step + 1),
            "bytes_sent": int(bytes_sent),
            "staleness": staleness,
            "loss": None,
            "num_samples": self.sampler.share_size(step, self.rank),
            "lr": self._lr(),
        }


def _check_accuracy(problem: Problem, test: Dataset[Any] | None) -> None:
    """Find out now, and not after the first epoch, that the default accuracy means nothing for these data."""
    if test is None or problem.correct is not accuracy:
        return
    sample = test[0]
    target = sample[1] if isinstance(sample, tuple | list) and len(sample) == 2 else None
    if isinstance(target, float) or (isinstance(target, Tensor) and target.is_floating_point()):
        raise ConfigError(f"problem {problem.name}: its targets are no class numbers, so there is no accuracy: give it correct=None")


def num_steps_of(settings: Settings, sampler: Sampler) -> int:
    """How many steps the settings ask for."""
    return settings.steps or sampler.steps_of(settings.epochs or 0)


def check_runtime(algorithm: Algorithm, runtime: str) -> None:
    """Raise `ConfigError` if the method works on another runtime only."""
    if algorithm.requires.runtime not in (None, runtime):
        raise ConfigError(f"{algorithm} works on runtime={algorithm.requires.runtime!r} alone, and this one is {runtime!r}")


def check_what(algorithm: Any, problem: Any, runtime: str) -> None:
    """Raise `ConfigError` unless these are a method, of that runtime, and a problem; says what was probably meant."""
    for what, kind, value in (("algorithm", Algorithm, algorithm), ("problem", Problem, problem)):
        if not isinstance(value, kind):
            name = getattr(value, "__name__", None)
            hint = f"call it: {name}()" if callable(value) and name else f"give a {kind.__name__}"
            raise ConfigError(f"{what}= is {name or f'a {type(value).__name__}'}, which is no {kind.__name__}: {hint}")
    check_runtime(algorithm, runtime)


def run_info(algorithm: Algorithm, problem: Problem, settings: Settings, runtime: str, num_workers: int) -> dict[str, Any]:
    """What `run.json` says of a run before it begins."""
    record = algorithm.settings()
    whose = _evaluated_words(algorithm)
    return {
        **({"evaluated": whose} if whose else {}),
        "clock": "virtual" if runtime == "simulated" else "wall",
        "method": {
            "name": type(algorithm).__name__,
            "defaults": defaults_of(algorithm),
            "settings": {name: value if isinstance(value, int | float | None) else str(value) for name, value in record.items()},
        },
        "problem": {"name": problem.name, "note": problem.note, "optimizer": describe(settings.optimizer or problem.optimizer)},
        "runtime": runtime,
        "num_workers": num_workers,
        "settings": settings.as_record(),
        "versions": {"torch": torch.__version__ + ""},
        "notes": [problem.note] if problem.note else [],
    }


def trace_note(settings: Settings, num_steps: int) -> list[str]:
    """That the trace is of a part of the run, where it is."""
    first = settings.trace_steps
    if not first or first >= num_steps:
        return []
    covered = f"the trace holds the first {first:,} of {num_steps:,} steps"
    return [f"{covered}: timelines, overlap and critical paths are of those; trace_steps=None keeps all"]


def _evaluated_words(algorithm: Algorithm) -> str:
    """Whose parameters are evaluated where replicas differ between steps; "" where all are equal."""
    if algorithm.has_servers:
        return "the servers' parameters"
    if algorithm.replicas == Replicas.NEVER:
        return "rank 0's replica alone"
    return "the mean of all replicas" if algorithm.replicas == Replicas.AT_END else ""


def model_info(layout: Layout) -> dict[str, Any]:
    """The size of what is trained and sent; name and shape of each parameter, from which a simulation can be made."""
    sizes = {"parameters": layout.parameter_numel, "message_bytes": layout.message_bytes, "buckets": len(layout.buckets)}
    return {**sizes, "itemsize": layout.itemsize, "shapes": [[slot.name, list(slot.shape)] for slot in layout.slots]}


def share_cores(threads: int | None, ranks_here: int) -> None:
    """Give this rank its part of the machine's cores."""
    torch.set_num_threads(threads or max(1, num_cores() // max(1, ranks_here)))
