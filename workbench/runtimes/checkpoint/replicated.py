"""State that is equal on all ranks (model, optimizer) is written once, in rank 0's file.

The files of the other ranks have its checksum. It detects a rank with other values: different kinds of machines may
differ in a last bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from workbench.program import Algorithm, Replicas
from workbench.runtimes.checkpoint.files import Checkpoint, CorruptFile
from workbench.runtimes.checkpoint.reader import REPLICATED, as_bytes, leaves, read_rank_file

SUM = "alike"


def is_replicated(algorithm: Algorithm) -> bool:
    """Return True if parameters and optimizer state are equal on all ranks after every step."""
    return algorithm.elasticity.shrinks and algorithm.replicas == Replicas.EVERY_STEP and not algorithm.asynchronous


def without_replicated(saved: dict[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Return a rank's state without what rank 0's file holds: `parameters` (names in the state) and the optimizer."""
    replica = saved["replica"]
    own = {name: value for name, value in replica["model"].items() if name not in parameters}
    kept = {name: value for name, value in replica.items() if name not in REPLICATED}
    return {**saved, "replica": {**kept, "model": own, SUM: _sum_of(replica, parameters)}}


def read_whole_state(checkpoint: Checkpoint, rank: int) -> tuple[dict[str, Any], str]:
    """Return a rank's state, completed from rank 0's file, and a note: "" unless the rank had other values.

    Raises:
        CorruptFile: one of the two files differs from what was written.
    """
    saved = read_rank_file(checkpoint.rank_file(rank))
    if SUM not in saved["replica"]:
        return saved, ""
    first = read_rank_file(checkpoint.rank_file(0))
    if SUM in first["replica"] or rank == 0:
        raise CorruptFile(f"{checkpoint.rank_file(0)} holds no model: it is another rank's file")
    model, own = first["replica"]["model"], saved["replica"]["model"]
    shared = {name: first["replica"][name] for name in REPLICATED}
    kept = {name: value for name, value in saved["replica"].items() if name != SUM}
    equal = [name for name in model if name not in own]
    model.update(own)  # in place: a state dict has the modules' versions as an attribute
    whole = {**saved, "replica": {**kept, **shared, "model": model}}
    same = _sum_of(whole["replica"], equal) == saved["replica"][SUM]
    return (
        whole,
        ""
        if same
        else f"rank {rank}'s parameters or optimizer differed from rank 0's: all ranks continue with rank 0's",
    )


def _sum_of(replica: dict[str, Any], parameters: Collection[str]) -> int:
    """Checksum, 63 bits, of the state that is equal on all ranks."""
    total = 0
    tree = [
        [value for name, value in replica["model"].items() if name in parameters],
        *(replica[name] for name in REPLICATED),
    ]
    for leaf in leaves(tree):
        for value in byte_sums(leaf) if isinstance(leaf, Tensor) else (zlib.crc32(leaf),):
            total = (total * 1_000_003 + value) % 2**63
    return total


def byte_sums(tensor: Tensor) -> tuple[int, int]:
    """Return two sums of a tensor's memory, computed on its device. Equal values have equal sums."""
    octets = as_bytes(tensor)
    whole = octets.numel() // 8 * 8
    if octets.storage_offset() % 8:
        octets = octets.clone()
    # Sums modulo 2^64 do not depend on the order.
    return int(octets[:whole].view(torch.int64).sum()), int(octets[whole:].sum(dtype=torch.int64))
