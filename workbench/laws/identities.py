"""Limiting cases that are plain SGD: one worker, and unequal batches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from workbench.laws import tiny
from workbench.laws.counts import is_plain, runs_alone
from workbench.laws.sentences import NotTried, assert_near, name_of
from workbench.laws.serial import serial
from workbench.laws.training import train_simulated
from workbench.problems.base import Problem
from workbench.program import Algorithm, Update
from workbench.settings import Settings

ROUNDING = 1e-11


def check_one_worker(algorithm: Algorithm, _: int) -> None:
    """On one rank, an algorithm that applies mean gradients without delay is SGD in one process, with momentum."""
    if algorithm.update != Update.MEAN:
        raise NotTried(f"update is {algorithm.update.name}: one rank need not be plain SGD")
    if algorithm.max_staleness != 0 or algorithm.asynchronous or algorithm.depends_on_timing:
        raise NotTried("gradients may be late: one rank need not be plain SGD")
    if not is_plain(algorithm):
        raise NotTried("it does not run on one rank, or is not plain SGD there (a momentum or a period of its own)")
    problem, law = tiny.problem(test=None), f"{name_of(algorithm)}: one worker is SGD in one process"
    for steps in (1, 2, 5, 8):  # at a step's end an update may be in flight, and at the run's end none is
        settings = Settings(steps=steps, batch_size=3, optimizer=tiny.momentum, schedule=tiny.step_lr, evaluate_every=0)
        found, expected = train_simulated(1, algorithm, problem, settings).final, serial(problem, settings, 1)[-1]
        assert_near(law, found, expected, ROUNDING, f"on rank 0 of 1, at the end of a run of {steps} steps")


class Sum(nn.Module):
    """<w, x>: a gradient that does not depend on the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.first, self.second])


def mean_output(output: Tensor, _: Tensor) -> Tensor:
    """Return the loss: the mean over the batch."""
    return output.mean()


def check_unequal_batches(algorithm: Algorithm, num_ranks: int) -> None:
    """An update is the mean over all samples, if the ranks' batches have unequal sizes or none.

    The loss is linear, so when a gradient is applied does not matter: the sum of all is compared.
    """
    if algorithm.update != Update.MEAN or algorithm.asynchronous or algorithm.depends_on_timing:
        raise NotTried(f"update is {algorithm.update.name}, or timing matters: a mean over samples is not promised")
    if runs_alone(algorithm) and not is_plain(algorithm):
        raise NotTried("it has a momentum or a period of its own: no sum of mean gradients is expected")
    num_samples = 4 * num_ranks + 5  # an epoch's second batch is short, and some ranks have none of it
    x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64) + 1.0
    problem = Problem(model=Sum, loss=mean_output, train=(x, torch.zeros(num_samples)), test=None, name="linear")
    law = f"{name_of(algorithm)}: an update is the mean over the samples of all ranks"
    for steps in range(1, 7):
        sgd = partial(torch.optim.SGD, lr=0.5)
        settings = Settings(steps=steps, batch_size=4, optimizer=sgd, evaluate_every=0)
        trained = train_simulated(num_ranks, algorithm, problem, settings)
        expected = serial(problem, settings, num_ranks)[-1]
        for rank, seen in enumerate(trained.parameters):
            where = f"on rank {rank} of {num_ranks}, at the end of a run of {steps} steps"
            assert_near(law, seen[-1], expected, ROUNDING, where)
