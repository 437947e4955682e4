"""A problem of which some samples spoil the gradient of one parameter, wherever and whenever they are drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.laws import tiny
from workbench.problems.base import Problem, Sampler
from workbench.program import Algorithm
from workbench.settings import Settings

TENSOR = "body.2.weight"
MARKED = 100.0  # of a sample's first feature: the layers saturate, and the loss stays finite
SAMPLES = (4, 17)  # that are marked


class _Spoil(torch.autograd.Function):
    """The identity, whose gradient's first value is another."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: float) -> Tensor:
        ctx.value = value
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spoilt = grad.clone()
        spoilt.view(-1)[0] = ctx.value
        return spoilt, None


class Spoilt(nn.Module):
    """The MLP, one of whose gradients is spoilt by a batch with a marked sample."""

    def __init__(self, value: float, name: str = TENSOR) -> None:
        super().__init__()
        self.body = tiny.mlp()
        self.value, self.name = value, name.removeprefix("body.")

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((x[:, 0] == MARKED).any()):
            spoilt = _Spoil.apply(self.body.get_parameter(self.name), self.value)
            return functional_call(self.body, {self.name: spoilt}, (x,))
        return self.body(x)


def problem(value: float = float("nan"), samples: tuple[int, ...] = SAMPLES, **changes: Any) -> Problem:
    x, y = tiny.data()
    x[list(samples), 0] = MARKED
    return tiny.problem(partial(Spoilt, value), train=(x, y), **changes)


def drawn(
    algorithm: Algorithm, settings: Settings, num_ranks: int, samples: tuple[int, ...] = SAMPLES
) -> set[tuple[int, int]]:
    """(step, rank) of each minibatch that holds a marked sample."""
    sampler = Sampler(23, settings.batch_size or 4, algorithm.roles(num_ranks).num_computing, settings.seed)
    assert settings.steps is not None
    return {
        (step, rank)
        for step in range(settings.steps)
        for rank in range(sampler.num_workers)
        if set(samples) & set(sampler.share(step, rank).tolist())
    }
