"""Optimizers for large batches, `LARS` and `LAMB`, and their rule for the learning rate.

`optimizer=partial(wb.optimizers.LAMB, lr=0.01)` in `Settings` or `Problem`, or any place that takes a `torch.optim`
optimizer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from workbench.arguments import check_whole, is_number
from workbench.errors import ConfigError
from workbench.schedules import per_update
from workbench.settings import ScheduleFactory


class _Layerwise(torch.optim.Optimizer, ABC):
    """An optimizer that updates each parameter tensor (a layer of the papers) by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients in `.grad`. A parameter without a gradient stays as it is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, self.state[param], group)
        return loss

    @abstractmethod
    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one parameter tensor."""


@final
class LARS(_Layerwise):
    """For each parameter tensor w with gradient g, and momentum m:

        r = eta |w| / (|g| + lambda |w|),   v <- m v + lr r (g + lambda w),   w <- w - v

    r is 1 if w or g is zero, and for a group with `trust_coefficient=None`, which is then SGD with momentum: give
    biases and the weights of normalisations such a group.

    Args:
        params: parameters or groups of them.
        lr: the global learning rate.
        momentum: m.
        weight_decay: lambda.
        trust_coefficient: eta.

    Paper: you2017large, Alg. 1.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([0.0, 10.0])
    >>> LARS([weight], lr=1.0, trust_coefficient=0.5).step()  # r = 0.5 * 5 / 10
    >>> weight.tolist()
    [3.0, 1.5]
    """

    per_parameter: ClassVar[bool] = True  # so it may be called for each bucket: see `check_per_parameter`

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float | None = 0.001,
    ) -> None:
        _check_least(lr=lr, weight_decay=weight_decay)
        _check_below_one(momentum=momentum)
        if trust_coefficient is not None and not (is_number(trust_coefficient) and 0 < trust_coefficient < math.inf):
            raise ConfigError(
                f"trust_coefficient={trust_coefficient!r}: give a finite number above 0, or None for plain SGD"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults)

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        decay, eta = group["weight_decay"], group["trust_coefficient"]
        rate: float | Tensor = 1.0
        if eta is not None:
            weight_norm, grad_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(grad)
            rate = _ratio(eta * weight_norm, grad_norm + decay * weight_norm, (weight_norm, grad_norm))
        update = (grad + decay * param) * (rate * group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        velocity: Tensor = state["momentum_buffer"]
        param.sub_(velocity.mul_(group["momentum"]).add_(update))


@final
class LAMB(_Layerwise):
    """For each parameter tensor w with gradient g, in step t = 1, 2, ...:

        m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g**2
        u = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + lambda w,   w <- w - lr |w| / |u| u

    The factor |w| / |u| is 1 if w or u is zero, and for a group with `trust=False`, which is then AdamW with a decay
    that is not divided: give biases and the weights of normalisations such a group.

    Args:
        params: parameters or groups of them.
        lr: the global learning rate.
        betas: (beta1, beta2).
        eps: added to the root.
        weight_decay: lambda.
        trust: use the factor |w| / |u|.

    Paper: you2019lamb, Alg. 2, with phi(z) = z.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> weight.grad = torch.tensor([2.0, 2.0])
    >>> LAMB([weight], lr=0.5, eps=0.0).step()  # u = (1, 1), |w| / |u| = 5 / sqrt(2)
    >>> [round(value, 4) for value in weight.tolist()]
    [1.2322, 2.2322]
    """

    per_parameter: ClassVar[bool] = True  # so it may be called for each bucket: see `check_per_parameter`

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust: bool = True,
    ) -> None:
        _check_least(lr=lr, eps=eps, weight_decay=weight_decay)
        given: object = betas
        if not (isinstance(given, tuple | list) and len(given) == 2):
            raise ConfigError(f"betas={betas!r}: give two numbers from 0 to below 1, such as (0.9, 0.999)")
        _check_below_one(beta1=betas[0], beta2=betas[1])
        if not isinstance(trust, bool):
            raise ConfigError(f"trust={trust!r}: give True or False")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust": trust})

    def _update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        num_steps = float(state["step"])
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**num_steps)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**num_steps)).div_(root).add_(param, alpha=group["weight_decay"])
        rate: float | Tensor = 1.0
        if group["trust"]:
            weight_norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
            rate = _ratio(weight_norm, update_norm, (weight_norm, update_norm))
        param.sub_(update * (rate * group["lr"]))


def large_batch(
    lr: float, times: float, num_updates: int, *, warmup_updates: int, exponent: float = 0.5, power: float = 1.0
) -> tuple[float, ScheduleFactory]:
    """gamma = lr k**exponent for a batch k times as large; gamma_t rises linearly, then falls as (1 - t/T)**power

    Args:
        lr: the learning rate that suits the small batch.
        times: k.
        num_updates: T, updates of the whole training.
        warmup_updates: updates in which the rate rises from gamma / warmup_updates to gamma.
        exponent: 0.5 is LAMB's square-root rule, 1 the linear rule.
        power: of the decay: 1 is linear to zero, 2 the polynomial of LARS.

    Returns:
        (lr, schedule) for `Settings(lr=..., schedule=...)`.

    Paper: you2019lamb (square-root rule, linear warm-up); you2017large (polynomial decay).

    >>> lr, schedule = large_batch(0.1, 16, 10, warmup_updates=2)
    >>> lr, [schedule.keywords["lr_lambda"](t) for t in (0, 1, 2, 6, 10)]
    (0.4, [0.5, 1.0, 0.8, 0.4, 0.0])

    Raises:
        ConfigError: a number outside its range.
    """
    check_whole("num_updates", num_updates, 1, "the number of updates of the training, 1 or more")
    check_whole("warmup_updates", warmup_updates, 0, "the number of updates with a rising rate, 0 or more")
    if warmup_updates > num_updates:
        raise ConfigError(f"warmup_updates={warmup_updates} of num_updates={num_updates}: give at most num_updates")
    for name, value in (("lr", lr), ("times", times)):
        if not (is_number(value) and 0 < value < math.inf):
            raise ConfigError(f"{name}={value!r}: give a finite number above 0")
    _check_least(exponent=exponent, power=power)
    return lr * times**exponent, per_update(partial(_rise_and_fall, num_updates, warmup_updates, power))


def _rise_and_fall(num_updates: int, warmup_updates: int, power: float, update: int) -> float:
    if update < warmup_updates:
        return (update + 1) / warmup_updates
    return float(max(0.0, 1 - update / num_updates) ** power)


def _ratio(above: Tensor, below: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
    """Return above / below, or 1 if one of the norms is zero; without waiting for a GPU."""
    is_plain = (norms[0] == 0) | (norms[1] == 0)
    return torch.where(is_plain, 1.0, above / torch.where(is_plain, 1.0, below))


def _check_least(**values: object) -> None:
    for name, value in values.items():
        if not (is_number(value) and 0 <= value < math.inf):
            raise ConfigError(f"{name}={value!r}: give a finite number of 0 or more")


def _check_below_one(**values: object) -> None:
    for name, value in values.items():
        if not (is_number(value) and 0 <= value < 1):
            raise ConfigError(f"{name}={value!r}: give a number from 0 to below 1")


__all__ = ["LAMB", "LARS", "large_batch"]
