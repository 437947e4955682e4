"""The oracle: one process, plain PyTorch, written from the formulas.

Nothing here uses ranks' buffers, requests or runtimes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from workbench.problems.base import Problem, Sampler
from workbench.problems.loading import fetch
from workbench.rng import derive_seed
from workbench.settings import Settings


def serial(
    problem: Problem, settings: Settings, num_workers: int, delay: int = 0, *, by_share: bool = False
) -> list[Tensor]:
    """SGD in one process with the whole batch, each gradient applied `delay` updates late, those in flight at the end.

    Args:
        by_share: compute the batch's gradient as the sample-weighted mean of the workers' own, each with its own
            dropout; the same but for modules that look across a batch (BatchNorm) or draw random numbers.

    Returns:
        the trainable parameters after each step and, last, after the gradients in flight.
    """
    model, optimizer, schedule = begin(problem, settings)
    trained = [param for param in model.parameters() if param.requires_grad]
    samples = sampler_of(problem, settings, num_workers)
    alone = Sampler(samples.num_samples, samples.global_batch, 1, settings.seed)  # one process with the whole batch
    in_flight: deque[list[Tensor | None]] = deque()
    seen = []

    def update() -> None:
        for param, grad in zip(trained, in_flight.popleft(), strict=True):
            param.grad = grad
        if settings.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()

    for step in range(settings.steps or 0):
        shares = [samples.share(step, rank) for rank in range(num_workers)] if by_share else [alone.share(step, 0)]
        total = sum(len(share) for share in shares)
        optimizer.zero_grad()
        for rank, part in enumerate(shares):
            torch.manual_seed(derive_seed(settings.seed, "dropout", rank, step))
            if len(part):
                (problem.batch_loss(model, fetch(problem.train_data(), part)) * (len(part) / total)).backward()
        in_flight.append([None if param.grad is None else param.grad.to_dense() for param in trained])
        if len(in_flight) > delay:
            update()
        seen.append(flat(trained))
    while in_flight:
        update()
    return [*seen, flat(trained)]


def begin(problem: Problem, settings: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return the model, its optimizer and its schedule (None without one)."""
    torch.manual_seed(derive_seed(settings.seed, "initial-weights"))
    model = problem.model()
    optimizer = (settings.optimizer or problem.optimizer)(
        [param for param in model.parameters() if param.requires_grad]
    )
    return model, optimizer, settings.schedule(optimizer) if settings.schedule else None


def sampler_of(problem: Problem, settings: Settings, num_workers: int) -> Sampler:
    """Return the order of the samples of a run with that many workers."""
    return Sampler(problem.num_samples(), settings.batch_size or problem.batch_size, num_workers, settings.seed)


def flat(parameters: Iterable[Tensor]) -> Tensor:
    """Return the parameters as one vector, in order of registration."""
    return torch.cat([param.detach().reshape(-1) for param in parameters])
