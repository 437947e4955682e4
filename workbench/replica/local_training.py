"""One rank's part of a run, the same on every runtime: replica, minibatches, evaluation, rows of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from workbench.content import digest_of
from workbench.errors import ConfigError
from workbench.gradients import Layout, build_layout, trainable
from workbench.machine import num_cores
from workbench.problems.base import Problem, Sampler
from workbench.problems.loading import ENDLESS, Batch, Reader, Reading, Source, drawing, to_device
from workbench.problems.metrics import Measurement
from workbench.program import Algorithm, Replicas, clipping_refusal, defaults_of, record_of
from workbench.replica.backward import MicroBatch
from workbench.replica.gradient_guard import GradientReport, LossWatch, entries_of, guard_of
from workbench.replica.optimizer_step import (
    build_optimizer,
    check_forward,
    check_per_parameter,
    check_schedule_takes_rate,
    set_first_rates,
)
from workbench.replica.replica import Replica, check_is_mean, evaluation_mode
from workbench.replica.server_copy import ServerCopy
from workbench.replica.trained import state_of
from workbench.rng import derive_seed
from workbench.settings import ComputeTimes, Settings, describe
from workbench.trace.kinds import SLEPT_LANE
from workbench.trace.weights import AVERAGED, WEIGHTS, State

EVALUATION_BATCH = 256
NO_SAMPLES = "test=: it has no samples: leave it out, or give data"


@final
class LocalTraining:
    """One rank's part of a run that does not depend on communication."""

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        settings: Settings,
        rank: int,
        num_workers: int,
        device: torch.device,
        data: tuple[Source, Source | None] | None = None,
    ) -> None:
        self.problem = problem
        self.settings = settings
        self.rank = rank
        self.device = device
        self.batch_size = settings.batch_size or problem.batch_size
        self._served = algorithm.requires.servers
        self._source, self._test = data or (problem.train_source(), problem.test_source())
        num_computing = algorithm.roles(num_workers).num_computing
        self.sampler = sampler_of(self._source, self.batch_size, num_computing, settings.seed)
        self.num_steps = num_steps_of(settings, self.sampler)
        self._readers: dict[int, Reader] = {}  # rank -> its reader
        self._fits = False  # whether the model has taken a batch
        self.replica = build_replica(algorithm, problem, settings, device)
        check_forward(algorithm, self.replica.model, num_workers)
        self.replica.total_weight = lambda step: self.sampler.total_weight(step)  # the sampler may be replaced later
        self.guard = self.replica.guard = guard_of(self.replica, settings, rank)
        self.loss_watch = LossWatch(settings.divergence_ratio, lambda: self.replica.lr)
        self.replica.compiled = settings.compile
        self._forward: nn.Module = torch.compile(self.replica.model) if settings.compile else self.replica.model  # type: ignore[assignment]  # a compiled module is a module
        for module in (self.replica.model, self._forward):
            if not module.training:  # the constructor may freeze parts (BatchNorm), not the whole
                module.train()
        if rank == 0:
            self._rehearse_evaluation()

    def minibatch(self, step: int, rank: int | None = None) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step, or another rank's; none if it has no samples in it.

        Also seeds dropout for that rank and step.
        """
        rank = self.rank if rank is None else rank
        if self.guard is not None:
            self.guard.rank = rank
        _seed_generators(derive_seed(self.settings.seed, "dropout", rank, step), self.device)
        if rank not in self._readers:
            self._readers[rank] = self._source.reader(self._reading(rank))
        return [self._micro(batch, number) for batch, number in self._readers[rank].read(step)]

    def _reading(self, rank: int) -> Reading:
        sampler = self.sampler
        return Reading(
            seed=self.settings.seed,
            rank=rank,
            num_ranks=sampler.num_workers,
            batch_size=self.batch_size,
            num_micro=self.settings.num_micro,
            share=lambda step: sampler.share(step, rank),
            num_steps=self.num_steps,
        )

    def _micro(self, batch: Batch, number: int) -> MicroBatch:
        here = to_device(batch, self.device)
        sampler = self.sampler
        share = 1 / sampler.num_workers if self._source.gives_batches else number / sampler.global_batch
        return MicroBatch(lambda: self._loss(here), share, number)

    def _loss(self, batch: Batch) -> Tensor:
        if self._fits:
            return self.problem.batch_loss(self._forward, batch)
        loss = self.problem.first_loss(self._forward, batch)
        self._fits = True
        return loss

    def close_readers(self) -> None:
        """End the loader processes. A later minibatch starts them again."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after this step. The last step is evaluated after all updates."""
        every = self.settings.evaluate_every
        due = self.sampler.ends_epoch(step) if every is None else every > 0 and (step + 1) % every == 0
        return self._test is not None and due and step + 1 < self.num_steps

    def due_steps(self) -> list[int]:
        """Return the steps after which an evaluation is due, without the last step."""
        return [step for step in range(self.num_steps) if self.evaluates_after(step)]

    def redistribute_data(self, origin: tuple[int, int]) -> None:
        """Divide the remaining data among the present ranks. `origin`: (step, samples before it); see `Sampler`."""
        self.sampler = replace(self.sampler, origin=origin)
        self.num_steps = num_steps_of(self.settings, self.sampler)
        self.close_readers()

    def set_rank(self, rank: int, num_workers: int, origin: tuple[int, int]) -> None:
        """Change this rank's number and the number of workers. `origin`: (step, samples before it)."""
        self.loss_watch.begin(rank, self.loss_watch.first(self.rank))
        self.rank = rank
        self.sampler = replace(self.sampler, num_workers=num_workers)
        self.redistribute_data(origin)

    @property
    def can_evaluate(self) -> bool:
        return self._test is not None

    def evaluated_parameters(self) -> Tensor:
        """Return the parameters to evaluate, flat, or their moving averages if these are kept.

        They are the server's copy if this rank holds all of it, otherwise the replica's.
        """
        replica = self.replica
        if replica.has_server_copy and all(replica.server_copy.updates):
            values = replica.server_copy.evaluated()
        else:
            values = replica.average.values if replica.average else [param.detach() for param in replica.parameters]
        return torch.cat([value.reshape(-1).to(replica.layout.dtype) for value in values])

    def weights(self, parameters: Tensor | None = None, average: Tensor | None = None) -> dict[str, State]:
        """Return file -> the model's weights, and their moving average if it is kept.

        Args:
            parameters, average: these instead of the replica's, flat, if evaluations take others, such as the mean of
                replicas that differ.
        """
        replica = self.replica
        found = {WEIGHTS: state_of(replica.model, replica.parameters if parameters is not None else (), parameters)}
        if self.settings.ema_decay is not None:
            average = self.evaluated_parameters() if average is None else average
            found[AVERAGED] = state_of(replica.model, replica.parameters, average)
        return found

    def snapshot(self) -> tuple[Tensor, list[Tensor]]:
        """Copy what a later evaluation needs: parameters, and buffers such as BatchNorm's."""
        return self.evaluated_parameters().cpu(), [value.cpu() for value in self.replica.module_state.copy()]

    def join_shards(self, parts: dict[int, Tensor]) -> Tensor:
        """Join the parameters of shards, by number, in the layout of `evaluated_parameters`."""
        return torch.cat([parts[number].reshape(-1).to(self.replica.layout.dtype) for number in sorted(parts)])

    @torch.no_grad()
    def evaluate_snapshot(self, snapshot: tuple[Tensor, list[Tensor]]) -> dict[str, Any]:
        """Evaluate a snapshot on the whole test set."""
        state = self.replica.module_state
        with state.kept():
            state.load(snapshot[1])
            return self.evaluate_at(snapshot[0].to(self.device), 0, 1)

    @torch.no_grad()
    def evaluate_at(self, parameters: Tensor, share: int, num_shares: int) -> dict[str, Any]:
        """Evaluate other parameters; the replica keeps its own."""
        kept = self.replica.read_parameters()
        self.replica.write_parameters(parameters)
        try:
            return self.evaluate(share, num_shares)
        finally:
            self.replica.write_parameters(kept)

    @torch.no_grad()
    def evaluate(self, share: int, num_shares: int) -> dict[str, Any]:
        """Return sums over one share of the test data; the shares of several ranks add up to the whole.

        It changes no state of the model.
        """
        with self.replica.module_state.kept(), evaluation_mode(self.replica.model) as model:
            return self._sums(model, share, num_shares)

    def _sums(self, model: nn.Module, share: int, num_shares: int) -> dict[str, Any]:
        assert self._test is not None
        sums = {**self._no_sums(), "shares": num_shares}
        measured = Measurement(self.problem.named_metrics(), whole_batch=self.problem.whole_batch)
        for read, number in self._test.batches(EVALUATION_BATCH, share, num_shares):
            batch = to_device(read, self.device)
            self._add(sums, measured, model, batch, number, self.problem.batch_loss(model, batch))
        if share == 0 and not sums["count"]:
            raise ConfigError(NO_SAMPLES)
        if self.problem.metrics:
            first = share == 0 and measured.has_states
            if first:
                for read, _ in self._test.batches(EVALUATION_BATCH):
                    measured.add_to_states(model, to_device(read, self.device))
            sums["metrics"] = measured.sums(states=first)
        return sums

    def _no_sums(self) -> dict[str, Any]:
        """Return the sums of an evaluation without samples."""
        none = None if self.problem.correct is None else 0
        return {"loss_sum": 0.0, "loss_weight": 0.0, "correct": none, "judged": none, "count": 0}

    def _add(
        self, sums: dict[str, Any], measured: Measurement, model: nn.Module, batch: Batch, number: int, loss: Tensor
    ) -> None:
        """Add a test batch and its mean loss to the sums and the metrics."""
        problem, weight = self.problem, self.problem.weight_of(batch, number)
        if weight:  # else the loss is 0 / 0
            sums["loss_sum"] += float(loss) * weight
            sums["loss_weight"] += weight
        sums["count"] += number
        measured.add(model, batch, number)
        if problem.correct is not None:
            correct, judged = problem.count_correct(model, batch)
            sums["correct"] += int(correct)
            sums["judged"] += int(judged)

    @torch.no_grad()
    def _rehearse_evaluation(self) -> None:
        """Evaluate the first test batch, so that what an evaluation would fail at fails before the training.

        The model's state and modes and the random generators stay as they are.

        Raises:
            ConfigError: the batch cannot be evaluated.
        """
        if self._test is None:
            return
        state = self.replica.module_state
        with state.kept(), drawing(self.settings.seed), evaluation_mode(self.replica.model) as model:
            read, number = next(self._test.batches(EVALUATION_BATCH), (None, 0))
            if not number:
                raise ConfigError(NO_SAMPLES)
            batch = to_device(read, self.device)
            loss = self.problem.first_loss(model, batch)
            check_is_mean(loss)
            with self.problem.naming(batch):
                measured = Measurement(self.problem.named_metrics(), whole_batch=self.problem.whole_batch)
                self._add(self._no_sums(), measured, model, batch, number, loss)
                if measured.has_states:
                    measured.add_to_states(model, batch)
                    measured.check_states()

    def _lr(self) -> float | None:
        """The learning rate for the record, of the last update so far; None on a worker of an algorithm with servers."""
        if self.replica.has_server_copy:
            return self.replica.server_copy.used_lr
        return None if self._served else self.replica.used_lr

    @property
    def data(self) -> tuple[Source, Source | None]:
        """The training data and the test data."""
        return self._source, self._test

    def gradient_reports(self) -> tuple[GradientReport, ...]:
        """Return reports of bad gradients since the last call."""
        return () if self.guard is None else self.guard.take_reports()

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
        """Return a step's row of metrics. `found` is what `gradient_reports` returned at the end of the step.

        Raises:
            Diverged: the loss is not finite or too large, or a bad gradient must stop the run.
        """
        entries = entries_of(found, None if loss is None else float(loss))
        self.loss_watch.check(entries["loss"], step, self.rank)
        return {**self.row(step, seconds, bytes_sent, staleness), **entries, **({"dropped": True} if dropped else {})}

    def row(self, step: int, seconds: float, bytes_sent: float, staleness: int | None) -> dict[str, Any]:
        """Return a row of metrics without the entries about a minibatch.

        `lr` is the rate of the last update before the step's end, of the first parameter group, with the algorithm's
        `lr_scale`: of a late gradient, the rate with which it was applied. It is None before the first update.
        """
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


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the host, and of the device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also records stacks for CUDA: 0.4 ms
    else:
        torch.manual_seed(seed)


