"""Tries the Triton kernels on a GPU."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch


@cache
def tried(device: torch.device) -> ModuleType | None:
    """Return `triton_kernels` if one of them works on this device; warn if Triton is installed and it does not.

    Triton comes with torch's builds for CUDA. It is imported and tried at the first values on a GPU.
    """
    if find_spec("triton") is None:
        return None
    try:
        from workbench.codecs import triton_kernels

        halves = torch.zeros(1, dtype=torch.bfloat16, device=device)
        triton_kernels.halve(torch.ones(1, device=device), halves.view(torch.uint8), nearest=False)
        if halves.item() != 1:
            raise RuntimeError(f"1 was encoded as {halves.item()}")
    except Exception as error:  # noqa: BLE001 - torch's operations do the same without Triton
        warnings.warn(
            f"Triton makes no kernels for {device} ({error}): codecs use torch's operations, with more passes over "
            "memory. "
            "It needs a C compiler and a GPU that it supports.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_kernels
