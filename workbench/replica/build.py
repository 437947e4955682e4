"""A rank's replica, made of a method, a problem and settings."""

from __future__ import annotations

import torch
from torch import nn

from workbench.errors import ConfigError
from workbench.gradients import build_layout, trainable
from workbench.problems.base import Problem
from workbench.program import Algorithm
from workbench.replica.optimizer_step import uncompiled
from workbench.replica.replica import Replica
from workbench.replica.server_copy import Master
from workbench.rng import derive_seed
from workbench.settings import Settings


def build_replica(algorithm: Algorithm, problem: Problem, settings: Settings, device: torch.device) -> Replica:
    """The problem's model with its optimizer, laid out as the method wants it; nothing that the method cannot honour is let in."""
    torch.manual_seed(derive_seed(settings.seed, "initial-weights"))
    model = problem.model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"problem {problem.name}: model() made a {type(model).__name__}, not an nn.Module")
    model = model.to(device)
    named = trainable(model)
    build_layout(named)  # refuses what cannot be trained before the optimizer does in words of its own
    _check_servers(algorithm, settings)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        with uncompiled():
            optimizer = (settings.optimizer or problem.optimizer)(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                "optimizer= takes a function from parameters to a torch.optim optimizer, such as functools.partial(torch.optim.SGD, lr=0.1)"
            )
        if settings.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = settings.lr
        return optimizer

    replica = Replica(
        model,
        make_optimizer([param for _, param in named]),
        bucket_bytes=algorithm.bucket_bytes,
        num_buckets=algorithm.num_buckets,
        schedule=settings.schedule,
        clip_norm=settings.clip_norm,
        precision=settings.precision,
        applies_buckets=algorithm.applies_buckets,
    )
    more = {"schedule": settings.schedule, "ema_decay": settings.ema_decay}
    replica.make_master = lambda: Master(replica.parameters, replica.layout, make_optimizer, **more)  # type: ignore[arg-type]
    if settings.ema_decay is not None and not algorithm.has_servers:
        replica.keep_average(settings.ema_decay)
    return replica


def _check_servers(algorithm: Algorithm, settings: Settings) -> None:
    """What settings a method with servers cannot honour."""
    if algorithm.has_servers and settings.clip_norm is not None:
        raise ConfigError(
            "clip_norm clips the mean gradient, which no rank of this method sees: give the method a clip_norm where it has one"
        )
    if algorithm.has_servers and settings.precision == "fp16":
        raise ConfigError("fp16 loss scaling must see the summed gradient before it is applied, which servers do: use precision='bf16'")
    split = getattr(algorithm, "shards", 1) > 1 or getattr(algorithm, "dedicated", False)
    if algorithm.has_servers and settings.ema_decay is not None and split:
        raise ConfigError("ema_decay: rank 0 evaluates the average and must hold all of it: use shards=1 and dedicated=False")
