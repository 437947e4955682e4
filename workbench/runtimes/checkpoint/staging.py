"""Staging buffers: copies of a tree of tensors and plain values, in memory that is allocated once."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor


@final
class StagingBuffers:
    """Host memory for copies. Each `take` overwrites the previous copy.

    >>> weights = torch.zeros(3)
    >>> kept = StagingBuffers().take({"weights": weights, "step": 4})
    >>> _ = weights.fill_(1.0)
    >>> kept
    {'weights': tensor([0., 0., 0.]), 'step': 4}
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._known: dict[Any, int] = {}

    @torch.no_grad()
    def take(self, tree: Any) -> Any:
        """A copy of the tree with its tensors in these buffers. A tensor that occurs twice is copied once."""
        self._sources, self._known = [], {}
        copy = self._walk(tree)
        del self._buffers[len(self._sources) :]
        if self._sources:
            torch._foreach_copy_(self._buffers, self._sources)
        self._sources, self._known = [], {}
        return copy

    def _walk(self, item: Any) -> Any:
        match item:
            case Tensor():
                return self._place(item.detach())
            case OrderedDict():  # a module's state dict, which has the modules' versions as an attribute
                copy = OrderedDict((key, self._walk(value)) for key, value in item.items())
                copy.__dict__.update(deepcopy(item.__dict__))
                return copy
            case dict():
                return {key: self._walk(value) for key, value in item.items()}
            case list():
                return [self._walk(value) for value in item]
            case tuple():
                return tuple(self._walk(value) for value in item)
            case None | bool() | int() | float() | str():
                return item
            case _:
                return deepcopy(item)

    def _place(self, source: Tensor) -> Tensor:
        if source.layout != torch.strided:
            return source.cpu().clone()
        key = (source.data_ptr(), source.shape, source.stride(), source.dtype, source.device)
        number = self._known.get(key) if source.numel() else None
        if number is not None:
            return self._buffers[number]
        number = self._known[key] = len(self._sources)
        self._sources.append(source)
        fits = number < len(self._buffers) and _same_layout(self._buffers[number], source)
        if not fits:
            buffer = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
            self._buffers[number : number + 1] = [buffer]
        return self._buffers[number]


def _same_layout(buffer: Tensor, source: Tensor) -> bool:
    return buffer.shape == source.shape and buffer.dtype == source.dtype and buffer.is_pinned() == source.is_cuda
