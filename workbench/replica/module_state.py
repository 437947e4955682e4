"""A module's state that is no parameter: its buffers, and what `get_extra_state` of its parts returns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from workbench.errors import ConfigError

EXTRA_STATE = "_extra_state"  # the end of its name in a state dict


@final
class ModuleState:
    """The buffers and the extra state of a model, to copy and to restore.

    Raises:
        ConfigError: a value cannot be copied between ranks, or into a checkpoint and back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._with_extra = [module for module in model.modules() if _has_extra_state(module)]
        for name, buffer in model.named_buffers():
            _check_buffer(name, buffer)
        for name, module in model.named_modules():
            if _has_extra_state(module):
                _check_extra_state(name or type(module).__name__, module)

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers themselves, of any type, also those that no state dict has."""
        return list(self._model.buffers())

    def pack_extra_state(self) -> list[Tensor]:
        """Return the extra state as bytes, in one tensor; an empty list if there is none."""
        return [pack_extra_state([module.get_extra_state() for module in self._with_extra])] if self._with_extra else []

    def unpack_extra_state(self, packed: Tensor) -> None:
        """Set the extra state to `pack_extra_state`."""
        for module, state in zip(self._with_extra, unpack_extra_state(packed), strict=True):
            module.set_extra_state(state)

    def copy(self) -> list[Tensor]:
        """Return a copy of all of it."""
        return [*(buffer.detach().clone() for buffer in self.buffers), *self.pack_extra_state()]

    @torch.no_grad()
    def load(self, copied: Sequence[Tensor]) -> None:
        """Restore what `copy` returned."""
        buffers = self.buffers
        for buffer, value in zip(buffers, copied, strict=False):
            buffer.copy_(value)
        for packed in copied[len(buffers) :]:
            self.unpack_extra_state(packed)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the state at the end of the block."""
        copied = self.copy()
        try:
            yield
        finally:
            self.load(copied)


@final
class FirstBuffers:
    """Rank 0's buffers, with which all simulated workers begin a step: see `program.shares_buffers`.

    Args:
        state: rank 0's.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._step = -1
        self._values: list[Tensor] = []

    @torch.no_grad()
    def copy_to(self, state: ModuleState, step: int) -> None:
        """Copy them into a worker's model, before its step. The first worker's call for a step takes their values."""
        if step != self._step:  # all workers have ended the step before, and none has begun this one
            self._step, self._values = step, [buffer.clone() for buffer in self._state.buffers]
        for buffer, value in zip(state.buffers, self._values, strict=True):
            buffer.copy_(value)


def pack_extra_state(state: Any) -> Tensor:
    """Return tensors and plain values as bytes, (n,) uint8."""
    held = io.BytesIO()
    torch.save(state, held)
    return torch.frombuffer(bytearray(held.getvalue()), dtype=torch.uint8)


def unpack_extra_state(packed: Tensor) -> Any:
    """Return what `pack_extra_state` packed. It runs no code of the bytes."""
    return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), weights_only=True)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _check_buffer(name: str, buffer: Tensor) -> None:
    """Refuse a buffer into which no values can be copied: those of rank 0, or of a checkpoint."""
    if buffer.layout != torch.strided:
        raise ConfigError(
            f"buffer {name} of the model is sparse, so the values of rank 0 or of a checkpoint cannot be copied into "
            "it: register its indices and its values as buffers, and make the sparse tensor in forward()"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        raise ConfigError(
            f"buffer {name} of the model was made by expand(), so its elements share memory and no values can be "
            "copied into it: register the expanded tensor's contiguous()"
        )


def _check_extra_state(name: str, module: nn.Module) -> None:
    """Refuse extra state that cannot be saved and loaded."""
    if type(module).set_extra_state is nn.Module.set_extra_state:
        raise ConfigError(
            f"{name} of the model has get_extra_state() and no set_extra_state(), so a checkpoint cannot be loaded: "
            "add it, or register tensors as buffers"
        )
    try:
        unpack_extra_state(pack_extra_state(module.get_extra_state()))
    except Exception as error:  # its objects may raise any error
        raise ConfigError(
            f"{name} of the model returns extra state that cannot be saved ({type(error).__name__}): "
            "get_extra_state() must return tensors and plain values"
        ) from error
