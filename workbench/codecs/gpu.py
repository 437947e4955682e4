"""Whether a codec's work is done by kernels of its own on a GPU, or by torch's operations."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def kernels(values: Tensor) -> ModuleType | None:
    """`triton_kernels`, if these values are float32, side by side and on a GPU for which Triton makes kernels; else None.

    Triton comes with torch's builds for CUDA. It is imported, and tried, when the first such values are met, and not before.
    """
    if not values.is_cuda or values.dtype != torch.float32 or not values.is_contiguous():
        return None
    return _tried(values.device)


@cache
def _tried(device: torch.device) -> ModuleType | None:
    """The kernels, if one of them works on this device; a warning if Triton is there and it does not."""
    if find_spec("triton") is None:
        return None
    try:
        from workbench.codecs import triton_kernels

        halves = torch.zeros(1, dtype=torch.bfloat16, device=device)
        triton_kernels.halve(torch.ones(1, device=device), halves.view(torch.uint8), nearest=False)
        if halves.item() != 1:
            raise RuntimeError(f"1 was encoded as {halves.item()}")
    except Exception as error:  # noqa: BLE001 - whatever Triton lacks here, torch's operations do the same without it
        warnings.warn(
            f"Triton makes no kernels for {device} ({error}): codecs take torch's operations, more passes over memory. "
            "It needs a C compiler and a GPU that it supports.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_kernels
