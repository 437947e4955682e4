"""What collectives remember from step to step in `Context.memory`, and what of it holds where other ranks go on."""

from __future__ import annotations

from torch import Tensor

ONCE_RESIDUAL, LOW_RANK_RESIDUAL = "once.residual", "low-rank.residual"  # what was left out of this rank's own values
ONCE_OWNER = "once.owner"  # what a codec left out of the sum of the block that is this rank's where there are so many


def forget_blocks(memory: dict[str, Tensor]) -> None:
    """There is another number of ranks from here on: blocks are cut elsewhere."""
    for name in [name for name in memory if name.startswith(ONCE_OWNER)]:
        del memory[name]


def of_all_ranks(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is the same on all ranks, as one that comes later must have it: the factors that a low-rank sum starts from, counts."""
    own = (ONCE_RESIDUAL, LOW_RANK_RESIDUAL, ONCE_OWNER)
    return {name: value for name, value in memory.items() if not name.startswith(own)}
