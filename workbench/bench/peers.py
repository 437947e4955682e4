"""The peers: one training step of other programs, with their best settings. Only the loop is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]
LR = 1e-3


def ddp_step(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    bucket_mib: float,
    hook: tuple[Any, Any] | None = None,
    *,
    lr: float = LR,
) -> Step:
    """Return a step of torch DDP with gradients as views of its buckets and a static graph.

    Args:
        hook: state and function of a communication hook to register.
    """
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, static_graph=True)
    if hook is not None:
        wrapped.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()

    return step


def fp16_hook() -> tuple[Any, Any]:
    """Return DDP's hook that sums 16-bit floating-point numbers."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return None, default_hooks.fp16_compress_hook


def power_sgd_hook(rank: int) -> tuple[Any, Any]:
    """Return DDP's PowerSGD hook with error feedback and warm start.

    The hook compresses from its third step on, because DDP reorders its buckets before that. Use it with one bucket:
    with several buckets, ranks start their second sums in different orders, and gloo aborts.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=3
    ), powerSGD_hook.powerSGD_hook


def flat_step(model: nn.Module, loss: Callable[[nn.Module], Tensor], all_reduce: Callable[[Tensor], object]) -> Step:
    """Return a step of a hand-written loop: gradients are views of one buffer, which is averaged after backward."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)
    begin = 0
    for parameter in parameters:
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    optimizer = torch.optim.SGD(parameters, lr=LR)

    def step() -> None:
        flat.zero_()
        loss(model).backward()
        all_reduce(flat)
        optimizer.step()

    return step


def gloo_mean(flat: Tensor) -> None:
    """Average over ranks by the all-reduce of torch.distributed's default group."""
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())


def gloo_sum(flat: Tensor) -> None:
    """Sum over ranks by the all-reduce of torch.distributed's default group."""
    dist.all_reduce(flat)


def mpi_sum() -> Callable[[Tensor], object]:
    """Return a function that sums in place by mpi4py's `Allreduce`; a GPU's values go through the host's pinned memory."""
    from mpi4py import MPI

    hosts: dict[int, tuple[Tensor, Any]] = {}  # the tensor that MPI sums, and NumPy's view of it

    def total(flat: Tensor) -> None:
        if flat.data_ptr() not in hosts:
            host = torch.empty_like(flat, device="cpu", pin_memory=True) if flat.is_cuda else flat
            hosts[flat.data_ptr()] = host, host.numpy()
        host, view = hosts[flat.data_ptr()]
        if flat.is_cuda:
            host.copy_(flat)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, view)
        if flat.is_cuda:
            flat.copy_(host)

    return total


def mpi_mean() -> Callable[[Tensor], object]:
    """Return a function that averages in place by mpi4py's `Allreduce`."""
    from mpi4py import MPI

    total = mpi_sum()

    def mean(flat: Tensor) -> None:
        total(flat)
        flat.div_(MPI.COMM_WORLD.Get_size())

    return mean


def slowest_here(
    runtime: str, device: torch.device = torch.device("cpu")
) -> tuple[Callable[[], object], Callable[[float], float]]:
    """Return the library's own barrier, and the maximum over ranks."""
    if runtime == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        return world.Barrier, lambda number: float(world.allreduce(number, MPI.MAX))

    def largest(number: float) -> float:
        word = torch.tensor([number], dtype=torch.float64, device=device)
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return float(word)

    return dist.barrier, largest
