"""A communication hook on a model that another library has wrapped."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.errors import ConfigError
from workbench.runtimes.rank.main import world_here
from workbench.runtimes.user_loop.ddp_hook import DDPHook, ddp_hook

DIVIDED = frozenset({"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine", "PipelineModule"})


def register_hook_on(model: nn.Module, options: dict[str, Any]) -> DDPHook | None:
    """Register `ddp_hook(**options)` on a model. None for the model of a single process, which is not wrapped.

    Raises:
        ConfigError: parameters are divided among ranks, or the model of several ranks is not in torch's
            DistributedDataParallel.
    """
    check_whole_model(model)
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(inner, DistributedDataParallel):
        state, hook = ddp_hook(**options)
        inner.register_comm_hook(state, hook)
        return state
    if isinstance(inner, nn.DataParallel):
        raise ConfigError(
            "the model is in torch's DataParallel, which has no ranks: start one process for each GPU, with torchrun"
        )
    if world_here()[1] > 1:
        raise ConfigError(
            f"the model is a {type(inner).__name__} and not in torch's DistributedDataParallel, whose hook averages the "
            "gradients: give the model that Accelerator.prepare returned, and not the one inside"
        )
    return None


def check_whole_model(model: nn.Module) -> None:
    """Raise `ConfigError` for a model whose parameters are divided among ranks."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in DIVIDED:
                raise ConfigError(
                    f"the model is divided among ranks ({kind.__name__}), and the workbench averages gradients of "
                    "whole models: use torch's DistributedDataParallel (no FSDP, DeepSpeed, tensor or pipeline "
                    "parallelism)"
                )
    if any(type(param).__name__ == "DTensor" or type(param.data).__name__ == "DTensor" for param in model.parameters()):
        raise ConfigError(
            "the model's parameters are DTensors, divided among ranks by FSDP or tensor parallelism, and the workbench "
            "averages gradients of whole models: use torch's DistributedDataParallel"
        )
