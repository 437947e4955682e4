"""Learning-rate rules of the papers: an initial learning rate and a factory for `Settings(lr=..., schedule=...)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite

from torch import zeros
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from workbench.errors import ConfigError
from workbench.settings import ScheduleFactory


def per_update(factor: Callable[[int], float]) -> ScheduleFactory:
    """Return a schedule from a function: number of updates -> factor of the initial learning rate.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    >>> schedule = per_update(lambda t: 0.5**t)(optimizer)
    >>> optimizer.step(); schedule.step(); optimizer.param_groups[0]["lr"]
    0.25
    """
    return partial(LambdaLR, lr_lambda=factor)


def synchronous(
    num_workers: int, num_samples: int, batch_size: int, *, lr: float = 0.045, decay: float = 0.94
) -> tuple[float, ScheduleFactory]:
    """gamma_0 = lr N,   gamma_t = gamma_0 decay^(t N / (2 T)),   T = num_samples / batch_size: times `decay` every two epochs

    Args:
        num_workers: N, gradients in an update (backup workers do not count).
        batch_size: B, samples of a worker in a step.

    Paper: chen2016revisiting, A.2 and A.3 (lr 0.045, decay 0.94).

    >>> lr, _ = synchronous(100, 1_281_167, 32)
    >>> round(lr, 6)
    4.5
    """
    _check(num_workers=num_workers, num_samples=num_samples, batch_size=batch_size, lr=lr, decay=decay)
    return lr * num_workers, per_update(partial(_exponential, decay, num_workers * batch_size / (2 * num_samples)))


def asynchronous(
    num_samples: int, batch_size: int, *, lr: float = 0.045, decay: float = 0.94
) -> tuple[float, ScheduleFactory]:
    """gamma_0 = lr,   gamma_t = gamma_0 decay^(t / (2 T)),   T = num_samples / batch_size: an update uses one worker's gradient

    Paper: chen2016revisiting, A.2 and A.3.

    >>> asynchronous(1000, 10)[0]
    0.045
    """
    return synchronous(1, num_samples, batch_size, lr=lr, decay=decay)


def linear_to_zero(num_updates: int, last: int) -> ScheduleFactory:
    """Constant, then linear to zero over the `last` of `num_updates` updates.

    Paper: chen2016revisiting, section 2 (injected staleness: 25 epochs at 0.1, to 0 over the last 10).

    >>> factor = linear_to_zero(10, 4).keywords["lr_lambda"]
    >>> [factor(t) for t in (0, 6, 8, 10)]
    [1.0, 1.0, 0.5, 0.0]
    """
    _check(num_updates=num_updates, last=last)
    if last > num_updates:
        raise ConfigError(f"last={last} of num_updates={num_updates}: give at most num_updates")
    return per_update(partial(_line, num_updates, last))


def rates_of(lr: float, schedule: ScheduleFactory, num_updates: int) -> list[float]:
    """Return the learning rate of each update, as a torch optimizer with this schedule has it.

    >>> rates_of(0.5, per_update(lambda t: 0.5**t), 3)
    [0.5, 0.25, 0.125]
    """
    optimizer = SGD([Parameter(zeros(1))], lr=lr)
    rule = schedule(optimizer)
    found = []
    for _ in range(num_updates):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        rule.step()
    return found


def _exponential(decay: float, per_step: float, update: int) -> float:
    return float(decay ** (update * per_step))


def _line(num_updates: int, last: int, update: int) -> float:
    return min(1.0, max(0.0, (num_updates - update) / last))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise ConfigError(f"{name}={value!r}: give a number above 0")


__all__ = ["asynchronous", "linear_to_zero", "per_update", "rates_of", "synchronous"]