def build_replica(algorithm: Algorithm, problem: Problem, settings: Settings, device: torch.device) -> Replica:
    """Build model and optimizer with the algorithm's layout.

    Raises:
        ConfigError: the algorithm or the model does not support a setting.
    """
    _seed_generators(derive_seed(settings.seed, "initial-weights"), device)
    model = problem.model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"problem {problem.name}: model() returned a {type(model).__name__}, not an nn.Module")
    model = model.to(device)
    named = trainable(model)
    build_layout(named)  # its errors are clearer than the optimizer's
    _check_update(algorithm, settings)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = build_optimizer(settings.optimizer or problem.optimizer, parameters)
        if settings.lr is not None:
            set_first_rates(optimizer, settings.lr)
        return optimizer

    buckets = algorithm.requires.buckets
    replica = Replica(
        model,
        make_optimizer([param for _, param in named]),
        bucket_bytes=buckets.max_bytes,
        num_buckets=buckets.count,
        schedule=settings.schedule,
        clip_norm=settings.clip_norm,
        precision=settings.precision,
        applies_buckets=buckets.applied_singly,
    )
    if settings.lr is not None:
        check_schedule_takes_rate(replica.optimizer_wrapper.optimizer, settings.lr)
    more = {"schedule": settings.schedule, "ema_decay": settings.ema_decay}
    replica.make_server_copy = lambda: ServerCopy(replica.parameters, replica.layout, make_optimizer, **more)  # type: ignore[arg-type]
    if algorithm.requires.servers and len(replica.layout.buckets) > 1:
        check_per_parameter(replica.optimizer_wrapper.optimizer)
    replica.leaves_out_overflow = algorithm.requires.servers and settings.precision == "fp16"
    if settings.ema_decay is not None and not algorithm.requires.servers:
        replica.keep_average(settings.ema_decay)
    return replica


