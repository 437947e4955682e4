"""What changes the numerical results of an algorithm, and the cheapest training that shows them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from workbench.algorithms import BackupSGD, DeAR, LayerwiseSGD, PipeSGD, SoftsyncSGD, SynchronousSGD
from workbench.collectives import Native
from workbench.content import digest_of
from workbench.problems.base import Problem
from workbench.problems.loading import to_device
from workbench.program import Algorithm
from workbench.what_if.candidates import codec_name_of, name_of

SAME_LOSS = 1e-3  # relative difference of two losses that are the same; masked means differ by less


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training that has the numerical results of one or more algorithms on p workers.

    The sum of p workers' gradients is the gradient of one worker with p times the samples: the samplers agree. So
    exact and late gradients are trained with one worker. The differences are roundings.

    Attributes:
        name: what it changes: "exact", "late by 1", "late by 1 with linear8". Buckets and networks do not matter.
        algorithm, workers, batch_size: what is trained; `batch_size` samples of a worker in a step.
        num_workers: p, the workers that it stands for.
        staleness: mean age of a gradient, in updates, for the learning rate.
    """

    name: str
    algorithm: Algorithm
    workers: int
    batch_size: int
    num_workers: int
    staleness: float

    @property
    def key(self) -> str:
        """What is trained, by content: equal for algorithms with the same numerical results."""
        # If it cannot be read, no training is kept, and the object itself is the key.
        content = digest_of(self.algorithm) or f"object {id(self.algorithm)}"
        shown = f"{self.algorithm!r} ({content})"
        return f"{shown}, {self.workers} of {self.num_workers} workers, {self.batch_size} samples"

    @property
    def samples_per_step(self) -> int:
        """Samples whose gradients a step computes."""
        return self.workers * self.batch_size


def recipe_of(algorithm: Algorithm, workers: int, batch_size: int, *, one_worker: bool = True) -> Recipe:
    """Return the recipe of an algorithm on `workers` workers with `batch_size` samples each.

    Args:
        one_worker: whether one worker may stand for all (`one_worker_stands_for_all`).

    >>> recipe_of(PipeSGD(width=2), 4, 8).name, recipe_of(PipeSGD(width=2), 4, 8).batch_size
    ('late by 1', 32)
    """
    whole: dict[str, Any] = {"num_workers": workers, "workers": workers, "batch_size": batch_size}
    alone = {"num_workers": workers, "workers": 1, "batch_size": workers * batch_size} if one_worker else whole
    collective: Any = getattr(algorithm, "collective", None)
    lossy = collective is not None and collective.lossy
    how = codec_name_of(algorithm) or str(collective)
    if isinstance(algorithm, SynchronousSGD | LayerwiseSGD | DeAR):
        if lossy:
            plain = SynchronousSGD(collective=collective)
            return Recipe(name=f"exact with {how}", algorithm=plain, staleness=0.0, **whole)
        return Recipe(name="exact", algorithm=SynchronousSGD(), staleness=0.0, **alone)
    if isinstance(algorithm, PipeSGD):
        late, lossless = algorithm.max_staleness, replace(algorithm, collective=Native())
        name = f"late by {late}" if late else "exact"
        name = name if lossless == PipeSGD(width=algorithm.width) else name_of(lossless)
        if lossy:
            return Recipe(name=f"{name} with {how}", algorithm=algorithm, staleness=late, **whole)
        return Recipe(name=name, algorithm=lossless if late else SynchronousSGD(), staleness=late, **alone)
    # With a time-out, the time decides how many gradients an update has.
    if isinstance(algorithm, BackupSGD) and algorithm.timeout_s is None and one_worker:
        used = workers - algorithm.backups
        name = f"exact, {used} of {workers} gradients" if algorithm.backups else "exact"
        alone["batch_size"] = used * batch_size
        return Recipe(name=name, algorithm=SynchronousSGD(), staleness=0.0, **alone)
    return Recipe(name=name_of(algorithm), algorithm=algorithm, staleness=_mean_staleness(algorithm, workers), **whole)


def _mean_staleness(algorithm: Algorithm, workers: int) -> float:
    """Return the mean age of a gradient: p - 1 for an asynchronous server, about `splits` for softsync."""
    if isinstance(algorithm, SoftsyncSGD):
        return float(algorithm.splits)
    if algorithm.requires.servers:
        return float(workers - 1) if algorithm.max_staleness is None else 0.0
    return float(algorithm.max_staleness or 0)


def one_worker_stands_for_all(problem: Problem, batch_size: int) -> bool:
    """Return whether the loss of two workers' samples together is the mean of their losses.

    It is not if the model normalises over the samples of a worker (batch normalisation), if the loss is a sum over
    samples, or compares samples of a batch with each other, or if the user's function makes the batches.
    """
    source = problem.train_source()
    size = min(batch_size, source.num_samples // 2)
    if size < 1:
        return False
    halves = source.halves(size)
    if halves is None:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = problem.model()
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            return False
        model.eval()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        one, other, both = (float(problem.first_loss(model, to_device(batch, device))) for batch in halves)
    return math.isclose(both, (one + other) / 2, rel_tol=SAME_LOSS)
