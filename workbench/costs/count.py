"""What a model's compute costs, counted and not timed: the multiplications and additions of its layers, without a value computed."""

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
from workbench.problems.base import Problem, fetch


def count_compute(problem: Problem, batch_size: int | None = None, *, flops_per_s: float) -> Compute:
    """Forward and backward of one minibatch on a device that does so many operations a second, and what falls on each parameter.

    A multiplication and an addition are two operations, as vendors count them; those of matrix products and convolutions count and
    nothing else does. Backward is twice forward, for the gradients of inputs and of weights, and once forward for a layer whose
    inputs need none, as the first of a convolutional network's. Shapes alone are looked at, so the largest network takes a moment
    and no memory.

    Args:
        problem: whose model, and the shape of whose data.
        batch_size: samples of a full minibatch; None: the problem's.
        flops_per_s: what the device does in practice, which is less than its data sheet says.

    Raises:
        ConfigError: nothing to count.
    """
    size = batch_size or problem.batch_size
    if size < 1 or not flops_per_s > 0:
        raise ConfigError(f"batch_size={size}, flops_per_s={flops_per_s}: one sample or more, on a device that does something")
    data = problem.train_data()
    num = len(data)  # type: ignore[arg-type]
    batch = _shapes_of(fetch(data, [index % num for index in range(2)]), size)
    with torch.device("meta"):
        model = problem.model()
        if not model.training:  # parts may be frozen (BatchNorm), and stay so
            model.train()
    parameters = [param for _, param in trainable(model)]
    place = {id(param): index for index, param in enumerate(parameters)}
    modules = list(model.modules())
    holders = [[place[id(param)] for param in module.parameters(recurse=False) if id(param) in place] for module in modules]
    called: list[int] = []
    passes: list[int] = []  # of backward over forward, of each call
    done: list[float] = [0.0]
    with FlopCounterMode(display=False) as counter, ExitStack() as stack:

        def note(who: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            called.append(who)
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
        raise ConfigError(f"problem {problem.name}: no matrix product and no convolution in it that could be counted")
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
    """A batch of that many samples, of the same shapes and types, without values."""
    if isinstance(batch, Tensor):
        return torch.empty(size, *batch.shape[1:], dtype=batch.dtype, device="meta")
    if isinstance(batch, tuple | list):
        return type(batch)(_shapes_of(item, size) for item in batch)
    raise ConfigError(f"a batch of {type(batch).__name__}: operations are counted of tensors and tuples of them")
