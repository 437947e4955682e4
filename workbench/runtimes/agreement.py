"""What ranks must have in common: checked, or sent by rank 0."""

from __future__ import annotations

import json

import torch

from workbench.errors import RankMismatch
from workbench.runtimes.interpreter import Interpreter
from workbench.runtimes.transport import Transport


def check_agreement(lines: list[str], transport: Transport, interpreter: Interpreter) -> None:
    """Raise `RankMismatch` unless every rank describes itself in the same lines; names the first difference."""
    everyone = transport.gather_texts(json.dumps(lines), interpreter.ledger.patience("all ranks to describe their model"))
    reference = json.loads(everyone[0])
    for rank, text in enumerate(everyone):
        theirs = json.loads(text)
        if theirs == reference:
            continue
        pairs = zip([*reference, *["nothing"] * len(theirs)], [*theirs, *["nothing"] * len(reference)], strict=False)
        first = next((ours, other) for ours, other in pairs if ours != other)
        raise RankMismatch(
            f"rank {rank} differs from rank 0: rank 0 has {first[0]!r}, rank {rank} has {first[1]!r}. "
            "Give every rank the same model and settings"
        )


def share_tensors(tensors: list[torch.Tensor], transport: Transport, interpreter: Interpreter) -> None:
    """Rank 0's tensors to all ranks, byte for byte (so of any type) and in one message."""
    if not tensors or transport.num_workers == 1:
        return
    flats = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    message = torch.cat(flats)
    transport.broadcast(message, 0, interpreter.ledger.patience("rank 0's weights and buffers"))
    offset = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            tensor.copy_(message[offset : offset + size].clone().view(tensor.dtype).view(tensor.shape))
        offset += size