def _check_update(algorithm: Algorithm, settings: Settings) -> None:
    """Raise `ConfigError` for a setting that does not fit what the algorithm updates with, or where."""
    refusal = clipping_refusal(algorithm)
    if settings.clip_norm is not None and refusal:
        raise ConfigError(f"clip_norm={settings.clip_norm}: {refusal}")
    split = getattr(algorithm, "shards", 1) > 1 or getattr(algorithm, "dedicated", False)
    if algorithm.requires.servers and settings.ema_decay is not None and split:
        raise ConfigError(
            "ema_decay: rank 0 evaluates the average and must hold all of it: use shards=1 and dedicated=False"
        )


def sampler_of(source: Source, batch_size: int, num_workers: int, seed: int) -> Sampler:
    """Return the sampler of a problem's training samples.

    Raises:
        ConfigError: the source drops incomplete batches, and has no full one.
    """
    sampler = Sampler(source.num_samples, batch_size, num_workers, seed, source=source)
    if not sampler.steps_per_epoch:
        raise ConfigError(
            f"train=: its drop_last=True leaves nothing of {source.num_samples} samples, because {num_workers} workers "
            f"take {sampler.global_batch} in a step: use a smaller batch_size, or drop_last=False"
        )
    return sampler


def num_steps_of(settings: Settings, sampler: Sampler) -> int:
    """Return the number of steps that the settings ask for.

    Raises:
        ConfigError: epochs of a stream.
    """
    if settings.steps is None and sampler.num_samples == ENDLESS:
        raise ConfigError("the training data are a stream, so an epoch has no length: give steps= instead of epochs=")
    return settings.steps or sampler.steps_of(settings.epochs or 0)


