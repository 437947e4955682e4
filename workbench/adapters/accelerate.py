"""Collectives and codecs in a loop of Hugging Face's accelerate.

For a whole algorithm (Pipe-SGD, local SGD, servers), give accelerate the data and a `workbench.Trainer` the model:

    loader = accelerator.prepare(loader)
    with workbench.Trainer(model, optimizer, workbench.PipeSGD(width=2)) as trainer:
        for x, y in loader:
            trainer.step(lambda: loss_fn(model(x), y))
"""

from __future__ import annotations

from typing import Any

from torch import nn

from workbench.adapters.hooks import register_hook_on
from workbench.runtimes.user_loop.ddp_hook import DDPHook


def register_hook(model: nn.Module, **options: Any) -> DDPHook | None:
    """Average this model's gradients with the workbench: `workbench.ddp_hook(**options)`.

    Call it on every rank, with the model that `Accelerator.prepare` returned, before the first backward. Out of scope:
    FSDP, DeepSpeed, tensor and pipeline parallelism.

    Args:
        options: those of `ddp_hook`, such as `codec=Truncate16()` or `collective=PowerSGD(start_step=2)`.

    Returns:
        The hook's state; with error feedback or PowerSGD its `state_dict()` belongs to a checkpoint, on every rank.
        None with one process, which has nothing to average.

    Raises:
        ConfigError: the model is divided among ranks.

    Example:
        >>> register_hook(nn.Linear(2, 1))  # one process: accelerate does not wrap the model
    """
    return register_hook_on(model, options)
