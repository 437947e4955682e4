"""A small problem in float64, in which a wrong update shows in the first digits and a right one in the sixteenth."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workbench.problems.base import Problem

NUM_FEATURES, NUM_CLASSES = 6, 3


def data(num_samples: int = 23, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(N, 6) features and (N,) labels that a linear model can partly tell."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_samples, NUM_CLASSES, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x[:, :NUM_CLASSES] + 0.5 * noise).argmax(1)


def mlp() -> nn.Module:
    """Six tensors of 107 numbers; no two layers of one shape."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES)
    ).double()


def problem(model: Any = mlp, num_samples: int = 23, **changes: Any) -> Problem:
    """23 samples of classification: with 2 to 4 workers and a batch of 3 or 4, the last batch of an epoch is short."""
    train, test = data(num_samples), data(9, seed=1)
    return Problem(
        **{
            "model": model,
            "loss": cross_entropy,
            "train": train,
            "test": test,
            "name": "tiny",
            "batch_size": 4,
            **changes,
        }
    )


sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
adam = partial(torch.optim.Adam, lr=0.01)
step_lr = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)
one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=40)