def check_algorithm_and_problem(algorithm: Any, problem: Any) -> None:
    """Raise `ConfigError` unless these are an algorithm and a problem; the message suggests a fix."""
    for what, kind, value in (("algorithm", Algorithm, algorithm), ("problem", Problem, problem)):
        if not isinstance(value, kind):
            name = getattr(value, "__name__", None)
            hint = f"call it: {name}()" if callable(value) and name else f"give a {kind.__name__}"
            raise ConfigError(f"{what}= is {name or f'a {type(value).__name__}'}, not a {kind.__name__}: {hint}")


def run_info(
    algorithm: Algorithm, problem: Problem, settings: Settings, runtime: str, num_workers: int
) -> dict[str, Any]:
    """Return the entries of `run.json` that are known before the run begins."""
    metrics = problem.named_metrics()
    whose = _describe_evaluated(algorithm)
    return {
        **({"evaluated": whose} if whose else {}),
        "clock": "virtual" if runtime == "simulated" else "wall",
        "algorithm": {
            "name": type(algorithm).__name__,
            "defaults": defaults_of(algorithm),
            "settings": record_of(algorithm),
        },
        "problem": {
            "name": problem.name,
            "note": problem.note,
            "optimizer": describe(settings.optimizer or problem.optimizer),
            **({"metrics": {name: metric.better for name, metric in metrics.items()}} if metrics else {}),
        },
        "runtime": runtime,
        "num_workers": num_workers,
        "settings": settings.as_record(),
        "content": _content(algorithm, problem, settings),
        "versions": {"torch": torch.__version__ + ""},
        "notes": [*filter(None, [problem.note]), *slept_note(settings.compute)],
    }


