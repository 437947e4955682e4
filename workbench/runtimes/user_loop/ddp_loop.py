"""A plain loop of torch's DistributedDataParallel on the ranks of any launcher, to compare algorithms with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from workbench.runtimes.rank.main import world_here
from workbench.runtimes.transport.base import pick_device
from workbench.runtimes.transport.torch_distributed import backend_of, join_process_group
from workbench.runtimes.user_loop.ddp_hook import ddp_hook
from workbench.units import MIB


@contextmanager
def process_group(store: str, timeout_s: float = 120.0) -> Iterator[tuple[int, int]]:
    """(rank, number of ranks) of torch.distributed's default group.

    It is made by a shared file, and destroyed, if there is none.

    Args:
        store: a path that all ranks share and that no group has used before.
    """
    made = join_process_group(*world_here(), store, timeout_s)
    try:
        yield world_here()
    finally:
        if made:
            dist.destroy_process_group()


def ddp_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module], Tensor],
    *,
    bucket_bytes: float,
    hooked: bool = False,
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A step of DDP as in torch's manual, and a function to call at the end.

    Args:
        loss: wrapped model -> this rank's loss.
        bucket_bytes: size of DDP's buckets.
        hooked: average with `ddp_hook`.
    """
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / MIB, gradient_as_bucket_view=not hooked)
    close: Callable[[], Any] = int
    if hooked:
        state, hook = ddp_hook()
        wrapped.register_comm_hook(state, hook)
        close = getattr(state, "close", int)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()

    return step, close


def device_here(rank: int) -> torch.device:
    """Device of this rank's model: its GPU if the group's backend is NCCL, else the CPU."""
    return pick_device(rank) if backend_of(None) == "nccl" else torch.device("cpu")


def together(seconds: float) -> float:
    """The largest seconds of all ranks, which wait for each other."""
    took = torch.tensor([seconds], dtype=torch.float64, device=device_here(dist.get_rank()))
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def barrier(timeout_s: float = 120.0) -> None:
    """Wait until all ranks are here."""
    dist.monitored_barrier(timeout=timedelta(seconds=timeout_s)) if dist.get_backend() == "gloo" else dist.barrier()
