"""What all ranks of a method hold alike lies once in a checkpoint: in rank 0's part. The parts of the others hold a sum of it.

So the model and the optimizer's state are written once and not by each rank. Where a rank held others all the same (machines of two kinds
may differ in a last bit), the sum tells.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from workbench.program import Algorithm, Replicas
from workbench.runtimes.checkpoint.files import Checkpoint, Damaged
from workbench.runtimes.checkpoint.reader import AND_ALIKE, leaves, octets_of, read_part

SUM = "alike"


def holds_alike(algorithm: Algorithm) -> bool:
    """Whether the replica of one rank is that of all, parameters and optimizer, behind every step."""
    return algorithm.elasticity.shrinks and algorithm.replicas == Replicas.EVERY_STEP and not algorithm.asynchronous


def without_alike(saved: dict[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """A rank's part (`take_checkpoint`) without what rank 0's holds: `parameters`, by their names in the model's state, and optimizer."""
    replica = saved["replica"]
    own = {name: value for name, value in replica["model"].items() if name not in parameters}
    kept = {name: value for name, value in replica.items() if name not in AND_ALIKE}
    return {**saved, "replica": {**kept, "model": own, SUM: _sum_of(replica, parameters)}}


def whole_part(checkpoint: Checkpoint, rank: int) -> tuple[dict[str, Any], str]:
    """A rank's part with what rank 0's holds for it, and a word where the rank held others; else "".

    Raises:
        Damaged: one of the two files is not what was written.
    """
    saved = read_part(checkpoint.part(rank))
    if SUM not in saved["replica"]:
        return saved, ""
    first = read_part(checkpoint.part(0))
    if SUM in first["replica"] or rank == 0:
        raise Damaged(f"{checkpoint.part(0)} holds no model: it is another rank's part")
    model, own = first["replica"]["model"], saved["replica"]["model"]
    shared = {name: first["replica"][name] for name in AND_ALIKE}
    kept = {name: value for name, value in saved["replica"].items() if name != SUM}
    alike = [name for name in model if name not in own]
    model.update(own)  # in place: what a module says of its versions is an attribute
    whole = {**saved, "replica": {**kept, **shared, "model": model}}
    same = _sum_of(whole["replica"], alike) == saved["replica"][SUM]
    return whole, "" if same else f"rank {rank}'s parameters or optimizer were not rank 0's: all ranks go on with rank 0's"


def _sum_of(replica: dict[str, Any], parameters: Collection[str]) -> int:
    """Of the bits of what all ranks hold alike; 63 of them."""
    total = 0
    tree = [[value for name, value in replica["model"].items() if name in parameters], *(replica[name] for name in AND_ALIKE)]
    for leaf in leaves(tree):
        for value in _sums(leaf) if isinstance(leaf, Tensor) else (zlib.crc32(leaf),):
            total = (total * 1_000_003 + value) % 2**63
    return total


def _sums(tensor: Tensor) -> tuple[int, int]:
    octets = octets_of(tensor)
    whole = octets.numel() // 8 * 8
    if octets.storage_offset() % 8:
        octets = octets.clone()
    return int(octets[:whole].view(torch.int64).sum()), int(octets[whole:].sum(dtype=torch.int64))  # adds modulo 2^64, in any order