def _content(algorithm: Algorithm, problem: Problem, settings: Settings) -> dict[str, str | None]:
    """Return digests of what a run's record can only name, such as a lambda; None for content that cannot be read."""
    given = {
        "algorithm": algorithm,
        "model": problem.model,
        "loss": problem.loss,
        "optimizer": settings.optimizer or problem.optimizer,
        "schedule": settings.schedule,
    }
    return {name: digest_of(value, logs=False) for name, value in given.items()}


def slept_note(compute: ComputeTimes | None) -> list[str]:
    """Return a note for the run's record if ranks sleep for their compute."""
    return [] if compute is None else [f"{SLEPT_LANE}: {compute}"]


def trace_note(settings: Settings, num_steps: int) -> list[str]:
    """Return a note if the trace covers only a part of the run."""
    first = settings.trace_steps
    if not first or first >= num_steps:
        return []
    covered = f"the trace holds the first {first:,} of {num_steps:,} steps"
    return [f"{covered}: timelines, overlap and critical paths cover only those; trace_steps=None keeps all"]


def _describe_evaluated(algorithm: Algorithm) -> str:
    """Return whose parameters are evaluated, if replicas differ between steps; "" if all are equal.

    Only ranks that end a step together evaluate their mean (`decide`).
    """
    if algorithm.requires.servers:
        return "the servers' parameters"
    if algorithm.replicas == Replicas.NEVER:
        return "rank 0's replica alone"
    if algorithm.asynchronous:
        return "rank 0's replica"
    return "the mean of all replicas" if algorithm.replicas == Replicas.AT_END else ""


def model_info(layout: Layout) -> dict[str, Any]:
    """Return the size of the model, and name and shape of each parameter, from which a simulation can be made."""
    sizes = {
        "parameters": layout.parameter_numel,
        "message_bytes": layout.message_bytes,
        "buckets": len(layout.buckets),
    }
    return {**sizes, "itemsize": layout.itemsize, "shapes": [[slot.name, list(slot.shape)] for slot in layout.slots]}


def share_cores(threads: int | None, ranks_here: int) -> None:
    """Give this rank its share of the machine's cores."""
    torch.set_num_threads(threads or max(1, num_cores() // max(1, ranks_here)))


def distance_from_mean(replicas: Sequence[Tensor], mean: Tensor) -> dict[str, list[float]]:
    """Return, for the row of an evaluation, the sum of squared distances of replicas from their mean, and their number.

    `Run.evaluations` has the root of the mean over all replicas, as "consensus_distance".

    >>> distance_from_mean([torch.tensor([0.0, 0.0]), torch.tensor([2.0, 4.0])], torch.tensor([1.0, 2.0]))
    {'distance_squared': [10.0, 2]}
    """
    squared = sum((replica - mean).double().square().sum().item() for replica in replicas)
    return {"distance_squared": [squared, len(replicas)]}
