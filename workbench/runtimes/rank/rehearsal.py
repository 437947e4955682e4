"""Before the first step: what a run writes at its end can be written, read back, and has room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ConfigError, WorkbenchError
from workbench.ops import EndStep
from workbench.program import Algorithm
from workbench.replica.local_training import LocalTraining
from workbench.runtimes.checkpoint.rank_state import random_state, take_checkpoint
from workbench.runtimes.checkpoint.reader import brief_error, read_rank_file, save_rank_file
from workbench.trace.files.append import cannot_write
from workbench.units import MB


def rehearse_files(algorithm: Algorithm, worker: LocalTraining, rank: int, num_ranks: int, folder: Path) -> list[str]:
    """Write this rank's state without its values, read it back, and compare the free space with what is needed.

    Return a note if the run cannot be resumed.

    Raises:
        ConfigError: a checkpoint cannot be written or read back, and `checkpoint_every` asks for some.
        WorkbenchError: the folder cannot be written, or lacks room.
    """
    if rank == 0:
        _check_room(worker, folder)
    saved = take_checkpoint(algorithm, worker.replica, num_ranks, EndStep(-1), {}, worker.sampler)
    saved["random"] = random_state(worker.device)
    path = folder / f".rehearsal-{rank:05d}.pt"
    try:
        with path.open("wb") as file:
            save_rank_file(_without_values(saved), file)
        read_rank_file(path)
    except OSError as error:
        raise cannot_write(folder, error) from error
    except Exception as error:  # pickle and torch raise many
        objects = ", ".join(_objects(saved))
        fault = f"its state cannot be written and read back ({objects or brief_error(error)})"
        if worker.settings.checkpoint_every is None:
            return [f"this run cannot be resumed: {fault}"]
        raise ConfigError(
            f"checkpoint_every={worker.settings.checkpoint_every} asks for checkpoints of this run, and {fault}: keep "
            "only tensors, numbers and strings in a state_dict, or leave checkpoint_every out"
        ) from error
    finally:
        path.unlink(missing_ok=True)
    return []


def _without_values(item: Any) -> Any:
    """The same tree, with tensors of no elements, so that its size does not matter."""
    if isinstance(item, Tensor):
        return torch.empty(0, dtype=item.dtype)
    if isinstance(item, Mapping):
        return {key: _without_values(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_without_values(value) for value in item]
    if type(item) is tuple:
        return tuple(_without_values(value) for value in item)
    return item


def _objects(item: Any, name: str = "state") -> Iterator[str]:
    """Yield the name and the class of each object in a tree that is no tensor, number or string."""
    if isinstance(item, Mapping | list | tuple):
        for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
            yield from _objects(value, f"{name}.{key}")
    elif not isinstance(item, Tensor | str | int | float | None):
        yield f"{name} is a {type(item).__name__}"


def _check_room(worker: LocalTraining, folder: Path) -> None:
    """Raise `WorkbenchError` unless the folder's disk has room for the weights, and for the checkpoints that are kept."""
    settings, model = worker.settings, worker.replica.model
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    model_bytes = sum(tensors.values())
    num_weights = 1 if settings.ema_decay is None else 2
    num_checkpoints = 0 if settings.checkpoint_every is None else settings.keep_checkpoints + 1  # the newest is written
    needed = (num_weights + num_checkpoints) * model_bytes  # the optimizer's state comes in addition
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WorkbenchError(
            f"{folder} has {free / MB:,.0f} MB free, and the run needs at least {needed / MB:,.0f} MB: {num_weights} "
            f"times the weights and {num_checkpoints} checkpoints of {model_bytes / MB:,.0f} MB. Free some space there, "
            "name another run store in WORKBENCH_RUNS, or keep fewer checkpoints (keep_checkpoints, checkpoint_every)"
        )
