"""Rank 0's parameters, buffers and extra state, on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.replica.module_state import ModuleState
from workbench.runtimes.execution.endpoint import RankClock
from workbench.runtimes.transport.base import Transport


@torch.no_grad()
def share_tensors(tensors: list[Tensor], transport: Transport, clock: RankClock) -> None:
    """Copy rank 0's tensors to all ranks, as bytes (so of any dtype), in one message."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors or transport.num_workers == 1:
        return
    message = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    transport.broadcast(message, 0, clock.deadline("rank 0's weights and buffers"))
    if transport.rank == 0:
        return
    for tensor, part in zip(tensors, message.split([tensor.nbytes for tensor in tensors]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def share_extra_state(state: ModuleState, transport: Transport, clock: RankClock) -> None:
    """Copy rank 0's extra state of the model to all ranks."""
    if transport.num_workers == 1:
        return
    for packed in state.pack_extra_state():
        deadline = clock.deadline("rank 0's extra state")
        size = torch.tensor([len(packed)], device=transport.device)
        transport.broadcast(size, 0, deadline)
        message = packed.to(transport.device) if transport.rank == 0 else size.new_empty(int(size), dtype=torch.uint8)
        transport.broadcast(message, 0, deadline)
        state.unpack_extra_state(message)


def share_module_state(state: ModuleState, transport: Transport, clock: RankClock) -> None:
    """Copy rank 0's buffers and extra state of the model to all ranks."""
    share_tensors(state.buffers, transport, clock)
    share_extra_state(state, transport, clock)
