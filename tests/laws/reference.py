"""The oracles: one process in plain PyTorch (`workbench/laws/serial.py`), and torch's DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from workbench.laws.serial import begin, flat, sampler_of
from workbench.laws.serial import serial as serial
from workbench.problems.base import Problem
from workbench.problems.loading import fetch
from workbench.settings import Settings


def ddp(problem: Problem, settings: Settings) -> list[Tensor]:
    """On each rank of a torch.distributed group: the same with torch's DistributedDataParallel, which gives every rank equal weight."""
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    model, optimizer, _ = begin(problem, settings)
    wrapped = DistributedDataParallel(model)
    samples = sampler_of(problem, settings, num_workers)
    seen = []
    for step in range(settings.steps or 0):
        optimizer.zero_grad()
        problem.batch_loss(wrapped, fetch(problem.train_data(), samples.share(step, rank))).backward()
        optimizer.step()
        seen.append(flat(model.parameters()))
    return [*seen, seen[-1]]
