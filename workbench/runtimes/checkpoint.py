"""What a rank keeps when it stops at a step's end, and how it goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from workbench.errors import ConfigError
from workbench.gradients import Gradient
from workbench.ops import EndStep, Ticket
from workbench.program import Algorithm, Context, complete
from workbench.replica import Replica


def take_checkpoint(algorithm: Algorithm, replica: Replica, num_workers: int, end: EndStep, memory: dict[str, Tensor]) -> dict[str, Any]:
    """Everything needed to go on from this step, as tensors and plain values that `torch.load(weights_only=True)` reads.

    The tickets of the program's state must be complete. Tensors are the replica's own: save or copy them before it goes on.
    """
    return {
        "step": end.step,
        "method": type(algorithm).__name__,
        "num_workers": num_workers,
        "layout": _layout_of(replica),
        "replica": replica.state(),
        "program": _pack(end.state),
        "memory": dict(memory),
    }


def resume(saved: dict[str, Any], algorithm: Algorithm, replica: Replica, ctx: Context) -> None:
    """Put replica and context where the checkpoint was taken. The method's settings may differ, but not how gradients lie.

    Raises:
        ConfigError: it is of another method, number of ranks, model or bucket size.
    """
    now = {"method": type(algorithm).__name__, "num_workers": ctx.num_workers, "layout": _layout_of(replica)}
    names = {"method": "method", "num_workers": "number of ranks", "layout": "model, or with another bucket size"}
    for key, value in now.items():
        if saved[key] != value:
            what = "" if key == "layout" else f": {saved[key]!r}, and not {value!r}"
            raise ConfigError(f"the stopped run cannot be resumed with another {names[key]}{what}")
    replica.load(saved["replica"])
    ctx.first_step, ctx.resumed = saved["step"] + 1, _unpack(saved["program"], replica)
    ctx.memory.update({name: value.clone() for name, value in saved["memory"].items()})


def begin_again(ctx: Context, end: EndStep) -> None:
    """The same in the rank that goes on without a checkpoint: the context of a program that begins behind this step.

    The tickets of the state must be complete.
    """
    ctx.first_step, ctx.resumed = end.step + 1, complete(end.state) or None


def _layout_of(replica: Replica) -> list[str]:
    return [*replica.layout.describe(), f"{replica.layout.numel} elements"]


def _pack(state: tuple[Any, ...]) -> list[Any]:
    packed: list[Any] = []
    for item in state:
        value = item.value if isinstance(item, Ticket) else item
        if isinstance(value, Gradient):
            value = {"flat": value.flat.clone(), "step": value.step, "version": value.version, "bucket": value.bucket}
        packed.append({"ticket": isinstance(item, Ticket), "value": value})
    return packed


def _unpack(packed: list[Any], replica: Replica) -> tuple[Any, ...]:
    """The inverse: gradients lie in the replica's buffers again, tickets are completed ones."""

    owners: dict[int, Gradient] = {}  # step -> the gradient whose buckets are in the state

    def restore() -> Iterator[Any]:
        for item in packed:
            value = item["value"]
            if isinstance(value, dict):
                value = replica.gradient_from(value["flat"], value["step"], value["version"], value["bucket"], owners)
            yield Ticket.completed(value) if item["ticket"] else value

    return tuple(restore())
