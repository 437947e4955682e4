"""Pack a rank's state at a step's end into a tree of tensors and plain values, and restore it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import EndStep, State, Ticket
from workbench.problems.base import Sampler
from workbench.program import Algorithm, Context, Restart, complete, fields_of
from workbench.replica.replica import Replica
from workbench.replica.server_copy import ServerCopy


def take_checkpoint(
    algorithm: Algorithm,
    replica: Replica,
    num_workers: int,
    end: EndStep,
    memory: Mapping[str, Tensor],
    sampler: Sampler | None = None,
) -> dict[str, Any]:
    """Return all that is needed to continue after this step, as values that `torch.load(weights_only=True)` reads.

    The tickets of the program's state must be complete. The tensors share the replica's memory, so copy or save them
    before training continues. Gradients in flight are left out if timing decides which gradients are in flight
    (`Restart.FROM_PARAMETERS`).
    """
    return {
        "step": end.step,
        "algorithm": type(algorithm).__name__,
        "num_workers": num_workers,
        "layout": _layout_of(replica),
        "replica": replica.state(),
        "program": pack_state(None if algorithm.restart == Restart.FROM_PARAMETERS else end.state),
        "memory": dict(memory),
        "data": None if sampler is None else position_of(sampler, end.step),
    }


def position_of(sampler: Sampler, step: int) -> dict[str, Any]:
    """Position in the data after a step."""
    return {
        "samples": sampler.samples_before(step + 1),
        "global_batch": sampler.global_batch,
        "origin": list(sampler.origin),
    }


def resume(saved: dict[str, Any], algorithm: Algorithm, replica: Replica, ctx: Context) -> None:
    """Set replica and context to a checkpoint's state.

    The algorithm's settings may differ, but not the layout of gradients.

    Raises:
        ConfigError: the checkpoint is of another algorithm, number of ranks, model or bucket size.
    """
    now = {"algorithm": type(algorithm).__name__, "num_workers": ctx.num_workers, "layout": _layout_of(replica)}
    names = {"algorithm": "algorithm", "num_workers": "number of ranks", "layout": "model, or with another bucket size"}
    for key, value in now.items():
        if saved[key] != value:
            what = "" if key == "layout" else f": {saved[key]!r}, and not {value!r}"
            raise ConfigError(f"the stopped run cannot be resumed with another {names[key]}{what}")
    replica.load(saved["replica"])
    if saved["replica"]["average"] is None:
        begin_average(replica)
    if (server := saved["replica"]["master"]) is not None and server["average"] is None:
        begin_average(replica.server_copy)
    ctx.first_step, ctx.resumed = saved["step"] + 1, unpack_state(saved["program"], algorithm, replica)
    ctx.memory.update({name: placed(value, replica.layout.device).clone() for name, value in saved["memory"].items()})


def begin_average(model: Replica | ServerCopy) -> None:
    """Begin the moving average, if one is kept, at the present parameters. Call it after they were replaced."""
    if model.average is not None:
        model.average.load([param.detach() for param in model.parameters])


def continue_from_state(ctx: Context, end: EndStep) -> None:
    """Set the context of a program that begins after this step, in the same run.

    The tickets of the state must be complete.
    """
    ctx.first_step, ctx.resumed = end.step + 1, complete(end.state)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the random generators that a problem's code may use: torch's, Python's, NumPy's.

    All other random numbers depend only on seed, step and rank.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - its state is saved, nothing is drawn
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, list(words), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def restore_random_state(saved: dict[str, Any], device: torch.device) -> None:
    """Set the generators to `random_state`."""
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002 - the generator that user code uses


def placed(value: Any, device: torch.device) -> Any:
    """A value of a checkpoint, moved to the device; integer counters stay on the host."""
    return value.to(device) if isinstance(value, Tensor) and value.is_floating_point() else value


def _layout_of(replica: Replica) -> list[str]:
    return [*replica.layout.describe(), f"{replica.layout.numel} elements"]


def _check_gradient(value: dict[str, Any], replica: Replica) -> None:
    """Raise `ValueError` unless the gradient has this replica's length: a shorter one would be broadcast."""
    bucket = value["bucket"]
    piece = None if bucket is None else replica.layout.buckets[bucket]
    numel = replica.layout.numel if piece is None else piece.stop - piece.start
    if value["flat"].shape != (numel,):
        raise ValueError(f"a gradient in flight has shape {tuple(value['flat'].shape)}; expected ({numel},)")


def pack_state(state: State | None) -> dict[str, Any]:
    """A program's state as a plain mapping: the name of its class, and its fields by name."""
    packed = {
        name: [_pack_item(item) for item in value] if isinstance(value, tuple) else _pack_item(value)
        for name, value in fields_of(state).items()
    }
    return {"kind": None if state is None else type(state).__name__, "fields": packed}


def _pack_item(item: Any) -> dict[str, Any]:
    value = item.value if isinstance(item, Ticket) else item
    if isinstance(value, Gradient):
        value = {"flat": value.flat, "step": value.step, "version": value.version, "bucket": value.bucket}
    return {"ticket": isinstance(item, Ticket), "value": value}


def holds_state(packed: dict[str, Any]) -> bool:
    """Return True if a packed state has a ticket, gradient, tensor or number."""
    lists = (value if isinstance(value, list) else [value] for value in packed["fields"].values())
    return any(item["ticket"] or item["value"] is not None for items in lists for item in items)


def unpack_state(packed: dict[str, Any], algorithm: Algorithm, replica: Replica) -> State | None:
    """Invert `pack_state`: gradients are in the replica's buffers again, and all tickets are complete."""
    owners: dict[int, Gradient] = {}  # step -> the gradient whose buckets are in the state

    def restore(item: dict[str, Any]) -> Any:
        value = item["value"]
        if isinstance(value, dict):
            _check_gradient(value, replica)
            value = replica.gradient_from(value["flat"], value["step"], value["version"], value["bucket"], owners)
        value = placed(value, replica.layout.device)
        return Ticket.completed(value) if item["ticket"] else value

    if packed["kind"] is None:
        return None
    given = {
        name: tuple(map(restore, value)) if isinstance(value, list) else restore(value)
        for name, value in packed["fields"].items()
    }
    kind = algorithm.requires.state
    if kind is None or packed["kind"] != kind.__name__ or given.keys() != {item.name for item in fields(kind)}:
        raise ConfigError(
            f"the checkpoint keeps the state {packed['kind']} of another version of {type(algorithm).__name__}: train "
            "again from the start"
        )
    return kind(**given)
