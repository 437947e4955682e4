"""The trained weights in a run's folder: written at its end, as safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

State = dict[str, Any]  # name -> tensor
WEIGHTS, AVERAGED = "model.safetensors", "model-average.safetensors"
OLD_WEIGHTS = "model.pt"  # of runs before 26 November 2026


def write_weights(folder: Path, weights: Mapping[str, State]) -> None:
    """Write weights into a run's folder: file (`WEIGHTS`, `AVERAGED`) -> tensors by name."""
    from safetensors.torch import save_file

    for file, state in weights.items():
        save_file(state, folder / file)


def copy_weights(source: Path, target: Path) -> None:
    """Copy the weights in a run's folder, if it has any, into another run's folder."""
    for file in (WEIGHTS, AVERAGED, OLD_WEIGHTS):
        if (source / file).exists():
            shutil.copyfile(source / file, target / file)


def read_weights(folder: Path, file: str = WEIGHTS) -> State | None:
    """Return the weights in a run's folder; None if it has none. Tensors are on the CPU."""
    if (folder / file).exists():
        from safetensors.torch import load_file

        return dict(load_file(folder / file))
    if file == WEIGHTS and (folder / OLD_WEIGHTS).exists():
        import torch

        return dict(torch.load(folder / OLD_WEIGHTS, weights_only=True, map_location="cpu"))
    return None
