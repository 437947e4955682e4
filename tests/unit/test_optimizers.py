"""LARS and LAMB against their formulas in NumPy, as an optimizer of a run, and the rule of large batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from tests.laws import tiny
from tests.laws.reference import serial
from tests.laws.train import train
from workbench.algorithms import ApplyOrder, BackupSGD, LayerwiseSGD, SynchronousSGD
from workbench.errors import ConfigError
from workbench.optimizers import LAMB, LARS, large_batch
from workbench.schedules import rates_of
from workbench.settings import Settings

STEPS = 7
SHAPES = [(3, 4), (5,)]


def draws(seed: int) -> list[list[np.ndarray]]:
    """[parameters, then the gradients of each step]."""
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(shape) for shape in SHAPES] for _ in range(STEPS + 1)]


def stepped(make: Callable[..., torch.optim.Optimizer], **more: Any) -> list[np.ndarray]:
    """Parameters after the steps; the second one in a group with `more`."""
    start, *gradients = draws(0)
    params = [nn.Parameter(torch.from_numpy(value.copy())) for value in start]
    optimizer = make([{"params": params[:1]}, {"params": params[1:], **more}])
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
    return [param.detach().numpy() for param in params]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_is_its_formula(momentum: float, decay: float) -> None:
    """The second tensor is not adapted, and has another learning rate."""
    found = stepped(partial(LARS, lr=0.5, momentum=momentum, weight_decay=decay), trust_coefficient=None, lr=0.01)
    w, *gradients = draws(0)
    v = [np.zeros(shape) for shape in SHAPES]
    for grads in gradients:
        for k, grad in enumerate(grads):
            norm = np.sqrt((w[k] ** 2).sum())
            ratio = 0.001 * norm / (np.sqrt((grad**2).sum()) + decay * norm) if k == 0 else 1.0
            v[k] = momentum * v[k] + (0.5, 0.01)[k] * ratio * (grad + decay * w[k])
            w[k] = w[k] - v[k]
    for one, other in zip(found, w, strict=True):
        assert np.allclose(one, other, rtol=1e-13, atol=0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_its_formula(decay: float) -> None:
    found = stepped(partial(LAMB, lr=0.1, betas=(0.8, 0.95), weight_decay=decay), trust=False)
    w, *gradients = draws(0)
    m, v = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for t, grads in enumerate(gradients, 1):
        for k, grad in enumerate(grads):
            m[k] = 0.8 * m[k] + 0.2 * grad
            v[k] = 0.95 * v[k] + 0.05 * grad**2
            u = m[k] / (1 - 0.8**t) / (np.sqrt(v[k] / (1 - 0.95**t)) + 1e-6) + decay * w[k]
            ratio = np.sqrt((w[k] ** 2).sum() / (u**2).sum()) if k == 0 else 1.0
            w[k] = w[k] - 0.1 * ratio * u
    for one, other in zip(found, w, strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=0)


def test_without_adaptation_they_are_torchs() -> None:
    """SGD with a constant rate, and Adam."""
    ours, theirs = (
        stepped(partial(make, lr=0.1, momentum=0.9, weight_decay=0.01))
        for make in (partial(LARS, trust_coefficient=None), torch.optim.SGD)
    )
    assert all(np.allclose(one, other, rtol=1e-12) for one, other in zip(ours, theirs, strict=True))
    ours, theirs = (stepped(partial(make, lr=0.1, eps=1e-6)) for make in (partial(LAMB, trust=False), torch.optim.Adam))
    assert all(np.allclose(one, other, rtol=1e-10) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_a_zero_tensor_learns_and_one_without_a_gradient_stays(make: Any) -> None:
    weight, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(3)
    optimizer = make([weight, unused], lr=0.1)
    optimizer.step()
    assert bool((weight < -0.09).all()) and bool(weight.isfinite().all())
    assert unused.tolist() == [1, 1] and not optimizer.state[unused]


MAKERS = pytest.mark.parametrize(
    "make", [partial(LARS, lr=0.5, trust_coefficient=0.1, weight_decay=0.01), partial(LAMB, lr=0.02, weight_decay=0.01)]
)
ALGORITHMS = [SynchronousSGD(), LayerwiseSGD(bucket_bytes=200.0, apply=ApplyOrder.ANY), BackupSGD(backups=0, shards=2)]


@MAKERS
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_a_run_takes_them_whole_in_buckets_and_on_servers(make: Any, algorithm: Any) -> None:
    """The parameters of one process with the whole batch, and of a run that was stopped and resumed."""
    how = Settings(steps=6, batch_size=3, optimizer=make, schedule=tiny.step_lr, seed=3, timeout_s=30)
    expected = serial(tiny.problem(), how, 3)[-1]
    unbroken = train("simulated", 3, algorithm, tiny.problem(), how)
    torch.testing.assert_close(unbroken.final, expected, rtol=1e-11, atol=1e-12)
    first = train("simulated", 3, algorithm, tiny.problem(), how, stop_after=2)
    second = train("simulated", 3, algorithm, tiny.problem(), how, resume=first.checkpoint)
    assert torch.equal(second.final, unbroken.final)


def test_the_name_in_a_record() -> None:
    assert wb.optimizers.LAMB is LAMB
    how = Settings(steps=1, optimizer=partial(wb.optimizers.LAMB, lr=0.01))
    assert how.as_record()["optimizer"] == "LAMB(lr=0.01)"


def test_the_name_of_a_schedule_is_equal_in_all_processes() -> None:
    """Ranks compare it before their first step: it must not have a function's address."""
    how = Settings(steps=8, schedule=large_batch(0.1, 4, 8, warmup_updates=2)[1])
    assert how.as_record()["schedule"] == "LambdaLR(lr_lambda=_rise_and_fall(8, 2, 1.0))"


def test_the_rule_of_large_batches() -> None:
    lr, schedule = large_batch(0.1, 4, 8, warmup_updates=2, exponent=1.0, power=2.0)
    expected = [0.2, 0.4, *(0.4 * (1 - t / 8) ** 2 for t in range(2, 8))]
    assert lr == pytest.approx(0.4) and rates_of(lr, schedule, 8) == pytest.approx(expected)
    assert large_batch(0.1, 16, 8, warmup_updates=0)[0] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LARS([nn.Parameter(torch.ones(1))], lr=-1.0), "lr=-1.0: give a finite number of 0 or more"),
        (lambda: LARS([nn.Parameter(torch.ones(1))], momentum=1.0), "from 0 to below 1"),
        (lambda: LARS([nn.Parameter(torch.ones(1))], trust_coefficient=0.0), "or None for plain SGD"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], betas=(0.9, 1.0)), "beta2=1.0: give"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], betas=0.9), r"betas=0.9: give two numbers .* \(0.9, 0.999\)"),  # type: ignore[arg-type]
        (lambda: large_batch(0.1, 0, 8, warmup_updates=1), "times=0: give a finite number above 0"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], lr=math.inf), "lr=inf: give a finite number"),
        (lambda: LAMB([nn.Parameter(torch.ones(1))], trust="no"), "trust='no': give True or False"),  # type: ignore[arg-type]
        (lambda: large_batch(0.1, 2, 8, warmup_updates=9), "give at most num_updates"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()
