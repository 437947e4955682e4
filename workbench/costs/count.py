"""Count a model's compute: the multiplications and additions of its layers, without computing a value."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from workbench.costs.compute import Compute
from workbench.costs.measure import _of_forward
from workbench.errors import ConfigError
from workbench.gradients import trainable
from workbench.problems.base import Problem


def count_compute(problem: Problem, batch_size: int | None = None, *, flops_per_s: float) -> Compute:
    """Count operations: return forward and backward of a minibatch, and each parameter's share, at a device's rate.

    A multiplication and an addition are two operations, as vendors count them. Only matrix products and convolutions
    count. Backward is twice forward, for the gradients of inputs and of weights. It is once forward for a layer whose
    inputs need no gradient, such as the first of a convolutional network. Only shapes are used, so the largest
    network takes little time and no memory.

    Args:
        problem: the problem with the model and the shape of the data.
        batch_size: samples of a full minibatch; None: the problem's.
        flops_per_s: the device's practical rate, which is below its data sheet.

    Raises:
        ConfigError: there is nothing to count.
    """
    size = batch_size or problem.batch_size
    if size < 1 or not flops_per_s > 0:
        raise ConfigError(f"batch_size={size}, flops_per_s={flops_per_s}: both must be above 0")
    batch = _shapes_of(problem.train_source().some(2), size)
    with torch.device("meta"):
        model = problem.model()
        if not model.training:  # frozen parts (BatchNorm) stay frozen
            model.train()
    parameters = [param for _, param in trainable(model)]
    place = {id(param): index for index, param in enumerate(parameters)}
    modules = list(model.modules())
    holders = [
        [place[id(param)] for param in module.parameters(recurse=False) if id(param) in place] for module in modules
    ]
    called: list[int] = []
    passes: list[int] = []  # cost of backward divided by cost of forward, for each call
    done: list[float] = [0.0]
    with FlopCounterMode(display=False) as counter, ExitStack() as stack:

        def note(call: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            called.append(call)
            given = [item.requires_grad for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
            passes.append(1 if given and not any(given) else 2)
            done.append(float(counter.get_total_flops()))

        for number, module in enumerate(modules):
            if holders[number]:
                stack.callback(module.register_forward_pre_hook(partial(note, number), with_kwargs=True).remove)
        problem.batch_loss(model, batch)
        done.append(float(counter.get_total_flops()))
    shares = _of_forward(called, done, holders, parameters)
    if shares is None:
        raise ConfigError(f"problem {problem.name}: it has no matrix product and no convolution to count")
    total_s = done[-1] / flops_per_s
    back = np.cumsum(np.diff([done[0], *done[2:]]) * passes)
    backward_shares = _of_forward(called, [0.0, 0.0, *back.tolist()], holders, parameters)
    assert backward_shares is not None
    return Compute(
        forward_s=total_s,
        backward_s=float(back[-1]) / flops_per_s,
        forward_shares=tuple(shares.tolist()),
        backward_shares=tuple(backward_shares.tolist()),
    )


def _shapes_of(batch: Any, size: int) -> Any:
    """Return a batch with this number of samples, of equal shapes and types, without values."""
    if isinstance(batch, Tensor):
        return torch.empty(size, *batch.shape[1:], dtype=batch.dtype, device="meta")
    if isinstance(batch, tuple | list):
        return type(batch)(_shapes_of(item, size) for item in batch)
    raise ConfigError(f"a batch of {type(batch).__name__}: operations are counted for tensors and tuples of them")
