"""Small problems in float64, in which a wrong update shows in the first digits and a right one in the sixteenth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.laws.tiny import NUM_CLASSES as NUM_CLASSES
from workbench.laws.tiny import NUM_FEATURES as NUM_FEATURES
from workbench.laws.tiny import adam as adam
from workbench.laws.tiny import data as data
from workbench.laws.tiny import mlp as mlp
from workbench.laws.tiny import momentum as momentum
from workbench.laws.tiny import one_cycle as one_cycle
from workbench.laws.tiny import problem as problem
from workbench.laws.tiny import sgd as sgd
from workbench.laws.tiny import step_lr as step_lr
from workbench.problems.base import Problem


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, NUM_CLASSES)).double()


def batchnorm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)).double()


def frozen_mlp() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


class TiedMLP(nn.Module):
    """One square matrix, used in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.second = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.second.weight = self.first.weight
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class PartlyUsed(nn.Module):
    """`never` is never used; `sometimes` only by a batch with a sample whose first feature is large."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.body = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.sometimes = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, 0] > 1.0
        out = self.body(x)
        if large.any():
            out = out + large[:, None] * self.sometimes(x)
        return out


class ConvNet(nn.Module):
    """Convolutions whose weights lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Tanh())
        self.head = nn.Linear(3 * 2 * 2, NUM_CLASSES)
        self.double()
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(memory_format=torch.channels_last)).flatten(1))


class SparseEmbedding(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.head = nn.Linear(4, NUM_CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


class ManyParameters(nn.Module):
    """Fifty scalars and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(
            [nn.Parameter(torch.full((NUM_FEATURES,) if i % 2 else (), 1.0 + i / 100)) for i in range(48)]
        )
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.head(x)


class Reentrant(nn.Module):
    """A layer used in two reentrant activation checkpoints: its gradient comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.shared = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.head(x)


class FailsAt(nn.Module):
    """The MLP, which on one rank fails in its `step`-th forward in training."""

    def __init__(self, error: BaseException | None, step: int) -> None:
        super().__init__()
        self.body = mlp()
        self.error, self.step, self.count = error, step, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.count == self.step and self.error is not None:
                raise self.error
            self.count += 1
        return self.body(x)


@final
@dataclass(frozen=True)
class Remembered:
    """Makes a model, and keeps the last one made in this process, so that a test can look at it after the run."""

    model: Callable[[], nn.Module]
    last: ClassVar[nn.Module | None] = None

    def __call__(self) -> nn.Module:
        Remembered.last = self.model()
        return Remembered.last


def remembered_state() -> dict[str, Tensor]:
    """Parameters and buffers of the model that was trained last in this process."""
    assert Remembered.last is not None
    return Remembered.last.state_dict()


def images(num_samples: int = 13) -> Problem:
    """(N, 2, 4, 4) pictures for `ConvNet`."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, 2, 4, 4, generator=generator, dtype=torch.float64)
    return problem(ConvNet, train=(x, x.mean((2, 3)).argmax(1) + (x[:, 0, 0, 0] > 1)), test=None)


def words(num_samples: int = 13) -> Problem:
    """(N, 5) word numbers for `SparseEmbedding`."""
    x = torch.randint(11, (num_samples, 5), generator=torch.Generator().manual_seed(3))
    return problem(SparseEmbedding, train=(x, x[:, 0] % NUM_CLASSES), test=None)
