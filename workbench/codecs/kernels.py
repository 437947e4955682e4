"""Selects what encodes float32 values: Triton's kernels on a GPU, compiled ones on a CPU, or torch's operations.

All give the same bits, so ranks with different ones may be mixed. A codec has its formula in torch's operations, and
first asks here for a kernel.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from workbench.codecs import compiled, compiler, gpu

MOST_THREADS = 2  # torch's operations use all threads, a compiled kernel uses one: with more of them torch is as fast


def of(values: Tensor) -> ModuleType | None:
    """Return the kernels for levels and halves, `triton_kernels` or `compiled`; None: use torch's operations."""
    if values.dtype != torch.float32 or not values.is_contiguous():
        return None
    if values.is_cuda:
        return gpu.tried(values.device)
    return compiled if torch.get_num_threads() <= MOST_THREADS and on_cpu(values) else None


def on_cpu(values: Tensor) -> bool:
    """Return True if `compiled` can process these values."""
    return (
        values.device.type == "cpu"
        and values.dtype == torch.float32
        and values.is_contiguous()
        and compiler.library().functions is not None
    )
